package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

// This file is about what vLLM takes as multipart forms. It goes through untouched, whatever it looks like.

const (
	boundary = `--a'()+_,./:=?b`
	formType = `multipart/form-data; boundary="` + boundary + `"`
)

// audioForm is an upload as it stands on the wire, with much in it that is something else elsewhere.
func audioForm() string {
	part := func(head, content string) string {
		return "--" + boundary + "\r\nContent-Disposition: form-data; " + head + "\r\n\r\n" + content + "\r\n"
	}
	var audio strings.Builder
	for i := range 256 {
		audio.WriteByte(byte(i))
	}
	audio.WriteString("\r\n\r\n\x00\n--" + boundary[:5] + "\r\n{\"stream\":true}")
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 << 10 {
		audio.WriteByte(byte(r.Uint32()))
	}
	return part(`name="model"`, "tiny-audio") + part(`name="stream"`, "true") + part(`name="stream_include_usage"`, "true") +
		part(`name="timings_per_token"`, "true") + part("name=\"file\"; filename=\"\xe9 \\\"a\\\".wav\"\r\nContent-Type: audio/wav", audio.String()) +
		"--" + boundary + "--\r\nbehind it"
}

// arrived is a request as vLLM got it.
type arrived struct {
	contentType string
	length      int64
	coding      []string
	body        string
}

// gradual is an upstream that answers in pieces, each of them only when the client has the one before.
type gradual struct {
	*httptest.Server
	pieces []string
	came   chan arrived
	seen   chan struct{}
	left   chan struct{} // has one when a client did not wait
}

func startGradual(t *testing.T, header http.Header, pieces []string) *gradual {
	t.Helper()
	g := &gradual{pieces: pieces, came: make(chan arrived, 1), seen: make(chan struct{}, 1), left: make(chan struct{}, 1)}
	g.Server = startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		g.came <- arrived{r.Header.Get("Content-Type"), r.ContentLength, r.TransferEncoding, string(body)}
		w.Header()["Date"] = []string{"x"}
		for name, values := range header {
			w.Header()[name] = values
		}
		flush := http.NewResponseController(w).Flush
		for _, piece := range pieces {
			_, _ = io.WriteString(w, piece)
			_ = flush()
			select {
			case <-g.seen:
			case <-r.Context().Done():
				select {
				case g.left <- struct{}{}:
				default:
				}
				return
			}
		}
	})
	return g
}

// ask sends a request to url, reads the answer piece by piece, and returns its headers, and what vLLM got.
func (g *gradual) ask(t *testing.T, r *rig, name, url, contentType string, body io.Reader) (http.Header, arrived) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := r.http.Do(req)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	defer resp.Body.Close()
	for i, piece := range g.pieces {
		got := make([]byte, len(piece))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != piece {
			t.Fatalf("%s: piece %d of %d, before vLLM sends the next: %q, %v, want %q", name, i, len(g.pieces), got, err, piece)
		}
		g.seen <- struct{}{}
	}
	if rest, err := io.ReadAll(resp.Body); len(rest) > 0 || err != nil || resp.ContentLength != -1 {
		t.Errorf("%s: %q behind the end, %v; length %d", name, rest, err, resp.ContentLength)
	}
	return resp.Header, <-g.came
}

// transcription is a streamed answer as vLLM 0.32 sends it: chunks much like those of a chat, with usage as it was asked for.
func transcription(object string) string {
	head := `data: {"id":"transcribe-1","object":"` + object + `","created":1795962431,"model":"tiny-audio","choices":[`
	usage := func(n int) string {
		return fmt.Sprintf(`],"usage":{"prompt_tokens":12,"total_tokens":%d,"completion_tokens":%d}`, 12+n, n)
	}
	return head + `{"delta":{"content":" é \"finish_reason\":\"stop\",\"usage\":{"}}]}` + "\n\n" +
		head + `{"delta":{"content":" b"}}` + usage(4) + "}\n\n" +
		head + `{"delta":{"content":""},"finish_reason":"stop","stop_reason":null}` + usage(5) + "}\n\n" +
		head + usage(5) + "," + nativeMember + "}\n\n" + doneEvent
}

// inPiecesOf cuts s.
func inPiecesOf(s string, n int) (pieces []string) {
	for len(s) > n {
		pieces, s = append(pieces, s[:n]), s[n:]
	}
	return append(pieces, s)
}

// TestTranscriptionStream: an upload reaches vLLM as it is, and each piece of the streamed answer the client before there is
// another, as it is too: it looks like a chat, but has no timings.
func TestTranscriptionStream(t *testing.T) {
	form := audioForm()
	for path, object := range map[string]string{"/v1/audio/transcriptions": "transcription.chunk", "/v1/audio/translations": "translation.chunk"} {
		answer := transcription(object)
		events := strings.SplitAfter(answer, "\n\n")
		for cut, pieces := range map[string][]string{
			"events":      events[:len(events)-1], // the last is what follows the last blank line
			"77 bytes":    inPiecesOf(answer, 77), // with the end of one event and the beginning of another
			"single byte": inPiecesOf(answer, 1),
		} {
			g := startGradual(t, http.Header{"Content-Type": {"text/event-stream; charset=utf-8"}, "X-Request-Id": {"1"}}, pieces)
			r := newRig(t, g.URL)
			for _, length := range []int64{int64(len(form)), -1} {
				name := fmt.Sprintf("%s, %s, length %d", path, cut, length)
				want := arrived{formType, length, nil, form}
				if length < 0 {
					want.coding = []string{"chunked"}
				}
				var headers []http.Header
				for _, base := range []string{r.url, g.URL} {
					body := io.Reader(strings.NewReader(form))
					if length < 0 {
						body = struct{ io.Reader }{body} // whose length nobody knows
					}
					header, got := g.ask(t, r, name, base+path, formType, body)
					headers = append(headers, header)
					if !reflect.DeepEqual(got, want) {
						t.Errorf("%s: vLLM got %q of %d bytes, %v, with %d of %d bytes as they were", name, got.contentType, got.length, got.coding, common(got.body, form), len(form))
					}
				}
				if !reflect.DeepEqual(headers[0], headers[1]) {
					t.Errorf("%s: headers %v, straight %v", name, headers[0], headers[1])
				}
			}
			r.wantMetric(2, "requests_total", "endpoint", string(other), "code", "200")
			r.wantMetric(0, "timings_total")
			r.wantMetric(0, "unedited_total")
			r.wantMetric(0, "client_disconnects_total")
		}
	}
}

// common returns how many bytes two strings begin with in common.
func common(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// TestTranscriptionWhole: so does an answer that comes whole, in every form that vLLM has for it, and what other endpoints
// make of a form or answer in bytes that are no text.
func TestTranscriptionWhole(t *testing.T) {
	form := audioForm()
	for name, test := range map[string]struct {
		path, content string
		status        int
		body          string
	}{
		"transcription":       {"/v1/audio/transcriptions", "application/json", 200, `{"text":" a é","usage":{"type":"duration","seconds":3}}`},
		"usage as of a chat":  {"/v1/audio/transcriptions", "application/json", 200, `{"choices":[{"index":0}],"text":"a",` + codedUsage + `,` + nativeMember + `}`},
		"verbose":             {"/v1/audio/transcriptions", "application/json", 200, "{\n \"duration\": \"3.0\", \"language\":\"en\",\"text\":\"a\",\"segments\":[{\"id\":0,\"tokens\":[1,2]}]}\n"},
		"subtitles":           {"/v1/audio/transcriptions", "text/plain; charset=utf-8", 200, "1\r\n00:00:00,000 --> 00:00:03,000\r\n\"usage\":{\r\n"},
		"translation":         {"/v1/audio/translations", "application/json", 200, `{"text":"a"}`},
		"not audio":           {"/v1/audio/transcriptions", "application/json", 400, `{"error":{"message":"Invalid or unsupported audio file.","type":"BadRequestError","param":null,"code":400}}`},
		"model without audio": {"/v1/audio/translations", "application/json", 404, `{"detail":"Not Found"}`},
		"speech":              {"/v1/audio/speech", "audio/wav", 200, form[len(form)/2:]},
		"an empty answer":     {"/v1/audio/transcriptions", "application/json", 200, ""},
	} {
		var came arrived
		up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
			if notAVLLM(w, r) {
				return
			}
			body, _ := io.ReadAll(r.Body)
			came = arrived{r.Header.Get("Content-Type"), r.ContentLength, r.TransferEncoding, string(body)}
			w.Header()["Date"] = []string{"x"}
			w.Header().Set("Content-Type", test.content)
			w.Header().Set("Content-Length", fmt.Sprint(len(test.body)))
			w.WriteHeader(test.status)
			_, _ = io.WriteString(w, test.body)
		})
		r := newRig(t, up.URL)
		direct := *r
		direct.url = up.URL
		got := r.send(http.MethodPost, test.path, form, "Content-Type", formType)
		if want := (arrived{formType, int64(len(form)), nil, form}); !reflect.DeepEqual(came, want) {
			t.Errorf("%s: vLLM got %q of %d bytes, %v, with %d of %d bytes as they were", name, came.contentType, came.length, came.coding, common(came.body, form), len(form))
		}
		want := direct.send(http.MethodPost, test.path, form, "Content-Type", formType)
		if got.status != test.status || got.body != test.body || got.err != nil || got.header.Get("Content-Length") != fmt.Sprint(len(test.body)) || !reflect.DeepEqual(got.header, want.header) {
			t.Errorf("%s: %d %v %q, %v; straight %v", name, got.status, got.header, got.body, got.err, want.header)
		}
		r.wantMetric(0, "timings_total")
		r.wantMetric(0, "unedited_total")
	}
}

// TestSpeechStream: what is no event stream is the client's at once too, where the answer gets no timings.
func TestSpeechStream(t *testing.T) {
	g := startGradual(t, http.Header{"Content-Type": {"audio/pcm"}}, inPiecesOf(audioForm()[:50<<10], 999))
	r := newRig(t, g.URL)
	const request = `{"input":"a","stream_format":"audio","stream":true}`
	_, got := g.ask(t, r, "speech", r.url+"/v1/audio/speech", "application/json", strings.NewReader(request))
	if want := (arrived{"application/json", int64(len(request)), nil, request}); !reflect.DeepEqual(got, want) {
		t.Errorf("vLLM got %+v", got)
	}
}

// TestTranscriptionClientLeaves: vLLM sees it when the client of a streamed answer leaves whose request streamed through.
func TestTranscriptionClientLeaves(t *testing.T) {
	for _, known := range []bool{true, false} {
		g := startGradual(t, http.Header{"Content-Type": {"text/event-stream"}}, []string{tokenEvent, tokenEvent})
		r := newRig(t, g.URL)
		body := io.Reader(strings.NewReader(audioForm()))
		if !known {
			body = struct{ io.Reader }{body}
		}
		ctx, leave := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/audio/transcriptions", body)
		req.Header.Set("Content-Type", formType)
		resp, err := r.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, len(tokenEvent))); err != nil {
			t.Fatal(err)
		}
		leave()
		resp.Body.Close()
		select {
		case <-g.left:
		case <-time.After(time.Second):
			t.Errorf("length known %v: vLLM does not see within a second that the client left", known)
		}
		r.quiet()
		r.wantMetric(1, "client_disconnects_total")
		r.wantMetric(0, "upstream_errors_total")
		r.wantMetric(1, "requests_total", "endpoint", string(other), "code", "200")
	}
}

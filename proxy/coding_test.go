package proxy

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/vllm-timings/vllm-timings/timings"
)

// flusher is a writer of a content coding.
type flusher interface {
	io.WriteCloser
	Flush() error
}

// codings are those that are understood, by how they are made. HTTP's deflate is zlib's format; some servers send it bare.
var codings = map[string]struct {
	name string
	on   func(io.Writer) flusher
}{
	"gzip":      {"gzip", func(w io.Writer) flusher { return gzip.NewWriter(w) }},
	"x-gzip":    {"X-GZIP", func(w io.Writer) flusher { return gzip.NewWriter(w) }},
	"zlib":      {"deflate", func(w io.Writer) flusher { return zlib.NewWriter(w) }},
	"zlib best": {"deflate", func(w io.Writer) flusher { z, _ := zlib.NewWriterLevel(w, zlib.BestCompression); return z }},
	"raw":       {"deflate", func(w io.Writer) flusher { z, _ := flate.NewWriter(w, flate.DefaultCompression); return z }},
}

func coded(on func(io.Writer) flusher, plain string) string {
	var b strings.Builder
	z := on(&b)
	_, _ = io.WriteString(z, plain)
	_ = z.Close()
	return b.String()
}

// uncoded writes what some servers call a coding too.
type uncoded struct{ io.Writer }

func (uncoded) Flush() error { return nil }
func (uncoded) Close() error { return nil }

const (
	codedUsage  = `"usage":{"prompt_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}`
	codedPlain  = `{"choices":[{"index":0,"message":{"content":"é"}}],` + codedUsage + `}`
	codedAnswer = `{"choices":[{"index":0,"message":{"content":"é"}}],` + codedUsage + `,` + nativeMember + `}`
)

func encodedAs(coding, contentType, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", coding)
		w.Header().Set("Vary", "Accept-Encoding")
		w.Header().Set("X-Asked", strings.Join(r.Header.Values("Accept-Encoding"), "|"))
		typed(contentType, body)(w, r)
	}
}

// TestCodedAnswers: an answer in a coding that is understood has timings and goes on without the coding, whole and
// streamed; the client's Accept-Encoding reaches vLLM as it is, or is absent as it is.
func TestCodedAnswers(t *testing.T) {
	events := `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}` + "\n\n"
	stream := events + `data: {"choices":[],` + codedUsage + `,` + nativeMember + "}\n\n" + doneEvent
	m := startMeter(t, nil)
	r := m.rig(t)
	all := maps.Clone(codings)
	all["identity"] = struct {
		name string
		on   func(io.Writer) flusher
	}{"identity", func(w io.Writer) flusher { return uncoded{w} }}
	for kind, c := range all {
		for _, accept := range [][]string{nil, {"gzip, br, zstd"}, {"gzip;q=0.5, deflate", "identity"}, {"identity;q=0.1"}, {"*"}, {"identity, *;q=0"}, {"*;q=0, identity;q=0.5"}} {
			var header []string
			for _, v := range accept {
				header = append(header, "Accept-Encoding", v)
			}
			for _, content := range []string{"application/json", "text/event-stream"} {
				name := fmt.Sprint(kind, " ", accept, " ", content)
				answer, want := codedAnswer, codedPlain
				if content == "text/event-stream" {
					answer, want = stream, events+doneEvent
				}
				m.answer = encodedAs(c.name, content, coded(c.on, answer))
				a := r.send(http.MethodPost, string(chat), fmt.Sprintf(`{"messages":[],"stream":%v}`, content != "application/json"), header...)
				if a.err != nil {
					t.Errorf("%s: %v", name, a.err)
				}
				wantMember(t, name, a.body, want, backgroundFigures)
				if a.header.Get("Content-Encoding") != "" || a.header.Get("Vary") != "Accept-Encoding" {
					t.Errorf("%s: headers %v", name, a.header)
				}
				if got := a.header.Get("Content-Length"); content == "application/json" && got != fmt.Sprint(len(a.body)) || content != "application/json" && got != "" {
					t.Errorf("%s: Content-Length %q of %d bytes", name, got, len(a.body))
				}
				if got := a.header.Get("X-Asked"); got != strings.Join(accept, "|") {
					t.Errorf("%s: vLLM was asked for %q", name, got)
				}
			}
		}
	}
}

// TestCodedUntouched: what is not understood, what is not to be edited and what the client would not take without its
// coding goes through as it came.
func TestCodedUntouched(t *testing.T) {
	gz := func(s string) string { return coded(codings["gzip"].on, s) }
	for _, test := range []struct {
		name, coding, accept, body, reason string
		status                             int
	}{
		{"br", "br", "br", "\x0b\x02\x80" + codedAnswer, "content_encoding", 200},
		{"zstd", "zstd", "gzip, br, zstd", "\x28\xb5\x2f\xfd" + codedAnswer, "content_encoding", 200},
		{"two", "gzip, gzip", "gzip", gz(gz(codedAnswer)), "content_encoding", 200},
		{"unknown", "x", "", codedAnswer, "content_encoding", 200},
		{"no identity", "gzip", "gzip, identity;q=0", gz(codedAnswer), "content_encoding", 200},
		{"no identity, digits", "gzip", "gzip, identity ; q=0.000", gz(codedAnswer), "content_encoding", 200},
		{"nothing else", "gzip", "gzip, *;q=0", gz(codedAnswer), "content_encoding", 200},
		{"no usage", "gzip", "gzip", gz(`{"choices":[]}`), "no_usage", 200},
		{"timings are there", "gzip", "gzip", gz(`{"choices":[],"timings":{"x":1},` + codedUsage + `}`), "", 200},
		{"no JSON", "gzip", "gzip", gz(`{"choices":`), "invalid_json", 200},
		{"not what it says", "gzip", "gzip", codedAnswer, "content_encoding", 200},
		{"cut", "gzip", "gzip", gz(codedAnswer)[:20], "content_encoding", 200},
		{"more behind", "gzip", "gzip", gz(codedAnswer) + "x", "content_encoding", 200},
		{"empty", "gzip", "gzip", "", "invalid_json", 200},
		{"an error", "gzip", "gzip", gz(`{"error":{}}`), "", 503},
	} {
		m := startMeter(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", test.coding)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(test.status)
			_, _ = io.WriteString(w, test.body)
		})
		r := m.rig(t)
		var header []string
		if test.accept != "" {
			header = []string{"Accept-Encoding", test.accept}
		}
		a := r.send(http.MethodPost, string(chat), `{"messages":[]}`, header...)
		if a.body != test.body || a.err != nil || a.status != test.status || a.header.Get("Content-Encoding") != test.coding || a.header.Get("Content-Length") != fmt.Sprint(len(test.body)) {
			t.Errorf("%s: %d, %v, %q, %v", test.name, a.status, a.header, a.body, a.err)
		}
		if test.reason != "" {
			r.wantMetric(1, "unedited_total", "reason", test.reason)
		}
	}
}

// TestUnknownCodingAtOnce: a streamed answer in a coding that is not understood goes through as it comes, piece by piece, at every
// endpoint, with its headers, whether its client is said to take it or not.
func TestUnknownCodingAtOnce(t *testing.T) {
	pieces := []string{"\x28\xb5\x2f\xfd\x04", "\n\ndata: [DONE]\n\n", "\x00\x01", tokenEvent + finishEvent + usageEvent + doneEvent, "\r", "\xff"}
	for _, coding := range []string{"br", "zstd", "gzip, br", "compress"} {
		g := startGradual(t, http.Header{"Content-Type": {"text/event-stream"}, "Content-Encoding": {coding}, "Vary": {"Accept-Encoding"}}, pieces)
		r := newRig(t, g.URL)
		for i, path := range []endpoint{chat, completions, responses, messages, invocations, "/v1/embeddings"} {
			name := fmt.Sprint(coding, " ", path)
			want, _ := g.ask(t, r, name, g.URL+string(path), "application/json", strings.NewReader(streamed))
			got, _ := g.ask(t, r, name, r.url+string(path), "application/json", strings.NewReader(streamed))
			got.Del("Connection") // that it ends with the answer
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: headers %v, straight %v", name, got, want)
			}
			r.wantMetric(float64(min(i+1, 5)), "unedited_total", "reason", "content_encoding")
		}
		r.wantMetric(0, "client_disconnects_total")
	}
}

// TestCodedBomb: what is small and becomes more than may be edited goes through as it came.
func TestCodedBomb(t *testing.T) {
	big := coded(codings["gzip"].on, `{"x":"`+strings.Repeat("0", DefaultMaxEvent)+`",`+codedUsage+`}`)
	m := startMeter(t, encodedAs("gzip", "application/json", big))
	r := m.rig(t)
	if a := r.send(http.MethodPost, string(chat), `{"messages":[]}`); a.body != big {
		t.Errorf("%d bytes, not %d", len(a.body), len(big))
	}
	r.wantMetric(1, "unedited_total", "reason", "answer_too_large")
}

// TestCodedEventsAtOnce: an event that vLLM's proxy has flushed is the client's before there is another.
func TestCodedEventsAtOnce(t *testing.T) {
	for _, c := range codings {
		next := make(chan string)
		m := startMeter(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", c.name)
			w.Header().Set("Content-Type", "text/event-stream")
			flush := http.NewResponseController(w).Flush
			_ = flush()
			z := c.on(w)
			for event := range next {
				_, _ = io.WriteString(z, event)
				_ = z.Flush()
				_ = flush()
			}
			_ = z.Close()
		})
		r := m.rig(t)
		l := r.start(string(chat), `{"messages":[],"stream":true}`)
		l.until(t, "headers")
		for i := range 5 {
			text := fmt.Sprintf(`"content":"%d"`, i)
			next <- `data: {"choices":[{"index":0,"delta":{` + text + `},"finish_reason":null}]}` + "\n\n"
			l.until(t, text) // or the test ends in 10 s
		}
		next <- finishEvent
		next <- `data: {"choices":[],` + codedUsage + `,` + nativeMember + "}\n\n"
		l.until(t, `"timings":{"cache_n":4`)
		next <- doneEvent
		l.until(t, "[DONE]")
		close(next)
		for range l.lines { // the end of the answer comes too
		}
	}
}

// TestCodedStreamBreaks: an answer that breaks off in its coding reaches the client as a broken one, with what came before.
func TestCodedStreamBreaks(t *testing.T) {
	random := make([]byte, 2000) // that cannot be made shorter
	for i := range random {
		random[i] = 'a' + byte(rand.IntN(26))
	}
	plain := tokenEvent + `data: {"choices":[{"index":0,"delta":{"content":"` + string(random) + `"},"finish_reason":null}]}` + "\n\n"
	for kind, c := range codings {
		var b bytes.Buffer
		z := c.on(&b)
		_, _ = io.WriteString(z, plain)
		_ = z.Flush()
		flushed := b.Len()
		_, _ = io.WriteString(z, finishEvent+`data: {"choices":[],`+codedUsage+`,`+nativeMember+"}\n\n"+doneEvent)
		_ = z.Close()
		whole := b.Bytes()
		understood := map[string]coding{"gzip": gzipCoding, "x-gzip": gzipCoding}[kind]
		if understood == identity {
			understood = deflateCoding
		}
		// Wherever it is cut, and however it is read.
		for _, n := range []int{0, 1, 2, 5, flushed, len(whole) - 5, len(whole) - 1, len(whole)} {
			for _, end := range []error{io.EOF, io.ErrUnexpectedEOF} {
				src := io.MultiReader(iotest.OneByteReader(bytes.NewReader(whole[:n])), failing{end})
				got, err := throughStream(t, testExchange(plan{endpoint: chat}, timings.Native), understood.decode(io.NopCloser(src)), nil, 300)
				switch complete := n == len(whole); {
				case n >= flushed && !strings.HasPrefix(got, plain):
					t.Errorf("%s, %d of %d bytes: what came before is lost: %.100q", kind, n, len(whole), got)
				case complete && end == io.EOF && (err != io.EOF || !strings.Contains(got, `"timings"`)):
					t.Errorf("%s, whole: %v, %q", kind, err, got)
				case complete && end != io.EOF && err != end:
					t.Errorf("%s, whole, but its body is not: ended in %v", kind, err)
				case n > 0 && n < len(whole) && kind != "raw" && err != io.ErrUnexpectedEOF: // bare deflate has no sum at its end
					t.Errorf("%s, %d of %d bytes, then %v: ended in %v", kind, n, len(whole), end, err)
				}
			}
		}
	}
}

// TestCodedConnection: the connection of an answer in a coding is used again. (A stream has one of its own.)
func TestCodedConnection(t *testing.T) {
	const plain = `{"choices":[{}],"usage":{"prompt_tokens":3}}`
	for kind, c := range codings {
		from := map[string]bool{}
		m := startMeter(t, func(w http.ResponseWriter, r *http.Request) {
			from[r.RemoteAddr] = true
			w.Header().Set("Content-Encoding", c.name)
			w.Header().Set("Content-Type", "application/json")
			_ = http.NewResponseController(w).Flush() // so that its length is not told
			_, _ = io.WriteString(w, coded(c.on, plain))
		})
		r := m.rig(t)
		for range 5 { // one after the other
			if a := r.send(http.MethodPost, string(chat), `{"messages":[]}`); a.status != http.StatusOK || a.body != coded(c.on, plain) {
				t.Errorf("%s: %q", kind, a.body)
			}
		}
		if len(from) > 2 { // the readings of metrics have one too
			t.Errorf("%s: %d connections", kind, len(from))
		}
	}
}

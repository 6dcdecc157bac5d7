package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/timings"
)

// filler is n bytes of text that nobody has to hold.
type filler int

func (f *filler) Read(p []byte) (int, error) {
	if *f == 0 {
		return 0, io.EOF
	}
	n := min(len(p), int(*f))
	copy(p[:n], bytes.Repeat([]byte("A"), n))
	*f -= filler(n)
	return n, nil
}

// TestLateContinue: vLLM tells the client to go ahead only after it was not waited for any more. The client was told then.
func TestLateContinue(t *testing.T) {
	vllm, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer vllm.Close()
	go func() {
		for {
			conn, err := vllm.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				reader := bufio.NewReader(conn)
				r, err := http.ReadRequest(reader)
				if err != nil || r.Method != http.MethodPost {
					return // what the proxy asks of itself
				}
				if first, _ := r.Body.Read(make([]byte, 1)); first != 1 {
					t.Error("no body comes")
				}
				_, _ = io.WriteString(conn, "HTTP/1.1 100 Continue\r\n\r\n")
				_, _ = io.Copy(io.Discard, r.Body)
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			}()
		}
	}()
	r := newRig(t, "http://"+vllm.Addr().String())
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(conn, "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
	reader := bufio.NewReader(conn)
	var statuses []string
	for range 2 {
		line, err := reader.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		statuses = append(statuses, line)
		if len(statuses) == 1 {
			_, _ = reader.ReadString('\n')
			_, _ = io.WriteString(conn, "body")
		}
	}
	if want := []string{"HTTP/1.1 100 Continue\r\n", "HTTP/1.1 200 OK\r\n"}; !slices.Equal(statuses, want) {
		t.Errorf("%q, want %q", statuses, want)
	}
}

// TestBigRequest: 12 MiB in a body reach vLLM whole, a client that waits for its go-ahead gets just one, and when vLLM
// answers the sidecar holds nothing of it any more.
func TestBigRequest(t *testing.T) {
	const size = 12 << 20
	const head, tail = `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,`, `"}}]}]}`
	answering, answered := make(chan int, 1), make(chan struct{})
	r := newRig(t, startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		n, _ := io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, tokenEvent)
		_ = http.NewResponseController(w).Flush()
		select {
		case answering <- int(n):
		case <-r.Context().Done():
		}
		select {
		case <-answered:
		case <-r.Context().Done(): // the test failed
		}
		_, _ = io.WriteString(w, doneEvent)
	}).URL, func(c *Config) { c.MaxRequest = size + 1<<20 })
	small := newRig(t, r.base.String(), func(c *Config) { c.MaxRequest = 1 << 20 })
	r.learned()
	small.learned()
	for _, expect := range []bool{false, true} {
		for _, test := range []struct {
			name    string
			rig     *rig
			path    string
			chunked bool
		}{
			{"chat", r, string(chat), false}, {"chat, length unknown", r, string(chat), true},
			{"chat, too large to edit", small, string(chat), false}, {"chat, too large to edit, length unknown", small, string(chat), true},
			{"another", r, "/v1/embeddings", false}, {"another, length unknown", r, "/v1/embeddings", true},
		} {
			name := fmt.Sprintf("%s, expect %v", test.name, expect)
			var before, during runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			conn, err := net.Dial("tcp", strings.TrimPrefix(test.rig.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.SetDeadline(time.Now().Add(time.Minute)) // a stall fails the test
			reader := bufio.NewReader(conn)
			header := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", test.path)
			if expect {
				header += "Expect: 100-continue\r\n"
			}
			length := len(head) + size + len(tail)
			if test.chunked {
				header += "Transfer-Encoding: chunked\r\n\r\n"
			} else {
				header += fmt.Sprintf("Content-Length: %d\r\n\r\n", length)
			}
			_, _ = io.WriteString(conn, header)
			interim := func() bool {
				line, err := reader.Peek(len("HTTP/1.1 100"))
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				return string(line) == "HTTP/1.1 100"
			}
			defer conn.Close()
			if expect {
				if !interim() {
					t.Fatalf("%s: no go-ahead", name)
				}
				for _, want := range []string{"HTTP/1.1 100 Continue\r\n", "\r\n"} {
					if line, _ := reader.ReadString('\n'); line != want {
						t.Errorf("%s: %q", name, line)
					}
				}
			}
			n := filler(size)
			body := io.MultiReader(strings.NewReader(head), &n, strings.NewReader(tail))
			if test.chunked {
				w := bufio.NewWriter(conn)
				fmt.Fprintf(w, "%x\r\n", length)
				_, _ = io.Copy(w, body)
				_, _ = io.WriteString(w, "\r\n0\r\n\r\n")
				_ = w.Flush()
			} else if _, err := io.Copy(conn, body); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			select {
			case got := <-answering:
				if got != length {
					t.Errorf("%s: %d bytes of %d came", name, got, length)
				}
			case <-time.After(30 * time.Second):
				conn.Close()
				t.Fatalf("%s: it stalls", name)
			}
			if interim() {
				t.Errorf("%s: an interim reply too many", name)
			}
			resp, err := http.ReadResponse(reader, nil)
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %v, %v", name, resp, err)
			}
			runtime.GC()
			runtime.ReadMemStats(&during)
			if held := int64(during.HeapAlloc) - int64(before.HeapAlloc); held > size/2 {
				t.Errorf("%s: %d bytes are held while vLLM answers", name, held)
			}
			if used := during.TotalAlloc - before.TotalAlloc; used > 8*size { // a buffer that doubles as it grows, and a copy with the edit
				t.Errorf("%s: %d bytes were needed", name, used)
			}
			answered <- struct{}{}
			if got, err := io.ReadAll(resp.Body); string(got) != tokenEvent+doneEvent || err != nil {
				t.Errorf("%s: %q, %v", name, got, err)
			}
			conn.Close()
		}
	}
}

// TestErrorsGoThrough: an error of vLLM's, or of a proxy before it, is the client's as it is, whatever was asked.
func TestErrorsGoThrough(t *testing.T) {
	const message = `{"error":{"message":"no","type":"BadRequestError","param":null,"code":400},"usage":{"prompt_tokens":1,"completion_tokens":1}}`
	for _, status := range []int{400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504} {
		for _, form := range []struct{ content, coding, body string }{
			{"application/json", "", message},
			{"text/plain; charset=utf-8", "", "Internal Server Error"},
			{"application/json", "gzip", coded(codings["gzip"].on, message)},
			{"text/html", "br", "\x0b\x02\x80<p>"},
			{"text/event-stream", "", "data: " + message + "\n\n" + usageEvent + doneEvent},
			{"", "", ""},
		} {
			up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if notAVLLM(w, r) {
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				for name, value := range map[string]string{"Content-Type": form.content, "Content-Encoding": form.coding, "Retry-After": "3", "Www-Authenticate": "Bearer", "Date": "x"} {
					if value != "" {
						w.Header().Set(name, value)
					}
				}
				w.WriteHeader(status)
				_, _ = io.WriteString(w, form.body)
			})
			r := newRig(t, up.URL)
			direct := *r
			direct.url = up.URL
			for _, path := range []string{string(chat), string(completions), string(responses), string(messages), string(invocations), "/v1/embeddings"} {
				for _, stream := range []bool{false, true} {
					body := fmt.Sprintf(`{"messages":[],"prompt":"x","stream":%v}`, stream)
					got, want := r.send(http.MethodPost, path, body), direct.send(http.MethodPost, path, body)
					if got.status != want.status || got.body != want.body || got.err != nil || !reflect.DeepEqual(got.header, want.header) {
						t.Errorf("%d, %s %s, %s, stream %v: got %d %v %q, want %d %v %q", status, form.content, form.coding, path, stream,
							got.status, got.header, got.body, want.status, want.header, want.body)
					}
				}
			}
		}
	}
}

// TestErrorInStream: a stream that says that it failed goes through as it is, wherever in it that stands.
func TestErrorInStream(t *testing.T) {
	const failed = `data: {"error":{"message":"bad \"usage\":{","type":"BadRequestError","code":400}}` + "\n\n"
	native := strings.TrimSuffix(usageEvent, "}\n\n") + "," + nativeMember + "}\n\n"
	for name, body := range map[string]string{
		"first": failed + doneEvent, "later": tokenEvent + failed + doneEvent, "after finish": tokenEvent + finishEvent + failed + doneEvent,
		"without end": tokenEvent + failed, "after finish, without end": tokenEvent + finishEvent + failed,
		"usage all the same": tokenEvent + finishEvent + failed + native + doneEvent, "usage before": tokenEvent + finishEvent + native + failed + doneEvent,
	} {
		for _, show := range []bool{false, true} {
			got, err := throughStream(t, testExchange(plan{endpoint: chat, showUsage: show}, timings.Native), strings.NewReader(body), []byte{30}, 200)
			want := body
			if !show { // that vLLM's usage was asked for is not for the client to see
				want = strings.Replace(body, native, "", 1)
			}
			if name == "usage before" { // it was all there when it failed
				got = ourTimings.ReplaceAllString(got, "")
				want = strings.Replace(want, ","+nativeMember, "", 1)
			}
			if got != want || err != io.EOF {
				t.Errorf("%s, usage shown %v: got %q, %v", name, show, got, err)
			}
		}
	}
}

// timed is a chat answer with usage and vLLM's metrics, and what the client that did not ask for usage gets but for timings.
func timed(events ...string) (straight, asked string) {
	all := strings.Join(events, "")
	return all + finishEvent + doneEvent, all + finishEvent + `data: {"choices":[],` + codedUsage + `,` + nativeMember + "}\n\n" + doneEvent
}

// TestLongEvents: an event of any length comes whole, and so do those behind it and the timings.
func TestLongEvents(t *testing.T) {
	for _, size := range []int{100 << 10, 5 << 20} {
		long := func(member string) string {
			return `data: {"id":"a","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}],` + member + `:"` + strings.Repeat("é", size/2) + `"}` + "\n\n"
		}
		for name, events := range map[string][]string{
			"first": {long(`"logprobs"`), tokenEvent}, "later": {tokenEvent, tokenEvent, long(`"logprobs"`), tokenEvent},
			"with what usage has": {tokenEvent, long(`"usage":null,"x"`)}, "comment": {tokenEvent, ": " + strings.Repeat("x", size) + "\n\n"},
		} {
			straight, asked := timed(events...)
			for _, n := range []int{4 << 10, 1 << 20} {
				got, err := throughStream(t, testExchange(plan{endpoint: chat}, timings.Native), strings.NewReader(asked), nil, n)
				if plain := strings.Replace(got, backgroundFigures, "", 1); plain != straight || len(got) == len(plain) || err != io.EOF {
					t.Errorf("%d bytes, %s: %d bytes came of %d, %v", size, name, len(plain), len(straight), err)
				}
			}
		}
	}
	// The same over the network, in an answer that comes whole too.
	straight, asked := timed(tokenEvent, `data: {"choices":[],"x":"`+strings.Repeat("é", 5<<19)+`"}`+"\n\n")
	m := startMeter(t, burst(asked))
	r := m.rig(t)
	wantLong := func(got, want string) {
		if !strings.Contains(got, backgroundFigures) || strings.Replace(got, backgroundFigures, "", 1) != want {
			t.Errorf("%d bytes came of %d", len(got), len(want))
		}
	}
	wantLong(r.send(http.MethodPost, string(chat), `{"stream":true}`).body, straight)
	text := `{"x":"` + strings.Repeat("é", 5<<19) + `",` + codedUsage
	m.answer = whole(text + "," + nativeMember + "}")
	wantLong(r.send(http.MethodPost, string(chat), `{}`).body, text+"}")
}

// TestLineForms: whatever an event stream may look like stays, and wherever it is cut in two.
func TestLineForms(t *testing.T) {
	chatStraight, chatAsked := timed(strings.Replace(tokenEvent, `"a"}`, `"é🙂 \u00e9\r\n"}`, 1), tokenEvent)
	const completed = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"é\":\"🙂\"," + responseUsage
	for name, form := range map[string]func(string) string{
		"LF":       func(s string) string { return s },
		"CRLF":     func(s string) string { return strings.ReplaceAll(s, "\n", "\r\n") },
		"CR":       func(s string) string { return strings.ReplaceAll(s, "\n", "\r") },
		"no space": func(s string) string { return strings.ReplaceAll(s, "data: ", "data:") },
		"BOM":      func(s string) string { return "\ufeff" + s },
		"comments": func(s string) string {
			return ": waiting\n\n:\n\n" + strings.ReplaceAll(s, "data: {", ": ping\ndata: {")
		},
		"comments, CRLF": func(s string) string {
			return ": waiting\r\n\r\n" + strings.ReplaceAll(strings.ReplaceAll(s, "data: {", ": ping\ndata: {"), "\n", "\r\n")
		},
		"id and retry": func(s string) string {
			return "retry: 3000\n\n" + strings.ReplaceAll(s, "data: ", "id: 7\nevent: message\nretry:1\ndata: ")
		},
		"after the data": func(s string) string { return strings.ReplaceAll(s, "}\n\n", "}\nid:1\n: x\n\n") },
		"blank lines":    func(s string) string { return "\n\n" + strings.ReplaceAll(s, "}\n\n", "}\n\n\n\n") },
		"white space":    func(s string) string { return strings.ReplaceAll(s, `":`, "\" :\t") },
	} {
		for e, answer := range map[endpoint]struct{ straight, asked string }{
			chat:      {chatStraight, chatAsked},
			responses: {responseEvents + completed + "}}\n\n", responseEvents + completed + "," + nativeMember + "}}\n\n"},
		} {
			in, want := form(answer.asked), form(answer.straight)
			if name == "blank lines" && e == chat {
				want = strings.Replace(want, doneEvent, "\n\n"+doneEvent, 1) // those behind the usage event stay
			}
			through := func(src io.Reader, sizes []byte, n int) (string, bool, error) {
				got, err := throughStream(t, testExchange(plan{endpoint: e, showUsage: e != chat}, timings.Native), src, sizes, n)
				plain := strings.Replace(got, backgroundFigures, "", 1)
				return got, plain == want && len(got) > len(plain), err
			}
			for cut := range len(in) {
				src := io.MultiReader(strings.NewReader(in[:cut]), strings.NewReader(in[cut:]))
				if got, ok, err := through(src, nil, 1<<10); !ok || err != io.EOF {
					t.Fatalf("%s of %s, cut at %d: got %q, want %q, %v", name, e, cut, got, want, err)
				}
			}
			if got, ok, err := through(strings.NewReader(in), []byte{0}, 1); !ok || err != io.EOF {
				t.Errorf("%s of %s, byte by byte: got %q, %v", name, e, got, err)
			}
		}
	}
}

// observed is a chat answer of n tokens with usage alone, whose events come at once.
func observed(n int, events ...string) string {
	return strings.Join(events, "") + fmt.Sprintf(`data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}`, n) + "\n\n" + doneEvent
}

// TestFinite: an answer of one token, of none, or all at once has no rate that nobody can have measured.
func TestFinite(t *testing.T) {
	const role = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	const stop = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	const late = `data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]},"finish_reason":null}]}` + "\n\n"
	for name, test := range map[string]struct {
		answer string
		tokens int
		decode string // "" for no timings
	}{
		"one token":           {observed(1, role, finishEvent), 1, "0"},
		"nothing but the end": {observed(1, role, stop), 1, "0"},
		"no token":            {observed(0, role, stop), 0, "0"},
		"only the end":        {observed(0, stop), 0, "0"},
		"burst":               {observed(400, role, tokenEvent, tokenEvent, finishEvent), 400, ""},
		"late tool call":      {observed(200, role, late, stop), 200, ""},
		"no event of a token": {observed(5, role), 5, ""},
	} {
		ex := testExchange(plan{endpoint: chat, showUsage: true}, timings.Observed)
		ex.headers = time.Now().Add(-20 * time.Millisecond)
		got, err := throughStream(t, ex, strings.NewReader(test.answer), nil, 1<<10)
		if err != io.EOF {
			t.Error(err)
		}
		i := strings.Index(got, `"timings":`)
		if (i >= 0) != (test.decode != "") {
			t.Errorf("%s: %s", name, got)
		}
		if i < 0 {
			continue
		}
		x := gjson.Parse(got[i+len(`"timings":`):])
		if x.Get("predicted_ms").Raw != test.decode || x.Get("predicted_per_second").Raw != "0" || x.Get("predicted_n").Int() != int64(test.tokens) || x.Get("prompt_per_second").Num > 9/0.02 {
			t.Errorf("%s: %s", name, x.Raw)
		}
	}
}

// TestTokensAreCounted: the number of tokens is usage's, however many events they came in.
func TestTokensAreCounted(t *testing.T) {
	events := append(strings.SplitAfter(strings.Repeat(tokenEvent, 9), "\n\n"), finishEvent)
	asked := strings.Replace(observed(40, events...), "}}\n\n"+doneEvent, "},"+nativeMember+"}\n\n"+doneEvent, 1)
	got, _ := throughStream(t, testExchange(plan{endpoint: chat}, timings.Native), strings.NewReader(asked), nil, 100)
	if !strings.Contains(got, `"predicted_n":40,"predicted_ms":40,"predicted_per_token_ms":1,"predicted_per_second":1000`) {
		t.Errorf("got %s", got)
	}
}

// TestCommentIsNoToken: what keeps a connection alive before the first token starts no clock.
func TestCommentIsNoToken(t *testing.T) {
	s := newStream(testExchange(plan{endpoint: chat}), io.NopCloser(strings.NewReader("")), 0)
	for _, raw := range []string{": ping\n\n", "retry: 5\n\n", "id: 1\n\n", "event: x\n\n", "data:\n\n", "data: {}\n\n", "data: null\n\n", "data: x\n\n", "\n"} {
		s.framer.Feed([]byte(raw))
		if s.events(); !s.first.IsZero() || !s.last.IsZero() {
			t.Errorf("%q is a token", raw)
		}
	}
	s.now = time.Now()
	s.framer.Feed([]byte(tokenEvent))
	if s.events(); s.first.IsZero() {
		t.Error("a token is none")
	}
}

// TestBytesStay: numbers, escapes and white space are the client's and vLLM's, in requests and in answers.
func TestBytesStay(t *testing.T) {
	const odd = `"z":1,"seed":9007199254740993,"x":1.0,"s":"<a>\ud83d","e":1E+2,"d":"\/é"`
	for _, layout := range []func(string) string{func(s string) string { return s }, func(s string) string {
		return " \n" + strings.NewReplacer(",", ",\n  ", "{", "{\n  ", `":`, `" : `).Replace(s) + "\r\n"
	}} {
		answer := layout(`{` + odd + `,"choices":[{"index":0}],` + codedUsage + `}`)
		asked := strings.Replace(answer, strings.TrimSpace(layout(codedUsage)), strings.TrimSpace(layout(codedUsage))+`,"metrics":{"time_to_first_token_ms":12,"generation_time_ms":40}`, 1)
		if layout("{}") != "{}" {
			asked = answer // where its members stand is not the point
		}
		m := startMeter(t, whole(asked))
		one := ran{prompt: 12, completion: 5, cached: 4, prefill: 12 * time.Millisecond, decode: 40 * time.Millisecond}
		m.answer = func(w http.ResponseWriter, r *http.Request) { m.finish(one); whole(asked)(w, r) }
		r := m.rig(t)
		for _, stream := range []string{"", `,"stream":false`, `,"stream":null`} {
			request := layout(`{` + odd + stream + `,"messages":[]}`)
			a := r.send(http.MethodPost, string(chat), request)
			if m.last() != request {
				t.Errorf("asked %q, not %q", m.last(), request)
			}
			wantMember(t, request, a.body, answer, backgroundFigures)
			if a.header.Get("Content-Length") != fmt.Sprint(len(a.body)) {
				t.Errorf("Content-Length %s of %d bytes", a.header.Get("Content-Length"), len(a.body))
			}
		}
	}
}

// TestOwnTimings: timings that are there already are the ones, in whatever event and API.
func TestOwnTimings(t *testing.T) {
	const own = `"timings": {"prompt_n":1e0,"predicted_n":[]}`
	with := func(event string) string { return strings.Replace(event, "data: {", "data: {"+own+",", 1) }
	native := strings.TrimSuffix(usageEvent, "}\n\n") + "," + nativeMember + "}\n\n"
	for name, test := range map[string]struct {
		e      endpoint
		answer string
		want   map[bool]string // by whether usage is shown; "" is answer
	}{
		"on the finish event": {chat, tokenEvent + with(finishEvent) + native + doneEvent, map[bool]string{false: tokenEvent + with(finishEvent) + doneEvent, true: ""}},
		"on every event":      {chat, with(tokenEvent) + with(tokenEvent) + with(finishEvent) + with(native) + doneEvent, map[bool]string{false: with(tokenEvent) + with(tokenEvent) + with(finishEvent) + doneEvent, true: ""}},
		"in messages":         {messages, messageEvents + "data: {\"type\":\"message_delta\"," + own + "," + messageUsage + "}\n\n" + messageStop, map[bool]string{true: ""}},
		"in responses":        {responses, responseEvents + "data: {\"type\":\"response.completed\"," + own + ",\"response\":{" + responseUsage + "," + nativeMember + "}}\n\n", map[bool]string{true: ""}},
	} {
		for show, want := range test.want {
			if want == "" {
				want = test.answer
			}
			ex := testExchange(plan{endpoint: test.e, showUsage: show, perToken: test.e == chat}, timings.AllSources...)
			got, err := throughStream(t, ex, strings.NewReader(test.answer), []byte{99}, 1<<10)
			if diff := cmp.Diff(want, got); diff != "" || err != io.EOF {
				t.Errorf("%s, usage shown %v: %s, %v", name, show, diff, err)
			}
		}
	}
}

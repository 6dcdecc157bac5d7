package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// leaver is a request whose client leaves when told to.
type leaver struct {
	leave context.CancelFunc
	lines chan string // of the answer; closed at its end
}

func (r *rig) start(path, body string) *leaver {
	r.t.Helper()
	ctx, leave := context.WithCancel(r.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	l := &leaver{leave: leave, lines: make(chan string, 1000)}
	go func() {
		defer close(l.lines)
		resp, err := r.http.Do(req)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		l.lines <- "headers"
		for scan := bufio.NewScanner(resp.Body); scan.Scan(); {
			l.lines <- scan.Text()
		}
	}()
	return l
}

// until reads lines until one has part.
func (l *leaver) until(t *testing.T, part string) {
	t.Helper()
	for {
		select {
		case line, ok := <-l.lines:
			if !ok {
				t.Fatalf("the answer ended before %q", part)
			}
			if strings.Contains(line, part) {
				return
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no %q", part)
		}
	}
}

// wantLeft checks what is noted of one client that left.
func (r *rig) wantLeft(status int) {
	r.t.Helper()
	within(r.t, time.Second, "the request is over", func() bool { return r.metric("in_flight_requests") == 0 })
	r.wantMetric(1, "client_disconnects_total")
	r.wantMetric(0, "upstream_errors_total")
	r.wantMetric(1, "requests_total", "code", fmt.Sprint(status))
	unedited := 0.0
	if status == http.StatusOK {
		unedited = 1
	}
	r.wantMetric(unedited, "unedited_total", "reason", "client_left")
	r.wantMetric(unedited, "unedited_total")
	lines := r.log.requests(r.t, slog.LevelInfo)
	if len(lines) != 1 || !lines[0].Get("client_left").Bool() || lines[0].Get("error").Exists() {
		r.t.Errorf("want one line of a client that left, got %v", lines)
	}
	if warned := r.log.lines(r.t, slog.LevelWarn, ""); len(warned) > 0 {
		r.t.Errorf("a client that leaves is nothing to warn of: %v", warned)
	}
}

func TestClientLeaves(t *testing.T) {
	slowPrefill := func(c *vllmsim.Config) { c.PrefillTokensPerSecond = 0.1 }
	slowDecode := func(c *vllmsim.Config) { c.DecodeStep = 50 * time.Millisecond }
	for _, test := range []struct {
		name   string
		stream bool
		setup  func(*vllmsim.Config)
		after  string // what the client reads before it leaves
		status int
	}{
		{"before the first token", true, slowPrefill, "headers", http.StatusOK},
		{"in the midst of a stream", true, slowDecode, `"content":" `, http.StatusOK},
		{"of an answer that comes whole", false, slowDecode, "", statusClientLeft},
	} {
		t.Run(test.name, func(t *testing.T) {
			vllm := startEngine(t, test.setup)
			r := newRig(t, vllm.URL)
			r.learned()
			l := r.start(string(chat), chatRequest(test.stream, 10_000, "hello"))
			if test.after != "" {
				l.until(t, test.after)
			}
			eventually(t, "vLLM has the request", func() bool { s := vllm.Stats(); return s.Running+s.Waiting == 1 })
			l.leave()
			within(t, time.Second, "vLLM sees that the client left", func() bool { return vllm.Stats().Aborted == 1 })
			r.wantLeft(test.status)
		})
	}
}

func TestClientLeavesBeforeHeaders(t *testing.T) {
	g := newGate(t)
	left := make(chan struct{})
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body) // net/http notices a client that leaves only when it has the body
		if !g.pass(r.Context()) {
			close(left)
		}
	})
	r := newRig(t, up.URL)
	r.learned()
	l := r.start(string(chat), chatRequest(true, 10, "hello"))
	g.reached(t)
	l.leave()
	select {
	case <-left:
	case <-time.After(time.Second):
		t.Error("vLLM does not see within a second that the client left")
	}
	r.wantLeft(statusClientLeft)
}

// A client that leaves while its answer waits for a reading takes nobody along: the reading goes on for others.
func TestClientLeavesDuringReading(t *testing.T) {
	vllm := startEngine(t)
	hold, g := make(chan bool, 1), newGate(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/metrics") {
			select {
			case <-hold:
				if !g.pass(r.Context()) {
					return
				}
			default:
			}
		}
		vllm.ServeHTTP(w, r)
	})
	r := newRig(t, up.URL, func(c *Config) { c.Deadline = time.Minute })
	r.warm()
	// The reading beside the request goes through; the one at its end does not.
	l := r.start(string(chat), chatRequest(true, 50, "hello"))
	l.until(t, `"content":" `)
	r.quietReadings()
	hold <- true
	g.reached(t)
	l.leave()
	within(t, time.Second, "the request is over", func() bool { return r.metric("in_flight_requests") == 0 })
	r.wantMetric(1, "client_disconnects_total")
	r.wantMetric(0, "upstream_errors_total")
	g.open()
	a := r.chat(true, 5)
	vllm.check(t, a)
	if lines := r.log.lines(t, slog.LevelWarn, ""); len(lines) > 0 {
		t.Errorf("nothing is wrong with the metrics: %v", lines)
	}
}

// quietReadings waits until the reading that was made beside a request is there.
func (r *rig) quietReadings() {
	r.t.Helper()
	n := r.metric("window_readings_total")
	eventually(r.t, "readings are over", func() bool {
		time.Sleep(20 * time.Millisecond) // longer than one takes
		before := n
		n = r.metric("window_readings_total")
		return n == before
	})
}

// Many clients that leave at any moment leave nothing behind, and those that stay get true figures.
func TestClientsLeaveAtAnyMoment(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	done := make(chan struct{})
	for i := range 40 {
		go func() {
			defer func() { done <- struct{}{} }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, r.url+string(chat), strings.NewReader(chatRequest(i%2 == 0, 10, fmt.Sprint("leaver ", i))))
			resp, err := r.http.Do(req)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}()
	}
	for range 40 {
		<-done
	}
	r.quiet()
	eventually(t, "vLLM has no request", func() bool { s := vllm.Stats(); return s.Running+s.Waiting == 0 })
	r.wantMetric(0, "upstream_errors_total")
	r.quietReadings()
	time.Sleep(fresh) // so that the next request has a baseline of its own
	vllm.check(t, r.chat(true, 10))
}

// A client that breaks off its own upload is no failure of vLLM's.
func TestClientLeavesDuringUpload(t *testing.T) {
	for _, path := range []string{string(chat), "/v1/audio/transcriptions"} {
		t.Run(path, func(t *testing.T) {
			up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if !notAVLLM(w, r) {
					_, _ = io.Copy(io.Discard, r.Body)
				}
			})
			r := newRig(t, up.URL)
			r.learned()
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"model\":", path)
			eventually(t, "the request is there", func() bool { return r.metric("in_flight_requests") == 1 })
			conn.Close()
			within(t, time.Second, "the request is over", func() bool { return r.metric("in_flight_requests") == 0 })
			r.wantMetric(1, "client_disconnects_total")
			r.wantMetric(0, "upstream_errors_total")
			r.wantMetric(1, "requests_total", "code", "499")
		})
	}
}

// TestClientClosesAfterAnswer: a client that closes its connection as soon as it has all of an answer has not left early.
func TestClientClosesAfterAnswer(t *testing.T) {
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/health" {
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{}")
	})
	r := newRig(t, up.URL)
	r.learned()
	const clients = 300
	for i := range clients {
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", []string{"GET /health", "POST /v1/embeddings", "POST " + string(chat)}[i%3])
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status, err)
		}
		_ = conn.Close()
	}
	r.quiet()
	r.wantMetric(0, "client_disconnects_total")
	r.wantMetric(clients, "requests_total", "code", "200")
}

// OpenAI's Python client closes the connection as soon as it has read [DONE], which may be before vLLM's answer has
// ended. Its answer is complete.
func TestClientClosesAfterDone(t *testing.T) {
	g := newGate(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}`+"\n\n"+
			`data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}`+"\n\n"+
			`data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}`+"\n\ndata: [DONE]\n\n")
		_ = http.NewResponseController(w).Flush()
		g.pass(r.Context())
	})
	r := newRig(t, up.URL)
	r.learned()
	l := r.start(string(chat), chatRequest(true, 10, "hello"))
	l.until(t, "[DONE]")
	l.leave()
	within(t, time.Second, "the request is over", func() bool { return r.metric("in_flight_requests") == 0 })
	r.wantMetric(0, "client_disconnects_total")
	r.wantMetric(0, "upstream_errors_total")
	r.wantMetric(1, "requests_total", "code", "200")
}

// A client that does not read must slow its stream down, not fill the memory: what vLLM sent is not read ahead.
func TestClientReadsSlowly(t *testing.T) {
	const chunk = 64 << 10
	sent := make(chan int, 1)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		event := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("a", chunk) + `"},"finish_reason":null}]}` + "\n\n"
		n := 0
		for ; n < 1000; n++ {
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			if _, err := io.WriteString(w, event); err != nil {
				break
			}
		}
		sent <- n
	})
	r := newRig(t, up.URL)
	r.learned()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+string(chat), strings.NewReader(chatRequest(true, 10, "hello")))
	resp, err := r.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n := <-sent; n >= 1000 {
		t.Errorf("all %d MB went to a client that reads none", n*chunk>>20)
	}
	if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the body that vLLM broke off ended in %v, want an unexpected EOF", err)
	}
}

// A client closes the connection of an answer that has left net/http's server as soon as it has all of it, whatever it was,
// and before the sidecar counts it. That is no client that left early.
func TestClientClosesAtTheEnd(t *testing.T) {
	const n = 300
	brotli := http.Header{"Content-Type": {"text/event-stream"}, "Content-Encoding": {"br"}}
	events := http.Header{"Content-Type": {"text/event-stream"}}
	for name, test := range map[string]struct {
		path   endpoint
		status int
		header http.Header
		body   string
		failed float64 // how often that is vLLM's fault
	}{
		"an error":              {chat, http.StatusBadRequest, nil, `{"error":{}}`, 0},
		"an error without end":  {chat, http.StatusInternalServerError, http.Header{"Content-Type": {"text/plain"}, "Transfer-Encoding": {"chunked"}}, "x", 0},
		"nothing":               {chat, http.StatusOK, http.Header{"Content-Length": {"0"}}, "", 0},
		"no content":            {chat, http.StatusNoContent, nil, "", 0},
		"a coding":              {chat, http.StatusOK, brotli, "x", 0},
		"events without [DONE]": {completions, http.StatusOK, events, tokenEvent, 0},
		"messages that fail":    {messages, http.StatusOK, events, "event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n", 0},
		"vLLM is not there":     {responses, http.StatusBadGateway, nil, "", n},
	} {
		t.Run(name, func(t *testing.T) {
			upstream := "http://" + freeAddress(t)
			if test.failed == 0 {
				upstream = startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
					if notAVLLM(w, r) {
						return
					}
					maps.Copy(w.Header(), test.header)
					w.WriteHeader(test.status)
					_, _ = io.WriteString(w, test.body)
				}).URL
			}
			r := newRig(t, upstream)
			for range n {
				if a := r.send(http.MethodPost, string(test.path), streamed); a.status != test.status || a.err != nil || test.failed == 0 && a.body != test.body {
					t.Fatalf("%d %q, %v", a.status, a.body, a.err)
				}
			}
			r.quiet()
			r.wantMetric(n, "requests_total", "code", fmt.Sprint(test.status))
			r.wantMetric(test.failed, "upstream_errors_total")
			r.wantMetric(0, "client_disconnects_total")
			r.wantMetric(0, "unedited_total", "reason", "client_left")
		})
	}
}

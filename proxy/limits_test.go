package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// TestMaxRequests: above the limit a request is told to come again, and each place is free again however its answer ended.
func TestMaxRequests(t *testing.T) {
	g := newGate(t)
	dies := make(chan bool, 1)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) || r.Method == http.MethodGet && r.Header.Get("Upgrade") == "" {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, tokenEvent)
		_ = http.NewResponseController(w).Flush()
		if r.URL.RawQuery == "waits" {
			g.pass(r.Context())
		}
		select {
		case <-dies:
			panic(http.ErrAbortHandler)
		default:
			_, _ = io.WriteString(w, doneEvent)
		}
	})
	r := newRig(t, up.URL, func(c *Config) { c.MaxRequests = 2 })
	r.learned()
	full := func() {
		t.Helper()
		for _, test := range []struct{ method, path, body string }{
			{"POST", string(chat), streamed}, {"POST", string(chat), "{}"}, {"POST", string(messages), "{}"}, {"POST", "/v1/embeddings", "{}"}, {"PUT", "/x", ""}, {"DELETE", "/v1/responses/a", ""},
		} {
			a := r.send(test.method, test.path, test.body)
			message := gjson.Get(a.body, "error.message").Str
			if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") != "1" || a.header.Get("Content-Type") != "application/json" ||
				!strings.Contains(message, "--max-concurrent-requests") || gjson.Get(a.body, "error.type").Str != "rate_limit_error" || gjson.Get(a.body, "error.code").Int() != 429 {
				t.Errorf("%s %s: %d %v %s", test.method, test.path, a.status, a.header, a.body)
			}
		}
		if resp, _ := r.say(fmt.Sprintf(handshake, "/v1/realtime")); resp == nil || resp.StatusCode != http.StatusTooManyRequests {
			t.Errorf("a WebSocket: %v", resp)
		}
		for _, path := range []string{"/health", "/metrics", "/-/metrics", "/-/ready", "/-/healthy", "/v1/models", "/v1/responses/a"} {
			for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions} {
				if a := r.send(method, path, ""); a.status != http.StatusOK {
					t.Errorf("%s %s: %d %s", method, path, a.status, a.body)
				}
			}
		}
	}
	waits := func(path, body string) *leaver { return r.start(path+"?waits", body) }
	for round, end := range []func(first, second *leaver){
		func(first, second *leaver) { first.leave(); second.leave() },
		func(_, _ *leaver) { dies <- true; g.open() },
	} {
		first, second := waits(string(chat), streamed), waits("/v1/embeddings", "{}")
		g.reached(t)
		g.reached(t)
		full()
		end(first, second)
		for _, l := range []*leaver{first, second} {
			for range l.lines {
			}
		}
		r.quiet()
		// One after the other, each as soon as the one before is answered.
		for i := range 30 {
			for _, path := range []string{string(chat), string(completions), "/v1/embeddings"} {
				if a := r.send(http.MethodPost, path, streamed); a.status != http.StatusOK || !strings.HasSuffix(a.body, doneEvent) {
					t.Fatalf("round %d, %d: %s: %d %s", round, i, path, a.status, a.body)
				}
			}
		}
	}
	r.quiet()
	if n := len(r.places); n != 0 {
		t.Errorf("%d places are taken", n)
	}
	r.wantMetric(14, "requests_total", "code", "429")
	r.wantMetric(0, "upstream_errors_total", "kind", "other")
}

// TestAnswerHeader: a header without end is not kept, and one that is no header is not passed on, nor told to the log.
func TestAnswerHeader(t *testing.T) {
	const secret = "s3cret-of-the-answer"
	endless := func(conn net.Conn) {
		line := "X-A: " + strings.Repeat("a", 1<<10) + "\r\n"
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n")
		for range 64 << 10 { // 64 MiB
			if _, err := io.WriteString(conn, line); err != nil {
				return
			}
		}
		t.Error("all of it was read")
	}
	hints := func(conn net.Conn) {
		for range 64 << 10 {
			if _, err := io.WriteString(conn, "HTTP/1.1 103 Early Hints\r\nX-A: "+strings.Repeat("a", 1<<10)+"\r\n\r\n"); err != nil {
				return
			}
		}
		t.Error("all of it was read")
	}
	says := func(head string) func(net.Conn) {
		return func(conn net.Conn) { _, _ = io.WriteString(conn, head) }
	}
	for name, test := range map[string]struct {
		answer func(net.Conn)
		kind   string
	}{
		"no end":        {endless, tooLarge},
		"hints, no end": {hints, tooLarge},
		"no HTTP":       {says(secret + " " + secret + "\r\n\r\n"), badAnswer},
		"no status":     {says("HTTP/1.1 " + secret + "\r\n\r\n"), badAnswer},
		"no version":    {says("HTTP/" + secret + " 200 OK\r\n\r\n"), badAnswer},
		"no header":     {says("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + secret + "\r\n\r\nok"), badAnswer},
		"lengths":       {says("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3" + secret + "\r\n\r\nok"), "other"},
		"no length":     {says("HTTP/1.1 200 OK\r\nContent-Length: " + secret + "\r\n\r\nok"), "other"},
		"coding":        {says("HTTP/1.1 200 OK\r\nTransfer-Encoding: " + secret + "\r\n\r\nok"), "other"},
		"chunks":        {says("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + secret + "\r\n"), ""},
		"trailers":      {says("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + secret + "\r\n\r\n"), ""},
	} {
		for _, to := range []struct{ path, body string }{{string(chat), "{}"}, {string(chat), streamed}, {"/v1/embeddings", "{}"}} {
			if name == "hints, no end" && to.body != streamed {
				continue // net/http lets each go to the client at once, and keeps none
			}
			t.Run(name+" to "+to.path+" "+to.body, func(t *testing.T) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				go func() {
					for {
						conn, err := l.Accept()
						if err != nil {
							return
						}
						go func() {
							defer conn.Close()
							r, err := http.ReadRequest(bufio.NewReader(conn))
							if err != nil {
								return
							}
							_, _ = io.Copy(io.Discard, r.Body) // or the sidecar may find that it cannot send it
							if r.UserAgent() == "vllm-timings" {
								_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
								return
							}
							test.answer(conn)
							_ = conn.(*net.TCPConn).CloseWrite()
							_, _ = io.Copy(io.Discard, conn)
						}()
					}
				}()
				r := newRig(t, "http://"+l.Addr().String())
				r.learned()
				a := r.send(http.MethodPost, to.path, to.body)
				switch {
				case test.kind == "" && (a.status != http.StatusOK || !errors.Is(a.err, io.ErrUnexpectedEOF)):
					t.Errorf("%d %q, %v", a.status, a.body, a.err)
				case test.kind != "":
					if message := gjson.Get(a.body, "error.message").Str; a.status != http.StatusBadGateway || !strings.Contains(message, "("+test.kind+")") {
						t.Errorf("%d %s %s", a.status, a.body, r.log)
					}
					r.wantMetric(1, "upstream_errors_total", "kind", test.kind)
				}
				r.quiet()
				if strings.Contains(a.body+r.log.String(), secret) {
					t.Errorf("what vLLM said is told: %s\n%s", a.body, r.log)
				}
			})
		}
	}
}

// TestSaid: errors of the network are told as they are, of those about answers only what net/http says itself.
func TestSaid(t *testing.T) {
	for _, test := range []struct {
		err  error
		want string
	}{
		{&net.OpError{Op: "dial", Net: "tcp", Err: errors.New(`"x"`)}, `dial tcp: "x"`},
		{io.ErrUnexpectedEOF, "unexpected EOF"},
		{fmt.Errorf("broken: %w", textproto.ProtocolError("malformed MIME header line: secret")), badAnswer},
		{errors.New(`message cannot contain multiple Content-Length headers; got ["secret"]`), "message cannot contain multiple Content-Length headers; got"},
		{errors.New("something"), "something"},
	} {
		if got := said(test.err); got != test.want {
			t.Errorf("%v: %q, want %q", test.err, got, test.want)
		}
	}
}

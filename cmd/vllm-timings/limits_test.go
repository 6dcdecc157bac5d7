package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// TestMaxHeaderBytes: a header that is too long is answered with 431, and one below the limit goes to vLLM.
func TestMaxHeaderBytes(t *testing.T) {
	sim := startSim(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL, "--max-header-bytes", "8192")
	for size, want := range map[int]int{6 << 10: http.StatusOK, 64 << 10: http.StatusRequestHeaderFieldsTooLarge} {
		conn := dial(t, p.url)
		// What it does not read any more may end in an error.
		_, _ = fmt.Fprintf(conn, "GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n", strings.Repeat("a", size))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != want || resp.Close != (want != http.StatusOK) {
			t.Errorf("%d bytes: %v, %v", size, resp, err)
		}
	}
}

// TestHeaderTimeout: a header that does not come, or byte after byte, ends its connection; a body and an answer may take any
// time.
func TestHeaderTimeout(t *testing.T) {
	upstream := newGated(t)
	t.Setenv("VLLM_TIMINGS_HEADER_TIMEOUT", "50ms")
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)

	const body = `{"model":"tiny","stream":true,"messages":[]}`
	slow := dial(t, p.url)
	fmt.Fprintf(slow, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body[:5])
	stream := openStream(t, p.url)

	for name, begin := range map[string]string{"nothing": "", "half a line": "GET /hea", "a line": "GET /health HTTP/1.1\r\n", "most": "GET /health HTTP/1.1\r\nHost: x\r\nX: y\r\n"} {
		conn := dial(t, p.url)
		if _, err := io.WriteString(conn, begin); err != nil {
			t.Fatal(err)
		}
		closed := make(chan struct{})
		go func() { // a byte again and again, as long as it is open
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-closed:
					return
				case <-tick.C:
					if begin != "" {
						_, _ = io.WriteString(conn, "a")
					}
				}
			}
		}()
		if got, err := io.ReadAll(conn); err != nil && !errors.Is(err, syscall.ECONNRESET) || strings.Contains(string(got), "200") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		close(closed)
	}

	// Those two have been open for longer than any of them.
	if _, err := io.WriteString(slow, body[5:]); err != nil {
		t.Error(err)
	}
	upstream.open()
	if resp, err := http.ReadResponse(bufio.NewReader(slow), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("the slow body: %v, %v", resp, err)
	} else if got := readAll(t, resp); got != firstEvent+lastEvents {
		t.Errorf("the slow body: %q", got)
	}
	if rest, err := io.ReadAll(stream); err != nil || string(rest) != lastEvents {
		t.Errorf("the long answer: %q, %v", rest, err)
	}
}

// TestMaxConcurrentRequests: the flag is the proxy's limit.
func TestMaxConcurrentRequests(t *testing.T) {
	upstream := newGated(t)
	t.Setenv("VLLM_TIMINGS_MAX_CONCURRENT_REQUESTS", "1")
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
	stream := openStream(t, p.url)
	resp := post(t, p.url+"/v1/chat/completions", question)
	if body := readAll(t, resp); resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" || gjson.Get(body, "error.type").Str != "rate_limit_error" {
		t.Errorf("%s: %s", resp.Status, body)
	}
	p.log.await(t, "msg=request .*status=429")
	upstream.open()
	if rest, err := io.ReadAll(stream); err != nil || string(rest) != lastEvents {
		t.Errorf("%q, %v", rest, err)
	}
}

// TestNothingIsLogged: no key, prompt, answer or error of vLLM's is in what the program writes, whatever its level and
// format.
func TestNothingIsLogged(t *testing.T) {
	const secret = "s3cret"
	sim := startSim(t)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw := func(answer string) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}
		switch how := r.URL.Query().Get("how"); how {
		case "":
			sim.ServeHTTP(w, r)
		case "error":
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"error":{"message":"`+secret+`"}}`)
		case "event":
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, `data: {"error":{"message":"`+secret+`"}}`+"\n\n")
		case "json":
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"`+secret)
		case "no HTTP":
			raw(secret + " " + secret + "\r\n\r\n")
		case "header":
			raw("HTTP/1.1 200 OK\r\n" + secret + "\r\n\r\n")
		case "length":
			raw("HTTP/1.1 200 OK\r\nContent-Length: " + secret + "\r\n\r\n")
		case "chunk":
			raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + secret + "\r\n")
		case "trailer":
			raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + secret + "\r\n\r\n")
		case "break":
			raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"" + secret)
		case "more":
			conn, _, _ := http.NewResponseController(w).Hijack()
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"+secret)
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}))
	t.Cleanup(up.Close)
	hows := []string{"", "error", "event", "json", "no HTTP", "header", "length", "chunk", "trailer", "break", "more"}
	for _, format := range []string{"text", "json", "llama"} {
		t.Run(format, func(t *testing.T) {
			p := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", strings.Replace(up.URL, "://", "://user:"+secret+"@", 1), "--log-level", "debug", "--log-format", format, "--upstream-api-key", secret)
			n := 0
			for _, how := range hows {
				for _, path := range []string{"/v1/chat/completions", "/v1/messages", "/v1/embeddings"} {
					for _, stream := range []string{"true", "false", `"` + secret + `"`} {
						body := fmt.Sprintf(`{"model":"tiny","max_tokens":2,"stream":%s,"user":"%s","messages":[{"role":"user","content":"%s"}],"input":"%s"}`, stream, secret, secret, secret)
						conn := dial(t, p.url)
						fmt.Fprintf(conn, "POST %s?how=%s&key=%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nX-Api-Key: %s\r\nApi-Key: %s\r\nCookie: a=%s\r\nX-Request-Id: %s\r\nReferer: http://x/?%s\r\n"+
							"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", path, strings.ReplaceAll(how, " ", "+"), secret, secret, secret, secret, secret, secret, secret, secret, len(body), body)
						if got, err := io.ReadAll(conn); len(got) == 0 {
							t.Errorf("%s %s %s: %v", how, path, stream, err)
						}
						conn.Close()
						n++
					}
				}
			}
			for _, raw := range []string{
				"GET http://user:" + secret + "@x/v1/models?" + secret + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "CONNECT " + secret + ":1 HTTP/1.1\r\nHost: x\r\n\r\n",
				"GET x:" + secret + " HTTP/1.1\r\nHost: x\r\n\r\n", secret + "\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n" + secret + "\r\n\r\n",
				"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + secret + "\r\n", "POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + secret + "\r\n",
			} {
				conn := dial(t, p.url)
				_, _ = io.WriteString(conn, raw)
				_, _ = io.ReadAll(conn)
				conn.Close()
			}
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if code := p.wait(t); code != exitOK {
				t.Errorf("exit code %d", code)
			}
			text := p.log.String()
			if strings.Contains(text, secret) {
				for line := range strings.Lines(text) {
					if strings.Contains(line, secret) {
						t.Errorf("in the log: %s", line)
					}
				}
			}
			if lines := strings.Count(text, "/v1/"); lines < n {
				t.Errorf("%d lines for %d requests:\n%s", lines, n, text)
			}
		})
	}
}

// TestGatePaths: while vLLM starts, too, the pages below /-/ have no other name.
func TestGatePaths(t *testing.T) {
	g := newGate(newCollectors())
	for target, want := range map[string]int{
		"/-/healthy": http.StatusOK, "/-/metrics": http.StatusOK, "/-/ready": http.StatusServiceUnavailable, "/%2d/healthy": http.StatusServiceUnavailable,
		"/-%2fmetrics": http.StatusServiceUnavailable, "//-/healthy": http.StatusServiceUnavailable, "/x/../-/healthy": http.StatusServiceUnavailable,
	} {
		w := httptest.NewRecorder()
		g.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
		if json := strings.HasPrefix(w.Header().Get("Content-Type"), "application/json"); w.Code != want || json != (want != http.StatusOK && target != "/-/ready") {
			t.Errorf("%s: %d %s", target, w.Code, w.Body)
		}
	}
}

// TestGateSmuggling: while vLLM starts, too, nothing that comes behind a request about whose end there may be two opinions is one.
func TestGateSmuggling(t *testing.T) {
	server := httptest.NewServer(newGate(newCollectors()))
	t.Cleanup(server.Close)
	for name, head := range map[string]string{
		"CL.TE":            "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.0 with TE": "POST /x HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
	} {
		conn := dial(t, server.URL)
		_, _ = io.WriteString(conn, head+"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
		if got, _ := io.ReadAll(conn); strings.Count(string(got), "HTTP/1.") != 1 {
			t.Errorf("%s: %q", name, got)
		}
		conn.Close()
	}
}

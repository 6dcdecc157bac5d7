package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// say sends bytes over a connection of their own and returns the answer to the first request in them; nil where there is none.
func (r *rig) say(raw string) (*http.Response, string) {
	r.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(conn, raw); err != nil {
		r.t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil, ""
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Errorf("%q: %v", raw, err)
	}
	return resp, string(body)
}

// TestNoOtherHost: whatever host a request names, it goes to vLLM or nowhere.
func TestNoOtherHost(t *testing.T) {
	elsewhere, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close()
	var visitors atomic.Int64
	go func() {
		for {
			conn, err := elsewhere.Accept()
			if err != nil {
				return
			}
			visitors.Add(1)
			conn.Close()
		}
	}()
	evil := elsewhere.Addr().String()
	vllm := startStrict(t)
	r := newRig(t, vllm.url())
	r.learned()
	for _, to := range []struct{ path, body string }{{string(chat), `{"messages":[]}`}, {string(chat), streamed}, {"/v1/embeddings", "{}"}} {
		for _, test := range []struct {
			target, host string
			asked        string // of vLLM, the path first; "" for nothing
		}{
			{"http://" + evil + to.path, evil, to.path},
			{"http://" + evil + to.path, "x", to.path},
			{"https://" + evil + to.path, "x", to.path},
			{"http://user:s3cret@" + evil + to.path, "x", to.path},
			{"ftp://" + evil + to.path, "x", to.path},
			{"//" + evil + to.path, "x", "//" + evil + to.path},
			{"///" + evil + to.path, "x", "///" + evil + to.path},
			{`/\` + evil + to.path, "x", `/%5C` + evil + to.path},
			{"/http://" + evil + to.path, "x", "/http://" + evil + to.path},
			{"/@" + evil + to.path, "x", "/@" + evil + to.path},
			{to.path + "?url=http://" + evil, "x", to.path + "?url=http://" + evil},
			{to.path, evil, to.path},
			{to.path, "x@" + evil, ""},
			{"http:" + evil + to.path, "x", ""},
			{"@" + evil + to.path, "x", ""},
			{evil, "x", ""},
		} {
			raw := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nX-Forwarded-Host: %s\r\nForwarded: host=%s\r\nContent-Length: %d\r\n\r\n%s", test.target, test.host, evil, evil, len(to.body), to.body)
			resp, body := r.say(raw)
			r.quiet()
			got := vllm.requests()
			switch {
			case test.asked == "" && (resp == nil || resp.StatusCode != http.StatusBadRequest || len(got) > 0):
				t.Errorf("%s: %v %s, vLLM was asked %q", test.target, resp, body, got)
			case test.asked != "" && (resp == nil || resp.StatusCode != http.StatusOK || len(got) != 1 || got[0].line != "POST "+test.asked+" HTTP/1.1"):
				t.Errorf("%s of %s: %v %s, vLLM was asked %q", test.target, test.host, resp, body, got)
			case len(got) == 1 && got[0].header["Authorization"] != nil:
				t.Errorf("%s: a key was made of the target", test.target)
			}
		}
	}
	if resp, body := r.say("CONNECT " + evil + " HTTP/1.1\r\nHost: " + evil + "\r\n\r\n"); resp == nil || resp.StatusCode != http.StatusMethodNotAllowed || !strings.Contains(body, "CONNECT") {
		t.Errorf("CONNECT: %v %s", resp, body)
	}
	if n := visitors.Load(); n > 0 {
		t.Errorf("another host was asked %d times", n)
	}
	if strings.Contains(r.log.String(), "s3cret") {
		t.Error("a secret is in the log")
	}
}

// TestOwnPaths: the pages below /-/ have no other name, and take none of vLLM's.
func TestOwnPaths(t *testing.T) {
	vllm := startStrict(t)
	r := newRig(t, vllm.url())
	r.learned()
	for _, path := range []string{
		"/%2d/metrics", "/%2D/ready", "//-/metrics", "/./-/metrics", "/x/../-/metrics", "/x/%2e%2e/-/metrics", "/-%2fmetrics", "/-//metrics", "/-/./metrics",
		"/-/metrics/", "/-/metrics;a", "/-/metrics%00", "/-/metrics%20", "/-/metric%73", "/-/Metrics", "/-/%72eady", "/-/", "/-", "/-/unknown", "/-/healthy/..", "/v1/../-/healthy",
		"/health", "/ping", "/version", "/load", "/metrics/", "/metrics/?name[]=a", "/ready", "/healthy", "/v1/metrics",
	} {
		resp, body := r.say("GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n")
		if got := vllm.requests(); resp == nil || resp.StatusCode != http.StatusOK || body != "ok" || len(got) != 1 || got[0].line != "GET "+path+" HTTP/1.1" {
			t.Errorf("%s: %v %q, vLLM was asked %q", path, resp, body, got)
		}
	}
	for _, path := range []string{"/-/metrics", "/-/ready", "/-/healthy"} {
		for _, target := range []string{path, path + "?a=b", "http://x" + path} {
			if resp, body := r.say("GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n"); resp == nil || resp.StatusCode != http.StatusOK || len(vllm.requests()) > 0 {
				t.Errorf("%s: %v %q", target, resp, body)
			}
		}
		if resp, _ := r.say("POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"); resp == nil || len(vllm.requests()) != 1 {
			t.Errorf("POST %s is not vLLM's", path)
		}
	}
}

// TestHopByHop: what is for one connection only stays there, both ways, whether net/http names it or the message does.
func TestHopByHop(t *testing.T) {
	hops := []string{"Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Upgrade", "X-Listed", "X-Other", "X-Forwarded-For", "Connection"}
	header := "Connection: x-listed , X-Other\r\nConnection: X-FORWARDED-FOR\r\nX-Listed: 1\r\nX-Other: 1\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\nX-Stays: 1\r\n" +
		"Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nProxy-Authenticate: Basic\r\nProxy-Authorization: Basic s3cret\r\nTE: deflate\r\nUpgrade: h2c\r\n"
	vllm := startStrict(t)
	vllm.answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + header + "\r\nok"
	r := newRig(t, vllm.url())
	r.learned()
	for _, to := range []struct{ path, body string }{{string(chat), `{"messages":[]}`}, {string(chat), streamed}, {"/v1/embeddings", "{}"}} {
		resp, body := r.say(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n%s", to.path, len(to.body), header, to.body))
		got := vllm.requests()
		if resp == nil || resp.StatusCode != http.StatusOK || body != "ok" || len(got) != 1 {
			t.Fatalf("%v %q, vLLM was asked %q", resp, body, got)
		}
		for name, h := range map[string]http.Header{"vLLM": got[0].header, "the client": resp.Header} {
			for _, hop := range hops {
				if v := h[hop]; v != nil && (hop != "Connection" || name == "vLLM" && fmt.Sprint(v) != "[close]") {
					t.Errorf("%s: %s gets %s: %q", to.path, name, hop, v)
				}
			}
			if h.Get("X-Stays") != "1" || h.Get("X-Forwarded-Proto") != "https" {
				t.Errorf("%s: %s lacks a header: %v", to.path, name, h)
			}
		}
	}
}

// TestBrokenUpload: a body that the client spoiled is the client's fault, also where vLLM has the beginning of it.
func TestBrokenUpload(t *testing.T) {
	vllm := startStrict(t)
	r := newRig(t, vllm.url(), func(c *Config) { c.MaxRequest = 4 })
	r.learned()
	for i, path := range []string{string(chat), "/v1/embeddings"} {
		resp, body := r.say("POST " + path + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\nzz\r\n")
		if resp == nil || resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, "request body cannot be read") || !strings.Contains(body, "invalid_request_error") {
			t.Errorf("%s: %v %s", path, resp, body)
		}
		r.wantMetric(float64(i+1), "requests_total", "code", "400")
	}
	r.wantMetric(0, "upstream_errors_total")
}

package proxy

import (
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// TestBrowsers: the headers by which a browser lets a page of another origin read an answer are vLLM's, once each.
func TestBrowsers(t *testing.T) {
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Date", "x")
		w.Header().Set("Vary", "Origin")
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		switch {
		case r.Method == http.MethodOptions:
			w.Header().Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
			_, _ = io.WriteString(w, "OK")
		case r.Method != http.MethodPost:
			w.Header().Set("Allow", "POST")
			http.Error(w, `{"detail":"Method Not Allowed"}`, http.StatusMethodNotAllowed)
		case r.URL.Path != string(chat):
			http.Error(w, `{"detail":"Not Found"}`, http.StatusNotFound)
		default:
			whole(`{"choices":[{"index":0}],`+codedUsage+`}`)(w, r)
		}
	})
	r := newRig(t, up.URL)
	direct := *r
	direct.url = up.URL
	for _, method := range []string{http.MethodOptions, http.MethodHead, http.MethodGet, http.MethodPut, http.MethodDelete, http.MethodPost} {
		for _, path := range []string{string(chat), string(completions), string(responses), string(messages), string(invocations), "/v1/unknown", "/", "/metrics/", "/v1/chat/completions/", "/-/unknown", "/v1/responses/"} {
			send := func(r *rig) answer {
				return r.send(method, path, map[bool]string{true: "{}"}[method == http.MethodPost], "Origin", "https://page.example", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization")
			}
			got, want := send(r), send(&direct)
			if got.status != want.status || got.body != want.body || !reflect.DeepEqual(got.header, want.header) {
				t.Errorf("%s %s: got %d %v %q, want %d %v %q", method, path, got.status, got.header, got.body, want.status, want.header, want.body)
			}
		}
	}
}

// TestKeys: a client's key is for vLLM and for nobody else, and the sidecar's own requests have the sidecar's.
func TestKeys(t *testing.T) {
	const theirs, ours = "client-s3cret", "sidecar-s3cret"
	for name, test := range map[string]struct {
		key   string
		open  bool // /metrics asks for no key
		exact bool
	}{
		"open, no key": {"", true, true}, "open, key": {ours, true, true}, "closed, key": {ours, false, true}, "closed, no key": {"", false, false},
	} {
		vllm := startEngine(t, func(c *vllmsim.Config) { c.APIKey = theirs })
		var mu sync.Mutex
		seen := map[string]bool{} // who asked, with which key
		backend, err := url.Parse(vllm.URL)
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
			own := r.Header.Get("User-Agent") == "vllm-timings"
			mu.Lock()
			seen[fmt.Sprint(own, " ", r.Header.Get("Authorization"))] = true
			mu.Unlock()
			if own && !test.open && r.Header.Get("Authorization") != "Bearer "+ours {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			out := r.Clone(r.Context())
			out.RequestURI, out.URL.Scheme, out.URL.Host = "", backend.Scheme, backend.Host
			resp, err := transport.RoundTrip(out)
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			defer resp.Body.Close()
			for key := range resp.Header {
				w.Header().Set(key, resp.Header.Get(key))
			}
			w.WriteHeader(resp.StatusCode)
			_, _ = io.Copy(w, resp.Body)
		})
		r := newRig(t, up.URL, func(c *Config) { c.Key = test.key })
		r.learned()
		send := func(path string, header ...string) answer {
			n := prompts.next()
			return r.send(http.MethodPost, path, chatRequest(false, 3+n%50, fmt.Sprint(n)), header...)
		}
		for _, header := range [][]string{nil, {"Authorization", "Bearer wrong-s3cret"}} {
			if a := send(string(chat), header...); a.status != http.StatusUnauthorized || a.timings.Exists() {
				t.Errorf("%s: %d %s", name, a.status, a.body)
			}
		}
		var last answer
		for range 2 { // the first may come before there is a baseline
			last = send(string(chat), "Authorization", "Bearer "+theirs)
		}
		if last.status != http.StatusOK || last.exact() != test.exact {
			t.Errorf("%s: %d %s", name, last.status, last.body)
		}
		send("/v1/nope?key="+theirs, "Authorization", "Bearer "+theirs, "X-Api-Key", theirs)
		r.quiet()
		mu.Lock()
		own := "true "
		if test.key != "" {
			own += "Bearer " + test.key
		}
		want := map[string]bool{own: true, "false ": true, "false Bearer wrong-s3cret": true, "false Bearer " + theirs: true}
		if !reflect.DeepEqual(seen, want) {
			t.Errorf("%s: vLLM saw %v, want %v", name, seen, want)
		}
		mu.Unlock()
		if strings.Contains(r.log.String(), "s3cret") {
			t.Errorf("%s: a key is in the log:\n%s", name, r.log)
		}
	}
}

// reachable checks that everything works at an upstream: answers, readings, version.
func reachable(t *testing.T, name string, r *rig, vllm *engine) {
	t.Helper()
	r.warm()
	vllm.check(t, r.chat(true, 5))
	vllm.check(t, r.chat(false, 6))
	if a := r.send(http.MethodGet, "/version", ""); a.status != http.StatusOK || !gjson.Get(a.body, "version").Exists() {
		t.Errorf("%s: %d %s", name, a.status, a.body)
	}
	if a := r.send(http.MethodGet, "/metrics", ""); !strings.Contains(a.body, "vllm:request_prefill_time_seconds_sum") || !strings.Contains(a.body, "vllm_timings_upstream_up 1") {
		t.Errorf("%s: metrics page %.200s", name, a.body)
	}
}

// engineHandler makes the handler of a simulated vLLM, to be served elsewhere.
func engineHandler(t *testing.T) (*engine, http.Handler) {
	t.Helper()
	vllm := startEngine(t)
	return vllm, vllm.Sim
}

// TestPathPrefix: vLLM under a path, the version and the metrics too.
func TestPathPrefix(t *testing.T) {
	vllm, h := engineHandler(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/a/b/") {
			t.Errorf("asked for %s", r.URL.Path)
		}
		http.StripPrefix("/a/b", h).ServeHTTP(w, r)
	})
	for _, prefix := range []string{"/a/b", "/a/b/"} {
		reachable(t, prefix, newRig(t, up.URL+prefix), vllm)
	}
}

// serveTLS serves with a certificate that only a sidecar with the returned change trusts.
func serveTLS(t *testing.T, h http.Handler) (url string, trusted func(*Config)) {
	t.Helper()
	up := httptest.NewUnstartedServer(h)
	up.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	up.StartTLS()
	t.Cleanup(up.Close)
	pool := x509.NewCertPool()
	pool.AddCert(up.Certificate())
	return up.URL, func(c *Config) { c.RootCAs = pool }
}

// TestPrivateCA: vLLM behind TLS with a certificate that only the given authority vouches for.
func TestPrivateCA(t *testing.T) {
	vllm, h := engineHandler(t)
	up, trusted := serveTLS(t, h)
	reachable(t, "TLS", newRig(t, up, trusted), vllm)
	// Nobody vouches for it.
	r := newRig(t, up)
	if a := r.chat(false, 1); a.status != http.StatusBadGateway || gjson.Get(a.body, "error.type").Str != "upstream_error" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// serveSocket serves at a unix socket.
func serveSocket(t *testing.T, path string, h http.Handler) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	up := httptest.NewUnstartedServer(h)
	up.Listener.Close()
	up.Listener = listener
	up.Start()
	t.Cleanup(up.Close)
}

// TestUnixSocket: vLLM at a socket, as with --uds.
func TestUnixSocket(t *testing.T) {
	vllm, h := engineHandler(t)
	path := filepath.Join(t.TempDir(), "s")
	serveSocket(t, path, h)
	reachable(t, "socket", newRig(t, "http://localhost", func(c *Config) { c.Socket = path }), vllm)
	r := newRig(t, "http://localhost", func(c *Config) { c.Socket = path + "-none" })
	if a := r.chat(false, 1); a.status != http.StatusBadGateway {
		t.Errorf("%d %s", a.status, a.body)
	}
}

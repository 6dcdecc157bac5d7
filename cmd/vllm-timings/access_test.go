package main

import (
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// write makes a file and returns its name.
func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// startTLS serves a simulated vLLM with a certificate of its own, which is in the file.
func startTLS(t *testing.T) (url, ca string) {
	t.Helper()
	s := httptest.NewUnstartedServer(startSim(t))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL, write(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
}

func TestUpstreamCA(t *testing.T) {
	url, ca := startTLS(t)
	other, err := os.ReadFile("testdata/ca.pem")
	if err != nil {
		t.Fatal(err)
	}
	mine, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{
		"alone":       ca,
		"in a bundle": write(t, "# of a test\n"+string(other)+string(mine)),
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, "--listen", "127.0.0.1:0", "--upstream", url, "--upstream-ca", file)
			p.log.await(t, "found vLLM 0.32.0")
			if body := ask(t, p); gjson.Get(body, "timings.estimated").Exists() || gjson.Get(body, "timings.predicted_n").Int() != 5 {
				t.Errorf("%s\n%s", body, p.log)
			}
		})
	}
}

// TestUpstreamCAMissing: the error says what is wrong, and which flag mends it, without a certificate and with another one.
func TestUpstreamCAMissing(t *testing.T) {
	url, _ := startTLS(t)
	for _, args := range [][]string{nil, {"--upstream-ca", "testdata/ca.pem"}} {
		p := start(t, append(args, "--listen", "127.0.0.1:0", "--upstream", url)...)
		const reason = `cannot be reached \(certificate not trusted\)[^"]*--upstream-ca`
		p.log.await(t, `msg="vLLM `+reason)
		resp := post(t, p.url+"/v1/chat/completions", question)
		body := readAll(t, resp)
		if message := gjson.Get(body, "error.message").String(); resp.StatusCode != http.StatusBadGateway || !regexp.MustCompile(`^vLLM at `+url+` `+reason).MatchString(message) {
			t.Errorf("%s: %s", resp.Status, body)
		}
	}
}

// TestUpstreamSocket: logs and errors name the socket, not the host that HTTP needs.
func TestUpstreamSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "vt") // t.TempDir() is too long for a socket on some systems
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "vllm.sock")
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", "unix://"+path)
	named := `upstream=` + regexp.QuoteMeta("unix://"+path) + ` `
	p.log.await(t, `msg=serving .*`+named)
	p.log.await(t, `msg="vLLM does not answer yet; .*`+named)
	resp := post(t, p.url+"/v1/chat/completions", question)
	body := readAll(t, resp)
	if message := gjson.Get(body, "error.message").String(); resp.StatusCode != http.StatusBadGateway || !strings.HasPrefix(message, "vLLM at unix://"+path+" cannot be reached (no such socket). ") {
		t.Errorf("%s: %s", resp.Status, body)
	}

	serveSocket(t, path)
	p.log.await(t, `msg="found vLLM 0\.32\.0: .*`+named)
	if body := ask(t, p); gjson.Get(body, "timings.estimated").Exists() || gjson.Get(body, "timings.predicted_n").Int() != 5 {
		t.Errorf("%s\n%s", body, p.log)
	}
	if got := p.log.String(); strings.Contains(got, "localhost") {
		t.Errorf("the host that HTTP needs is in the log:\n%s", got)
	}
}

// TestUpstreamAPIKey: the key goes with the readings, where a vLLM behind a gate wants it, and with nothing that a client
// asks for. Nobody gets to read it.
func TestUpstreamAPIKey(t *testing.T) {
	const key = "own-s3cret"
	sim := startSim(t)
	var mu sync.Mutex
	keys := map[string]bool{} // path, key
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		auth := r.Header.Get("Authorization")
		mu.Lock()
		keys[r.URL.Path+" "+auth] = true
		mu.Unlock()
		if r.URL.Path != "/health" && auth != "Bearer "+key && auth != "Bearer secret-key" { // that is the client's
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		sim.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	for name, args := range map[string][]string{
		"flag":     {"--upstream-api-key", " " + key + "\t"},
		"file":     {"--upstream-api-key-file", write(t, "\n"+key+"\r\n")},
		"variable": nil,
	} {
		t.Run(name, func(t *testing.T) {
			if args == nil {
				t.Setenv("VLLM_TIMINGS_UPSTREAM_API_KEY", key)
				if _, stdout, stderr := run("serve", "--help"); strings.Contains(stdout+stderr, key) {
					t.Error("--help shows the key")
				}
			}
			mu.Lock()
			clear(keys)
			mu.Unlock()
			p := start(t, append(args, "--listen", "127.0.0.1:0", "--upstream", s.URL, "--log-level", "debug")...)
			p.log.await(t, "found vLLM 0.32.0: requests that finish alone get exact timings")
			if body := ask(t, p); !gjson.Get(body, "timings").Exists() {
				t.Errorf("%s\n%s", body, p.log)
			}
			for _, path := range []string{"/health", "/v1/models", "/version", "/metrics", "/metrics/"} { // from a client without a key
				resp, err := client.Get(p.url + path)
				if err != nil {
					t.Fatal(err)
				}
				if body := readAll(t, resp); path == "/metrics" && strings.Contains(body, "vllm:") {
					t.Error("a client without a key sees vLLM's metrics")
				} else if path != "/health" && path != "/metrics" && resp.StatusCode != http.StatusUnauthorized {
					t.Errorf("%s: %s", path, resp.Status)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			for _, asked := range []string{"/version Bearer " + key, "/metrics/ Bearer " + key, "/v1/chat/completions Bearer secret-key", "/health ", "/v1/models ", "/version ", "/metrics ", "/metrics/ "} {
				if !keys[asked] {
					t.Errorf("no %q in %v", asked, keys)
				}
			}
			for asked := range keys {
				if path, auth, _ := strings.Cut(asked, " "); auth == "Bearer "+key && path != "/version" && path != "/metrics" && path != "/metrics/" {
					t.Errorf("%s is asked for with the key of the readings", path)
				}
			}
			if strings.Contains(p.log.String(), key) {
				t.Errorf("the key is in the log:\n%s", p.log)
			}
		})
	}
}

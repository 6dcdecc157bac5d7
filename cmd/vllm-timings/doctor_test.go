package main

import (
	"context"
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/metrics"
)

var update = flag.Bool("update", false, "write testdata/doctor anew")

// simWith starts a simulated vLLM that is set up otherwise than usual.
func simWith(t *testing.T, set func(*vllmsim.Config)) *vllmsim.Server {
	t.Helper()
	cfg := vllmsim.Default()
	cfg.DecodeStep = -1
	if set != nil {
		set(&cfg)
	}
	sim, err := vllmsim.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sim.Close)
	return sim
}

// editing serves h with its answers edited. An edit may be for one path only.
func editing(t *testing.T, h http.Handler, edit func(path string, status int, body string) (int, string)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		status, body := edit(r.URL.Path, rec.Code, rec.Body.String())
		w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// at is an edit for one path.
func at(path string, edit func(status int, body string) (int, string)) func(string, int, string) (int, string) {
	return func(p string, status int, body string) (int, string) {
		if strings.TrimRight(p, "/") != path {
			return status, body
		}
		return edit(status, body)
	}
}

// golden compares with a file of testdata/doctor. What changes from run to run is taken out.
func golden(t *testing.T, name, url, got string) {
	t.Helper()
	if url != "" {
		got = strings.ReplaceAll(got, url, "URL")
	}
	got = regexp.MustCompile(`(takes|in) \d+(\.\d+)? ms`).ReplaceAllString(got, "$1 N ms")
	got = regexp.MustCompile(`("(?:reading_)?ms"): [\d.]+`).ReplaceAllString(got, "$1: 0.5")
	file := filepath.Join("testdata", "doctor", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// nativeFlagsOn are the flags that make all exact.
func nativeFlagsOn(c *vllmsim.Config) { c.PerRequestMetrics, c.PromptTokensDetails = true, true }

func TestDoctor(t *testing.T) {
	for name, c := range map[string]struct {
		sim    func(*vllmsim.Config)
		faults vllmsim.Faults
		edit   func(path string, status int, body string) (int, string)
		path   string // of the upstream
		args   []string
		code   int
	}{
		"plain":         {code: 1},
		"exact":         {sim: nativeFlagsOn, code: 0},
		"exact_full":    {sim: func(c *vllmsim.Config) { nativeFlagsOn(c); c.FilteredMetrics = false }, code: 0},
		"no_details":    {sim: func(c *vllmsim.Config) { c.PerRequestMetrics = true }, code: 1},
		"only_details":  {sim: func(c *vllmsim.Config) { c.PromptTokensDetails = true }, code: 1},
		"old":           {sim: func(c *vllmsim.Config) { c.Version = "0.19.1"; nativeFlagsOn(c) }, code: 1},
		"old_no_stats":  {sim: func(c *vllmsim.Config) { c.Version = "0.11.2"; c.DisableLogStats = true }, code: 1},
		"unfiltered":    {sim: func(c *vllmsim.Config) { c.FilteredMetrics = false }, code: 1},
		"no_stats":      {sim: func(c *vllmsim.Config) { c.DisableLogStats = true }, code: 1},
		"no_request":    {args: []string{"--no-request"}, code: 1},
		"no_metrics":    {faults: vllmsim.Faults{Metrics: vllmsim.MetricsNotFound}, code: 1},
		"key_missing":   {sim: func(c *vllmsim.Config) { c.APIKey = "s3cret"; nativeFlagsOn(c) }, code: 1},
		"key_wrong":     {sim: func(c *vllmsim.Config) { c.APIKey = "s3cret" }, args: []string{"--upstream-api-key", "other-s3cret"}, code: 1},
		"key":           {sim: func(c *vllmsim.Config) { c.APIKey = "s3cret"; nativeFlagsOn(c) }, args: []string{"--upstream-api-key", "s3cret"}, code: 0},
		"models":        {sim: func(c *vllmsim.Config) { c.Models = strings.Split("base a b c d e f g", " "); nativeFlagsOn(c) }, args: []string{"--model", "c"}, code: 0},
		"model_unknown": {args: []string{"--model", "other"}, code: 1},
		"in_v1":         {path: "/v1", code: 2},
		"in_path":       {sim: nativeFlagsOn, path: "/some/path/", code: 0},
		"unhealthy":     {edit: at("/health", func(int, string) (int, string) { return 503, "" }), code: 1},
		// vLLM with --api-server-count: the filtered page is empty, and the whole one is of no single process.
		"api_servers": {faults: vllmsim.Faults{Metrics: vllmsim.MetricsEmptyFiltered}, code: 1,
			edit: at("/metrics", func(status int, body string) (int, string) {
				return status, regexp.MustCompile(`(?m)^process_start_time_seconds.*\n`).ReplaceAllString(body, "")
			})},
		"engines": {sim: nativeFlagsOn, code: 0, edit: at("/metrics", func(status int, body string) (int, string) {
			return status, body + strings.ReplaceAll(body, `engine="0"`, `engine="1"`)
		})},
		"no_template": {sim: nativeFlagsOn, code: 0, edit: at(chatPath, func(int, string) (int, string) {
			return 400, `{"error":{"message":"there is no chat template","type":"BadRequestError","param":null,"code":400}}`
		})},
		"patched": {code: 0, edit: at(chatPath, func(status int, body string) (int, string) {
			return status, strings.TrimSuffix(body, "}") + `,"timings":{"prompt_n":1,"prompt_ms":1.5,"predicted_n":2,"predicted_ms":2.5}}`
		})},
		"patched_estimates": {code: 1, edit: at(chatPath, func(status int, body string) (int, string) {
			return status, strings.TrimSuffix(body, "}") + `,"timings":{"prompt_n":1,"estimated":true}}`
		})},
		"overloaded": {edit: at(chatPath, func(int, string) (int, string) { return 429, `{"error":{"message":"Too many requests"}}` }), code: 1},
		"gateway": {edit: func(path string, status int, body string) (int, string) { // it lets only the API through
			if !strings.HasPrefix(path, "/v1/") {
				return 404, "nothing here"
			}
			return status, body
		}, code: 1},
		"hostile": {code: 1, edit: at("/version", func(int, string) (int, string) {
			return 200, `{"version":"1.0\u001b[2J\n\u0007` + strings.Repeat("x", 1000) + `"}`
		})},
	} {
		t.Run(name, func(t *testing.T) {
			sim := simWith(t, c.sim)
			sim.SetFaults(c.faults)
			url := sim.URL
			if c.edit != nil {
				url = editing(t, sim, c.edit)
			}
			if prefix := strings.TrimRight(c.path, "/"); strings.HasPrefix(prefix, "/some") {
				s := httptest.NewServer(http.StripPrefix(prefix, sim))
				t.Cleanup(s.Close)
				url = s.URL
			}
			code, stdout, stderr := run(append([]string{"doctor", "--upstream", url + c.path}, c.args...)...)
			if code != c.code || stderr != "" {
				t.Errorf("exit code %d, not %d; %q", code, c.code, stderr)
			}
			golden(t, name+".txt", url, stdout)
			if strings.Contains(stdout, "s3cret") || strings.Contains(stdout, "\x1b") {
				t.Errorf("a key or a control character is shown:\n%q", stdout)
			}
			if n := sim.Stats().Requests; n > 1 && name != "no_template" || name == "no_request" && n != 0 {
				t.Errorf("%d requests", n)
			}
		})
	}
}

// TestDoctorJSON: the same as JSON, which scripts can read.
func TestDoctorJSON(t *testing.T) {
	sims := map[string]*vllmsim.Server{
		"plain": simWith(t, nil),
		"exact": simWith(t, nativeFlagsOn),
	}
	for name, want := range map[string]int{"plain": 1, "exact": 0, "unreachable": 2} {
		url := "http://127.0.0.1:9"
		if sim := sims[name]; sim != nil {
			url = sim.URL
		}
		code, stdout, stderr := run("doctor", "--json", "--upstream", url)
		if code != want || stderr != "" || !json.Valid([]byte(stdout)) || gjson.Get(stdout, "exit_code").Int() != int64(want) {
			t.Errorf("%s: exit code %d, %q", name, code, stderr)
		}
		golden(t, name+".json", url, stdout)
	}
}

// TestDoctorUnreachable: it says why, and which flag mends it.
func TestDoctorUnreachable(t *testing.T) {
	tls, ca := startTLS(t)
	dead := start(t, "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:9")
	website := httptest.NewServer(http.NotFoundHandler())
	defer website.Close()
	llama := httptest.NewServer(http.RedirectHandler("/login", http.StatusFound))
	defer llama.Close()
	for name, url := range map[string]string{
		"unreachable":   "http://127.0.0.1:9",
		"no_socket":     "unix:///nowhere/vllm.sock",
		"not_trusted":   tls,
		"not_tls":       strings.Replace(dead.url, "http:", "https:", 1),
		"sidecar_alone": dead.url,
		"no_vllm":       website.URL,
		"redirect":      llama.URL,
	} {
		code, stdout, stderr := run("doctor", "--upstream", url)
		if code != 2 || stderr != "" {
			t.Errorf("%s: exit code %d, %q", name, code, stderr)
		}
		golden(t, name+".txt", url, stdout)
	}
	if code, stdout, stderr := run("doctor", "--upstream", tls, "--upstream-ca", ca); code != 1 {
		t.Errorf("exit code %d, %s%s", code, stdout, stderr)
	}
}

// TestDoctorSocket: the socket is named, not the host that HTTP needs.
func TestDoctorSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "vt") // t.TempDir() is too long for a socket on some systems
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "vllm.sock")
	serveSocket(t, path)
	url := "unix://" + path
	code, stdout, stderr := run("doctor", "--upstream", url)
	if code != 1 || stderr != "" {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	golden(t, "plain.txt", url, stdout)
}

// TestDoctorPassword: what the URL has for something before vLLM is used, and not shown.
func TestDoctorPassword(t *testing.T) {
	sim := simWith(t, nativeFlagsOn)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "s3cret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		sim.ServeHTTP(w, r)
	}))
	defer s.Close()
	code, stdout, stderr := run("doctor", "--upstream", strings.Replace(s.URL, "http://", "http://me:s3cret@", 1))
	if code != exitOK || stderr != "" || strings.Contains(stdout, "s3cret") {
		t.Errorf("exit code %d, %q\n%s", code, stderr, stdout)
	}
	code, stdout, stderr = run("doctor", "--upstream", s.URL)
	if code != exitFailed || stderr != "" {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	golden(t, "key_everywhere.txt", s.URL, stdout)
}

// TestDoctorSidecar: a vllm-timings is not mistaken for vLLM.
func TestDoctorSidecar(t *testing.T) {
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", simWith(t, nativeFlagsOn).URL)
	p.log.await(t, "found vLLM")
	code, stdout, stderr := run("doctor", "--upstream", p.url)
	if code != 1 || stderr != "" {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	golden(t, "sidecar.txt", p.url, stdout)
}

// TestDoctorBalanced: of several vLLMs behind one address no window can be had.
func TestDoctorBalanced(t *testing.T) {
	sims := [2]*vllmsim.Server{simWith(t, nil), simWith(t, nil)}
	sims[1].Restart() // so that its start time is another one
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { sims[n.Add(1)%2].ServeHTTP(w, r) }))
	defer s.Close()
	code, stdout, stderr := run("doctor", "--upstream", s.URL)
	if code != 1 || stderr != "" {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	golden(t, "balanced.txt", s.URL, stdout)
}

// TestDoctorSlow: readings that take too long are told of.
func TestDoctorSlow(t *testing.T) {
	f := findings{Reachable: true, VLLM: true, Health: 200, Version: "0.32.0", noRequest: true}
	f.Metrics.mode, f.Metrics.ReadingMS, f.Metrics.Engines = metrics.ModeFiltered, 180.04, 1
	f.conclude()
	if text := f.table(false); !strings.Contains(text, "  !     /metrics             filtered; a reading takes 180.0 ms\n") ||
		!strings.Contains(text, "  - Give serve a longer --metrics-deadline than 250ms: a reading of /metrics takes 180 ms.\n") {
		t.Error(text)
	}
}

// TestDoctorStopped: a signal is no finding.
func TestDoctorStopped(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs strings.Builder
	code := Main(ctx, []string{"doctor", "--upstream", startSim(t).URL}, &out, &errs)
	if code != exitFailed || out.String() != "" || errs.String() != "vllm-timings: it was stopped before all was found out\n" {
		t.Errorf("%d, %q, %q", code, &out, &errs)
	}
}

// TestDoctorColours: terminals get colours, unless the user says no, and nothing else does.
func TestDoctorColours(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	terminal, err := os.Open(os.DevNull) // a character device too
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	file, err := os.Open("doctor.go")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if !colours(terminal) || colours(file) || colours(io.Discard) {
		t.Error("terminals are not told from others")
	}
	t.Setenv("NO_COLOR", "1")
	if colours(terminal) {
		t.Error("colours in spite of NO_COLOR")
	}
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "dumb")
	if colours(terminal) {
		t.Error("colours on a dumb terminal")
	}
	known := false
	f := findings{Upstream: "URL", Reachable: true, VLLM: true, Health: 200, Version: "0.32.0", Models: []string{"tiny"}, Native: &known, Cached: &known, Timings: &known,
		Request: &modelRequest{Endpoint: chatPath, Model: "tiny", Error: "status 500"}}
	f.Metrics.mode, f.Metrics.ReadingMS, f.Metrics.Engines = metrics.ModeFiltered, 0.7, 1
	f.conclude()
	coloured := f.table(true)
	golden(t, "coloured.txt", "", coloured)
	if got := regexp.MustCompile(`\x1b\[\d+m`).ReplaceAllString(coloured, ""); got != f.table(false) {
		t.Errorf("colours change more than colours:\n%s\n%s", got, f.table(false))
	}
}

func TestDoctorWrong(t *testing.T) {
	t.Setenv("VLLM_TIMINGS_DOCTOR_JSON", "maybe")
	code, stdout, stderr := run("doctor", "--upstream", "x", "--no-request=1x", "--upstream-ca", "/nowhere")
	want := `vllm-timings: --upstream: "x" has no scheme: write http://x
vllm-timings: --upstream-ca: there is no file /nowhere
vllm-timings: --no-request: "1x" is neither true nor false
vllm-timings: --json: "maybe" is neither true nor false
See vllm-timings doctor --help.
`
	if code != exitUsage || stdout != "" || stderr != want {
		t.Errorf("exit code %d, %q, and\n%s\nwant\n%s", code, stdout, stderr, want)
	}
	if _, stdout, _ := run("doctor", "--help"); !strings.Contains(strings.Join(strings.Fields(stdout), " "), "Exit codes: 0 every number is exact (/v1/messages at least alone") {
		t.Error(stdout)
	}
}

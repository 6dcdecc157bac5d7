package main

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/needs"
	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

func startSim(t *testing.T) *vllmsim.Server {
	t.Helper()
	cfg := vllmsim.Default()
	cfg.DecodeStep = -1
	sim, err := vllmsim.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sim.Close)
	return sim
}

const question = `{"model":"tiny","max_tokens":5,"ignore_eos":true,"messages":[{"role":"user","content":"my secret-prompt"}]}`

// ask sends one request through p and returns the answer.
func ask(t *testing.T, p *process) string {
	t.Helper()
	resp := post(t, p.url+"/v1/chat/completions", question)
	body := readAll(t, resp)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status %s: %s", resp.Status, body)
	}
	return body
}

func TestServe(t *testing.T) {
	sim := startSim(t)
	prefixed := httptest.NewServer(http.StripPrefix("/some/path", sim))
	defer prefixed.Close()
	for _, upstream := range []string{sim.URL, sim.URL + "/", prefixed.URL + "/some/path", prefixed.URL + "/some/path/"} {
		p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream)
		p.log.await(t, `level=INFO msg=serving listen=http://127\.0\.0\.1:\d+ upstream=`+regexp.QuoteMeta(upstream)+` sources=upstream,native,window,observed version=\S+\n`)
		p.log.await(t, `msg="found vLLM 0.32.0: `)
		// The first answer has them too: there was a reading of the metrics before vLLM was said to be found.
		if body := ask(t, p); gjson.Get(body, "timings.predicted_n").Int() != 5 || gjson.Get(body, "timings.estimated").Exists() {
			t.Errorf("%s: %s", upstream, body)
		}
		p.log.await(t, `msg=request method=POST path=/v1/chat/completions status=200 .*model=tiny .*predicted_n=5`)
		p.stop()
		if code := p.wait(t); code != exitOK {
			t.Errorf("exit code %d", code)
		}
		if strings.Contains(p.log.String(), "secret") {
			t.Errorf("a prompt or a key is in the log:\n%s", p.log)
		}
	}
}

func TestServeUpstreamEndsInV1(t *testing.T) {
	sim := startSim(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL+"/v1/")
	p.log.await(t, `level=WARN msg="--upstream ends in /v1`)
}

func TestServeWithoutVLLM(t *testing.T) {
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:9")
	p.log.await(t, `msg="vLLM does not answer yet; requests get status 502 until it does" upstream=http://127.0.0.1:9`)
	resp := post(t, p.url+"/v1/chat/completions", question)
	if body := readAll(t, resp); resp.StatusCode != http.StatusBadGateway || !strings.Contains(gjson.Get(body, "error.message").String(), "http://127.0.0.1:9") {
		t.Errorf("%s: %s", resp.Status, body)
	}
}

// TestEnvironment: each flag can be given by its environment variable, and the command line goes before it.
func TestEnvironment(t *testing.T) {
	sim := startSim(t)
	t.Setenv("VLLM_TIMINGS_UPSTREAM", sim.URL)
	t.Setenv("VLLM_TIMINGS_LISTEN", "127.0.0.1:0")
	t.Setenv("VLLM_TIMINGS_LOG_FORMAT", "json")
	t.Setenv("VLLM_TIMINGS_LOG_LEVEL", "error")
	t.Setenv("VLLM_TIMINGS_SOURCES", "observed")
	t.Setenv("VLLM_TIMINGS_KEEP_METRICS", "true")
	p := start(t, "--log-level", "debug")
	if body := ask(t, p); gjson.Get(body, "timings").Exists() {
		t.Errorf("an answer that came whole has timings although its source is not allowed: %s", body)
	}
	p.log.await(t, `"msg":"request".*"no_timings":"no_source"`)
	for line := range strings.Lines(p.log.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil || entry["msg"] == nil || entry["level"] == nil || entry["time"] == nil {
			t.Errorf("%q: %v", line, err)
		}
	}
	if !strings.Contains(p.log.String(), `"upstream":"`+sim.URL+`","sources":"observed"`) {
		t.Error(p.log)
	}
}

func TestLogLevel(t *testing.T) {
	sim := startSim(t)
	p := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL)
	quiet := exec.Command(p.cmd.Path, "serve", "--log-level=warn", "--listen", strings.TrimPrefix(p.url, "http://"))
	out, err := quiet.CombinedOutput()
	if err == nil || strings.Count(string(out), "\n") != 1 || quiet.ProcessState.ExitCode() != exitFailed {
		t.Errorf("%v, %s", err, out)
	}
}

func TestHealthcheck(t *testing.T) {
	sim := startSim(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL)
	_, port, err := net.SplitHostPort(strings.TrimPrefix(p.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	sick := httptest.NewServer(http.NotFoundHandler())
	defer sick.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, c := range []struct {
		listen string
		args   []string
		code   int
		stderr string
	}{
		{listen: ":" + port},
		{listen: "0.0.0.0:" + port},
		{listen: "[::]:" + port},
		{listen: "127.0.0.1:" + port},
		{listen: "localhost:" + port},
		{listen: "127.0.0.1:9", args: []string{"--url", p.url + "/-/ready"}},
		{listen: "127.0.0.1:9", args: []string{"--url=" + p.url + "/health"}},
		{listen: ":9", code: exitFailed, stderr: "vllm-timings: http://127.0.0.1:9/-/healthy does not answer: "},
		{args: []string{"--url", sick.URL}, code: exitFailed, stderr: "vllm-timings: " + sick.URL + " answers with status 404 Not Found, not 200\n"},
		{args: []string{"--timeout=10ms", "--url", "http://" + silent.Addr().String()}, code: exitFailed, stderr: "vllm-timings: http://" + silent.Addr().String() + " did not answer in 10ms\n"},
		{args: []string{"--url", "nonsense"}, code: exitUsage, stderr: `vllm-timings: --url: "nonsense" is no URL like `},
	} {
		t.Setenv("VLLM_TIMINGS_LISTEN", c.listen)
		code, stdout, stderr := run(append([]string{"healthcheck"}, c.args...)...)
		if code != c.code || stdout != "" || !strings.HasPrefix(stderr, c.stderr) || c.stderr == "" && stderr != "" {
			t.Errorf("%q %q: exit code %d, %q, %q", c.listen, c.args, code, stdout, stderr)
		}
	}
}

func TestHealthcheckIPv6(t *testing.T) {
	probe, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("this machine has no IPv6, which no package brings, so CI does without this too: ", err)
	}
	address := probe.Addr().String()
	probe.Close()
	start(t, "--listen", address, "--upstream", "http://127.0.0.1:9")
	t.Setenv("VLLM_TIMINGS_LISTEN", address)
	if code, _, stderr := run("healthcheck"); code != exitOK {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// TestVersion: what the linker set goes before what Go records of the build.
func TestVersion(t *testing.T) {
	if code, stdout, stderr := run("--version"); code != exitOK || stderr != "" || !strings.HasPrefix(stdout, "vllm-timings ") {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
	linked := filepath.Join(t.TempDir(), "linked")
	build(t, ".", "-trimpath", "-buildvcs=false", "-ldflags=-X main.version=v1.2.3 -X main.commit=abc123 -X main.date=2026-12-01T10:00:00Z", "-o", linked, ".")
	if out := output(t, ".", linked, "version"); !regexp.MustCompile(`^vllm-timings v1\.2\.3, commit abc123, 2026-12-01T10:00:00Z, go1\.\d+\S*\n$`).MatchString(out) {
		t.Errorf("%q", out)
	}

	// A repository of its own with this module's sources, to have a commit whatever the state of ours.
	if _, err := exec.LookPath("git"); err != nil {
		needs.Unable(t, err)
	}
	repo := t.TempDir()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	list := `{{if and .Module .Module.Main}}{{$dir := .Dir}}{{range .GoFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}{{range .EmbedFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}{{end}}`
	for name := range strings.FieldsSeq(output(t, ".", "go", "list", "-deps", "-f", list, ".")) {
		path, err := filepath.Rel(root, name)
		if err != nil {
			t.Fatal(err)
		}
		copyFile(t, name, filepath.Join(repo, path))
	}
	copyFile(t, "../../go.mod", filepath.Join(repo, "go.mod"))
	copyFile(t, "../../go.sum", filepath.Join(repo, "go.sum"))
	git := func(args ...string) string {
		return output(t, repo, "git", append([]string{"-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"}, args...)...)
	}
	git("init", "-q")
	git("add", "-A")
	git("commit", "-q", "-m", "x")
	git("tag", "-a", "-m", "x", "v0.9.0")
	commit := strings.TrimSpace(git("rev-parse", "HEAD"))
	recorded := filepath.Join(t.TempDir(), "recorded")
	build(t, repo, "-trimpath", "-buildvcs=true", "-o", recorded, "./cmd/vllm-timings")
	if out := output(t, ".", recorded, "version"); !regexp.MustCompile(`^vllm-timings v0\.9\.0, commit ` + commit + `, 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ, go1\.\d+\S*\n$`).MatchString(out) {
		t.Errorf("%q", out)
	}
	copyFile(t, "../../go.mod", filepath.Join(repo, "more", "go.mod"))
	build(t, repo, "-trimpath", "-buildvcs=true", "-o", recorded, "./cmd/vllm-timings")
	if out := output(t, ".", recorded, "version"); !strings.Contains(out, ", commit "+commit+"+changes, ") {
		t.Errorf("%q", out)
	}
}

func build(t *testing.T, dir string, args ...string) {
	t.Helper()
	output(t, dir, "go", append([]string{"build"}, args...)...)
}

func output(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, &stderr)
	}
	return string(out)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

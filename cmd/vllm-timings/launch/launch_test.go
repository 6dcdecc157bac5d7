package launch

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFlag(t *testing.T) {
	for _, c := range []struct {
		argv, value string
		ok          bool
	}{
		{"vllm serve m --port 1", "1", true},
		{"vllm serve m --port=2 x", "2", true},
		{"vllm serve m --port 1 --port=3", "3", true},
		{"vllm serve m --port", "", true},
		{"vllm serve m --ports 1 -p 4", "", false},
		{"--port 1", "", false},
	} {
		if value, ok := Flag(strings.Fields(c.argv), "--port"); value != c.value || ok != c.ok {
			t.Errorf("%s: %q, %v", c.argv, value, ok)
		}
	}
}

func TestHasSwitch(t *testing.T) {
	for argv, want := range map[string]bool{
		"vllm serve m --disable-log-stats":       true,
		"vllm serve m --disable_log_stats":       true,
		"vllm serve m --disable-log-stats=true":  true,
		"vllm serve m --no-disable-log-stats":    true,
		"vllm serve m --disable-log-st":          true,
		"vllm serve m --disable-log-requests":    false,
		"vllm serve m --disable-log-stats-later": false,
		"vllm serve m":                           false,
		"--disable-log-stats":                    false,
	} {
		if hasSwitch(strings.Fields(argv), disableLogStats) != want {
			t.Errorf("%s: %v", argv, !want)
		}
	}
}

// install makes an environment with a Python and a vLLM, and returns its folder.
func install(t *testing.T, version string, native bool) string {
	t.Helper()
	env := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		file := filepath.Join(env, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	flags := "enable_prompt_tokens_details: bool = False\n"
	if native {
		flags += "enable_per_request_metrics: bool = False\n"
	}
	write("bin/python", "", 0o755)
	write("bin/vllm", "#!"+env+"/bin/python\nimport sys\n", 0o755)
	write("bin/vllm-long", "#!/bin/sh\n'''exec' \""+env+"/bin/python\" \"$0\" \"$@\"\n' '''\n", 0o755)
	write("pyvenv.cfg", "home = /nowhere/bin\nversion_info = 3.12.1\n", 0o644)
	site := "lib/python3.12/site-packages/"
	write(site+"vllm/__init__.py", "", 0o644)
	write(site+"vllm/_version.py", "__version__ = version = '"+version+"'\n", 0o644)
	write(site+"vllm/entrypoints/openai/cli_args.py", flags, 0o644)
	return env
}

// TestNativeMetrics: which commands get which flags, without that anything is started.
func TestNativeMetrics(t *testing.T) {
	now, old := install(t, "0.32.0", true), install(t, "0.19.1", false)
	both := []string{perRequestMetrics, promptTokensDetails}
	config := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(config, []byte("disable_log_stats: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// uv's environment is found from a folder inside of the project.
	project := t.TempDir()
	if err := os.Symlink(now, filepath.Join(project, ".venv")); err != nil {
		t.Fatal(err)
	}
	inner := filepath.Join(project, "a", "b")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	// An installation to work on.
	worked := install(t, "0.1.0", false)
	site := filepath.Join(worked, "lib/python3.12/site-packages")
	if err := os.Rename(filepath.Join(site, "vllm"), filepath.Join(site, "gone")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(site, "x.pth"), []byte("import os\n"+filepath.Join(now, "lib/python3.12/site-packages")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Join(now, "bin")+string(os.PathListSeparator)+os.Getenv("PATH"))
	t.Setenv("PYTHONPATH", "")
	const unknown = "it cannot be told"
	for _, c := range []struct {
		argv  string
		force bool
		want  []string
		why   string
	}{
		{argv: "vllm serve m", want: both},
		{argv: now + "/bin/vllm serve m", want: both},
		{argv: now + "/bin/python -m vllm.entrypoints.openai.api_server --model m", want: both},
		{argv: now + "/bin/python -u -m vllm.entrypoints.cli.main serve m", want: both},
		{argv: now + "/bin/python " + now + "/bin/vllm serve m", want: both},
		{argv: "env A=b C=d vllm serve m", want: both},
		{argv: "uv run --project " + inner + " vllm serve m", want: both},
		{argv: "uv run --directory=" + inner + " python -m vllm.entrypoints.openai.api_server", want: both},
		{argv: worked + "/bin/vllm serve m", want: both},
		{argv: "uv run --with vllm vllm serve m", why: unknown},
		{argv: old + "/bin/vllm serve m", why: "vLLM 0.19.1 is older than 0.25"},
		{argv: "vllm serve m --disable-log-stats", why: "vLLM is started with --disable-log-stats"},
		{argv: "vllm serve m --disable-log-stats", force: true, why: "vLLM is started with --disable-log-stats"},
		{argv: "vllm serve m --config " + config, why: "vLLM is started with --disable-log-stats"},
		{argv: "vllm serve m --enable-per-request-metrics", want: both[1:]},
		{argv: "vllm serve m --no-enable-per-request-metrics --enable_prompt_tokens_details"},
		{argv: "vllm bench serve", why: unknown},
		{argv: "docker run vllm/vllm-openai --model m", why: unknown},
		{argv: "docker run vllm/vllm-openai --model m", force: true, want: both},
		{argv: "sh -c vllm", why: unknown},
		{argv: "uv run", why: unknown},
		{argv: "env", why: unknown},
		{argv: "python -m", why: unknown},
		{argv: "vllm", why: unknown},
		{argv: "/nowhere/vllm serve m", why: unknown},
	} {
		began := time.Now()
		flags, why := NativeMetrics(strings.Fields(c.argv), c.force)
		if !slices.Equal(flags, c.want) || !strings.HasPrefix(why, c.why) || c.why == "" && why != "" {
			t.Errorf("%s: %q, %q", c.argv, flags, why)
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("%s: took %s", c.argv, took)
		}
	}
	if got := interpreter(now + "/bin/vllm-long"); got != now+"/bin/python" {
		t.Errorf("pip's form for a long path: %q", got)
	}
	if got := SleepMode(strings.Fields("vllm serve m")); !slices.Equal(got, []string{sleepMode}) {
		t.Errorf("%q", got)
	}
	for _, argv := range []string{"vllm serve m --enable-sleep-mode", "docker run x"} {
		if got := SleepMode(strings.Fields(argv)); got != nil {
			t.Errorf("%s: %q", argv, got)
		}
	}
}

func TestFreePort(t *testing.T) {
	for range 10 {
		port, err := FreePort()
		if err != nil || port < 1024 || PortTaken(fmt.Sprintf("127.0.0.1:%d", port)) {
			t.Errorf("%d, %v", port, err)
		}
	}
}

// safe is a buffer that may be read while it is written.
type safe struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safe) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safe) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestOutput: our lines wait for the end of the program's, but not for ever.
func TestOutput(t *testing.T) {
	var to safe
	out := NewOutput(&to)
	step := func(program, ours, want string) {
		t.Helper()
		out.program([]byte(program))
		if ours != "" {
			fmt.Fprint(out, ours)
		}
		if got := to.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	step("", "a\n", "a\n")
	step("1\n", "b\n", "a\n1\nb\n")
	step("2", "c\n", "a\n1\nb\n2")
	step("2", "d\n", "a\n1\nb\n22")
	step("\n3\n4", "", "a\n1\nb\n22\n3\nc\nd\n4")
	step("\n", "e\n", "a\n1\nb\n22\n3\nc\nd\n4\ne\n")
	step("5%\r", "f\n", "a\n1\nb\n22\n3\nc\nd\n4\ne\n5%\r")
	for end := time.Now().Add(10 * time.Second); !strings.HasSuffix(to.String(), "5%\r\nf\n") && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	step("6", "g\n", "a\n1\nb\n22\n3\nc\nd\n4\ne\n5%\r\nf\n6")
	out.Flush()
	step("", "h\n", "a\n1\nb\n22\n3\nc\nd\n4\ne\n5%\r\nf\n6\ng\nh\n")
}

// TestTail: what is appended comes through, also the last of it.
func TestTail(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(file, []byte("old\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var to safe
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Tail(ctx, file, 4, NewOutput(&to))
	}()
	fmt.Fprint(f, "new\n")
	for end := time.Now().Add(10 * time.Second); to.String() == "" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	fmt.Fprint(f, "last\n")
	cancel()
	<-done
	if to.String() != "new\nlast\n" {
		t.Errorf("%q", to.String())
	}
}

//go:build linux

package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// napper is the command of a vLLM that sleeps, and its address.
type napper struct {
	url, log string
	flags    []string
	command  []string
}

func newNapper(t *testing.T) *napper {
	t.Helper()
	port, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// A command that is known as vLLM's: the name, and a Python beside which there is a package.
	dir := t.TempDir()
	for name, text := range map[string]string{
		"bin/vllm":   "#!/bin/sh\n'''exec' " + dir + "/bin/python \"$0\" \"$@\"\n' '''\n",
		"bin/python": "#!/bin/sh\nshift\n" + roleVar + "=vllm GORACE=atexit_sleep_ms=0 exec " + self + " \"$@\"\n",
		"pyvenv.cfg": "version_info = 3.12.0\n",
		"lib/python3.12/site-packages/vllm/__init__.py":                    "",
		"lib/python3.12/site-packages/vllm/entrypoints/openai/cli_args.py": "enable_per_request_metrics enable_prompt_tokens_details",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	log := filepath.Join(dir, "logs", "vllm.log")
	return &napper{
		url: fmt.Sprintf("http://127.0.0.1:%d", port), log: log,
		flags:   []string{"--sleep-mode", "--daemon-log", log},
		command: []string{filepath.Join(dir, "bin", "vllm"), "serve", "--port", strconv.Itoa(port)},
	}
}

func (n *napper) run(t *testing.T, do string, flags ...string) *launched {
	t.Helper()
	return startRun(t, do, append(n.flags, flags...), n.command...)
}

func (n *napper) get(t *testing.T, path string) string {
	t.Helper()
	resp, err := client.Get(n.url + path)
	if err != nil {
		t.Fatal(err)
	}
	return readAll(t, resp)
}

// TestRunSleepMode: vLLM is started once, sleeps when nobody needs it, and requests wait while it wakes up.
func TestRunSleepMode(t *testing.T) {
	n := newNapper(t)
	first := n.run(t, "slow wake")
	first.log.await(t, `added="--enable-per-request-metrics --enable-prompt-tokens-details --enable-sleep-mode"`)
	pid := first.log.await(t, `msg="vLLM was started to stay" pid=(\d+) log=`+n.log)[1]
	first.log.await(t, "vLLM is ready")
	ask(t, first.process)
	first.log.await(t, `(?m)^pid `+pid+`$`) // its own output
	if first.signal(t, syscall.SIGTERM); first.wait(t) != exitOK {
		t.Error(first.log)
	}
	first.log.await(t, `msg="vLLM sleeps" level=1`)
	if got := n.get(t, "/is_sleeping"); got != `{"is_sleeping":true}` {
		t.Error(got)
	}

	second := n.run(t, "")
	resp := post(t, second.url+"/v1/chat/completions", question)
	if body := readAll(t, resp); resp.StatusCode != http.StatusOK || !strings.Contains(body, `"timings"`) {
		t.Errorf("a request during the wake: %s %s", resp.Status, body)
	}
	second.log.await(t, `msg="vLLM woke up" after_ms=[5-9]\d\d`)
	if strings.Contains(second.log.String(), "started to stay") || len(marked(first.mark)) != 1 {
		t.Error("it was started again")
	}
	// As llama-swap's cmdStop.
	code, _, stderr := run("sleep", "--upstream", n.url, "--level", "2", "--stop-pid", strconv.Itoa(second.cmd.Process.Pid))
	if code != exitOK || stderr != "" || second.wait(t) != exitOK {
		t.Errorf("exit code %d, %s", code, stderr)
	}
	if page := n.get(t, "/metrics"); !strings.Contains(page, `sleep_state="discard_all"} 1.0`) {
		t.Error("it does not sleep at level 2")
	}

	// The sidecar is killed: vLLM stays, awake, and is found again.
	third := n.run(t, "")
	third.log.await(t, "vLLM is ready")
	third.signal(t, syscall.SIGKILL)
	third.wait(t)
	fourth := n.run(t, "")
	fourth.log.await(t, "vLLM is ready")
	ask(t, fourth.process)

	// vLLM dies: the sidecar ends with an error, and the next one starts another.
	if victim, err := strconv.Atoi(pid); err != nil || syscall.Kill(victim, syscall.SIGKILL) != nil {
		t.Fatal(pid, err)
	}
	if code := fourth.wait(t); code != 1 {
		t.Errorf("exit code %d", code)
	}
	fifth := n.run(t, "")
	fifth.log.await(t, "started to stay")
	fifth.log.await(t, "vLLM is ready")
	own, err := strconv.Atoi(fifth.log.await(t, `(?m)^pid (\d+)$`)[1])
	if err != nil || syscall.Kill(own, syscall.SIGKILL) != nil {
		t.Fatal(own, err)
	}
	if code := fifth.wait(t); code != 137 {
		t.Errorf("exit code %d", code)
	}
	fifth.awaitNone(t, time.Second)
	first.awaitNone(t, 0)
}

// TestRunSleepModeStart: a vLLM that was not ready is not left behind, and two sidecars start only one.
func TestRunSleepModeStart(t *testing.T) {
	n := newNapper(t)
	l := n.run(t, "exit 3")
	if code := l.wait(t); code != 3 {
		t.Errorf("exit code %d", code)
	}
	l.log.await(t, `(?m)^ValueError: no such model$`)
	l.awaitNone(t, 0)

	l = n.run(t, "wait")
	l.log.await(t, "started to stay")
	l.signal(t, syscall.SIGTERM)
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	l.awaitNone(t, 0)

	l = n.run(t, "wait")
	l.log.await(t, "started to stay")
	other := n.run(t, "")
	other.log.await(t, `msg="vLLM was started before and is not ready yet"`)
	if err := os.WriteFile(filepath.Join(l.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.log.await(t, "vLLM is ready")
	other.log.await(t, "vLLM is ready")
	if strings.Contains(other.log.String(), "started to stay") {
		t.Error("it was started twice")
	}
}

// TestRunSleepModeFlags: what vLLM lacks is named, and vLLM is not left behind when it cannot sleep.
func TestRunSleepModeFlags(t *testing.T) {
	n := newNapper(t)
	t.Setenv("VLLM_SERVER_DEV_MODE", "0")
	l := n.run(t, "")
	if code := l.wait(t); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	const want = "has no /is_sleeping: start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with --enable-sleep-mode"
	if !strings.Contains(l.log.String(), "vllm-timings: vLLM at "+n.url+" "+want+"\n") {
		t.Error(l.log)
	}
	l.awaitNone(t, 0)

	t.Setenv("VLLM_SERVER_DEV_MODE", "1")
	l = n.run(t, "no sleep mode")
	l.log.await(t, `level=ERROR msg="vLLM at `+n.url+` runs without --enable-sleep-mode: it would keep its memory while it sleeps"`)
}

func startNapping(t *testing.T, set func(*vllmsim.Config)) *vllmsim.Server {
	t.Helper()
	cfg := vllmsim.Default()
	cfg.DevMode, cfg.SleepMode = true, true
	set(&cfg)
	sim, err := vllmsim.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sim.Close)
	return sim
}

// TestSleepCommand: what it says, and that the other process is stopped in any case.
func TestSleepCommand(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*vllmsim.Config)
		code int
		want string
	}{
		{"can", func(*vllmsim.Config) {}, exitOK, ""},
		{"old", func(c *vllmsim.Config) { c.Version = "0.19.1" }, exitOK, ""},
		{"no development mode", func(c *vllmsim.Config) { c.DevMode = false }, exitFailed,
			" has no /is_sleeping: start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with --enable-sleep-mode\n"},
		{"no sleep mode", func(c *vllmsim.Config) { c.SleepMode = false }, exitFailed,
			" runs without --enable-sleep-mode: it would keep its memory while it sleeps\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sim := startNapping(t, c.set)
			victim := exec.Command("sleep", "1000")
			if err := victim.Start(); err != nil {
				t.Fatal(err)
			}
			code, _, stderr := run("sleep", "--upstream", sim.URL, "--stop-pid", strconv.Itoa(victim.Process.Pid))
			want := c.want
			if want != "" {
				want = "vllm-timings: vLLM at " + sim.URL + want
			}
			if code != c.code || stderr != want || sim.Sleeping() != 1-c.code {
				t.Errorf("exit code %d, %q, level %d", code, stderr, sim.Sleeping())
			}
			if err := victim.Wait(); err == nil || err.Error() != "signal: terminated" {
				t.Errorf("the other process: %v", err)
			}
			if code == exitOK { // once more is no error
				if code, _, stderr := run("sleep", "--upstream", sim.URL); code != exitOK || stderr != "" {
					t.Errorf("exit code %d, %q", code, stderr)
				}
			}
		})
	}
	if code, _, stderr := run("sleep", "--upstream", "http://127.0.0.1:9"); code != exitOK || !strings.Contains(stderr, "so there is nothing to put to sleep\n") {
		t.Errorf("exit code %d, %q", code, stderr)
	}
}

// TestWakeDeep: a vLLM that threw its weights away gets them again before it answers.
func TestWakeDeep(t *testing.T) {
	sim := startNapping(t, func(*vllmsim.Config) {})
	s, err := (&serveCmd{ListenFlag: ListenFlag{":1"}, Upstream: sim.URL}).complete()
	if err == nil {
		t.Fatal("the other flags are empty")
	}
	e := newEngine(&s)
	for _, level := range []string{"1", "2", "1"} {
		if err := e.sleep(t.Context(), level); err != nil {
			t.Fatal(err)
		}
		if err := e.wake(t.Context()); err != nil || sim.Sleeping() != 0 || sim.WeightsLost() {
			t.Errorf("level %s: %v", level, err)
		}
	}
}

// TestRunLlamaSwapSleep: with cmdStop, llama-swap finds its model awake again in less than a second.
func TestRunLlamaSwapSleep(t *testing.T) {
	program, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	n := newNapper(t)
	mark := fmt.Sprintf("sleep-%d", time.Now().UnixNano())
	config := fmt.Sprintf("models:\n  tiny:\n    cmd: %s run --listen 127.0.0.1:${PORT} --sleep-mode --daemon-log %s -- %s\n    cmdStop: %s sleep --upstream %s --stop-pid ${PID}\n",
		program, n.log, strings.Join(n.command, " "), program, n.url)
	swap := startSwapping(t, mark, config)
	t.Cleanup(func() {
		for _, pid := range marked(mark) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	for range 5 {
		began := time.Now()
		if err := askModel(swap.URL, "tiny"); err != nil {
			t.Fatal(err)
		}
		t.Log("loaded after ", time.Since(began))
		began = time.Now()
		unloadAll(t, swap.URL)
		t.Log("unloaded after ", time.Since(began))
		if got := n.get(t, "/is_sleeping"); got != `{"is_sleeping":true}` {
			t.Error(got)
		}
	}
	f, err := os.Open(n.log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if text, _ := io.ReadAll(f); strings.Count(string(text), "pid ") != 1 {
		t.Errorf("vLLM was started again:\n%s", text)
	}
}

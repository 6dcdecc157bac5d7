package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// marked returns the living processes with that mark.
func marked(mark string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(markVar+"="+mark)) {
			pid, _ := strconv.Atoi(strings.Split(file, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

// awaitNone waits until no process of l is left.
func (l *launched) awaitNone(t *testing.T, within time.Duration) {
	t.Helper()
	left := marked(l.mark)
	for end := time.Now().Add(within); len(left) > 0 && time.Now().Before(end); left = marked(l.mark) {
		time.Sleep(2 * time.Millisecond)
	}
	for _, pid := range left[:min(len(left), 10)] {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		t.Errorf("%d are left, among them %d %q", len(left), pid, bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
	}
}

// childPID returns the process id of what l started.
func (l *launched) childPID(t *testing.T) int {
	t.Helper()
	pid, err := strconv.Atoi(l.out.await(t, `pid (\d+)`)[1])
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// parentOf returns the parent's process id.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	parent, err := strconv.Atoi(strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))[1])
	if err != nil {
		t.Fatal(err)
	}
	return parent
}

func (l *launched) get(t *testing.T, path string) (*http.Response, string) {
	t.Helper()
	resp, err := client.Get(l.url + path)
	if err != nil {
		t.Fatal(err)
	}
	return resp, readAll(t, resp)
}

// TestRun: it answers from the start, and passes on once vLLM is ready; the first answer is exact.
func TestRun(t *testing.T) {
	t.Setenv("VLLM_TIMINGS_NATIVE_METRICS", "on")
	l := startRun(t, "wait", nil)
	l.log.await(t, `msg=serving listen=http://127\.0\.0\.1:\d+ upstream="a free port" sources=upstream,native,window,observed command=\S+ version=\S+\n`)
	if resp, body := l.get(t, "/health"); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%s: %s", resp.Status, body)
	}
	resp := post(t, l.url+"/v1/chat/completions", question)
	if body := readAll(t, resp); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
		gjson.Get(body, "error.message").String() != "vLLM is starting" || gjson.Get(body, "error.code").Int() != 503 || gjson.Get(body, "error.type").String() == "" {
		t.Errorf("%s: %s", resp.Status, body)
	}
	for path, want := range map[string]string{"/-/healthy": "200 ok", "/-/ready": "503 vLLM is starting", "/-/metrics": "200 ", "/metrics": "200 "} {
		resp, body := l.get(t, path)
		if got := fmt.Sprint(resp.StatusCode, " ", body); !strings.HasPrefix(got, want) || strings.HasSuffix(path, "metrics") && !strings.Contains(body, "vllm_timings_upstream_up 0") {
			t.Errorf("%s: %.300s", path, got)
		}
	}
	if err := os.WriteFile(filepath.Join(l.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.log.await(t, `msg="vLLM is ready" upstream=http://127\.0\.0\.1:\d+`)
	for _, path := range []string{"/health", "/-/ready", "/version"} {
		if resp, body := l.get(t, path); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %s %s", path, resp.Status, body)
		}
	}
	if body := ask(t, l.process); gjson.Get(body, "timings.predicted_n").Int() != 5 || gjson.Get(body, "timings.estimated").Exists() {
		t.Error(body)
	}
	l.log.await(t, `added="--host 127\.0\.0\.1 --port \d+ --enable-per-request-metrics --enable-prompt-tokens-details"`)
	l.log.await(t, `msg=request .*source=native`)
	l.signal(t, syscall.SIGTERM)
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if strings.Contains(l.log.String(), "WARNING") {
		t.Error("our variables reach vLLM, which warns of them")
	}
	l.awaitNone(t, 0)
}

// TestRunStop: in-flight answers drain, what ignores SIGTERM is killed, and nothing of the grandchildren is left.
func TestRunStop(t *testing.T) {
	for do, want := range map[string]int{"slow": 0, "deaf": 137, "fork": 0, "fork,deaf": 137, "storm": 0} {
		t.Run(do, func(t *testing.T) {
			grace := "3s"
			if want != 0 {
				grace = "300ms"
			}
			l := startRun(t, do, []string{"--stop-timeout", grace})
			l.log.await(t, "vLLM is ready")
			if strings.Contains(do, "fork") {
				l.out.await(t, "forked")
				if n := len(marked(l.mark)); n < 7 {
					t.Errorf("only %d processes", n)
				}
			}
			resp := post(t, l.url+"/v1/chat/completions", `{"model":"tiny","stream":true,"max_tokens":10,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}`)
			l.signal(t, syscall.SIGTERM)
			if body := readAll(t, resp); !strings.HasSuffix(body, "data: [DONE]\n\n") {
				t.Errorf("the answer in flight ends with %q", body)
			}
			if code := l.wait(t); code != want {
				t.Errorf("exit code %d, want %d", code, want)
			}
			l.awaitNone(t, 0)
		})
	}
}

// TestRunSecondSignal: the process ends at once, and all that it started with it.
func TestRunSecondSignal(t *testing.T) {
	l := startRun(t, "slow,fork", []string{"--drain-timeout", "1m", "--stop-timeout", "1m"})
	l.log.await(t, "vLLM is ready")
	resp := post(t, l.url+"/v1/chat/completions", `{"model":"tiny","stream":true,"max_tokens":3000,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}`)
	defer resp.Body.Close()
	l.signal(t, syscall.SIGINT)
	l.log.await(t, "msg=\"stopping: ")
	l.signal(t, syscall.SIGINT)
	l.wait(t)
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the answer ended as if it were whole")
	}
	l.awaitNone(t, 5*time.Second)
}

// TestRunDiesAtStart: the exit code is the command's, the reason is told, and the port is given free.
func TestRunDiesAtStart(t *testing.T) {
	for do, want := range map[string]int{"exit 3": 3, "abort": 134, "fork,exit 3": 3} {
		t.Run(do, func(t *testing.T) {
			l := startRun(t, do, nil)
			if code := l.wait(t); code != want {
				t.Errorf("exit code %d, want %d", code, want)
			}
			l.log.await(t, `level=ERROR msg="the command (ended with exit code 3|was ended by signal 6): it was not ready yet; its output says why"`)
			if want == 3 {
				l.log.await(t, `(?m)^ValueError: no such model$`)
			}
			if strings.Contains(l.log.String(), "once more") {
				t.Error("it was started again although its port was free")
			}
			l.awaitNone(t, 0)
		})
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "vllm")
	if err := os.WriteFile(file, []byte("#!/no/such/python\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	l := startRun(t, "", nil, file, "serve")
	if code := l.wait(t); code != exitFailed || !strings.Contains(l.log.String(), "vllm-timings: the command cannot be started: no such file or directory\n") {
		t.Errorf("exit code %d", code)
	}
}

// TestRunDiesInFlight: answers in flight end at once: a stream breaks, and what has sent nothing gets 502.
func TestRunDiesInFlight(t *testing.T) {
	l := startRun(t, "slow", nil)
	l.log.await(t, "vLLM is ready")
	stream := post(t, l.url+"/v1/chat/completions", `{"model":"tiny","stream":true,"max_tokens":3000,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}`)
	defer stream.Body.Close()
	if _, err := io.ReadFull(stream.Body, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	whole := make(chan string, 1)
	go func() {
		resp, err := client.Post(l.url+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"tiny","max_tokens":3000,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}`))
		if err != nil {
			whole <- err.Error()
			return
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		whole <- fmt.Sprint(resp.StatusCode, " ", gjson.GetBytes(body, "error.type"), " ", err)
	}()
	l.awaitInFlight(t, 2)
	began := time.Now()
	if err := syscall.Kill(l.childPID(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(stream.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ends with %.300q, %v", rest, err)
	}
	if got := <-whole; got != "502 upstream_error <nil>" {
		t.Errorf("the answer that had not begun: %s", got)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("they ended after %s", took)
	}
	if code := l.wait(t); code != 137 {
		t.Errorf("exit code %d", code)
	}
	l.log.await(t, `level=ERROR msg="the command was ended by signal 9: its output says why"`)
	l.awaitNone(t, 0)
}

func (l *launched) awaitInFlight(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if _, page := l.get(t, "/-/metrics"); strings.Contains(page, fmt.Sprintf("\nvllm_timings_in_flight_requests %d\n", n)) {
			return
		}
	}
	t.Fatal("the requests do not arrive")
}

// TestRunOutput: what the program writes goes through byte for byte, far faster than 1 MB/s, and our lines stand alone.
func TestRunOutput(t *testing.T) {
	l := startRun(t, "flood", nil)
	for range 20 { // our own lines between
		l.get(t, "/health")
	}
	l.log.await(t, "vLLM is ready")
	for range 20 {
		l.get(t, "/health")
	}
	l.signal(t, syscall.SIGTERM)
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	for name, got := range map[string]string{"out": l.out.String(), "err": l.log.String()} {
		i, ours := 0, 0
		for line := range strings.Lines(got) {
			switch {
			case line == floodLine(name, i):
				i++
			case name == "err" && strings.HasPrefix(line, "time=") && strings.Contains(line, " msg=") && !strings.Contains(line, "xxxxx"):
				ours++
			case name == "out" && i == 0 && strings.HasPrefix(line, "pid "):
			default:
				t.Fatalf("std%s, behind line %d: %q", name, i, line)
			}
		}
		if i != floodLines || name == "err" && ours < 20 {
			t.Errorf("std%s has %d lines, and %d of ours", name, i, ours)
		}
	}
}

// TestRunOneStream: where stdout and stderr are one file, all stays in order.
func TestRunOneStream(t *testing.T) {
	file, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(file, "run", "--log-level=error", "--listen=127.0.0.1:0", "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo $i >&2; done; exit 7")
	cmd.Env = append(os.Environ(), roleVar+"=program")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if want := "1\n1\n2\n2\n3\n3\n4\n4\n5\n5\n6\n6\n7\n7\n8\n8\n9\n9\n"; !errors.As(err, &exit) || exit.ExitCode() != 7 || !strings.HasPrefix(string(out), want) {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRunKilled: whatever dies first, nothing is left.
func TestRunKilled(t *testing.T) {
	for _, do := range []string{"fork", "fork,deaf", "storm", "wait"} {
		for _, victim := range []string{"sidecar", "guard", "group", "both"} {
			if victim == "both" && do != "wait" {
				continue // the program dies with its guard; what it started has nobody left
			}
			t.Run(do+" "+victim, func(t *testing.T) {
				l := startRun(t, do, []string{"--stop-timeout", "300ms"})
				pid := l.childPID(t)
				switch {
				case strings.Contains(do, "fork"):
					l.out.await(t, "forked")
				case do == "storm":
					l.log.await(t, "vLLM is ready")
				}
				switch guard := parentOf(t, pid); victim {
				case "sidecar":
					l.signal(t, syscall.SIGKILL)
				case "group": // as llama-swap does it
					_ = syscall.Kill(-l.cmd.Process.Pid, syscall.SIGKILL)
				case "guard":
					_ = syscall.Kill(guard, syscall.SIGKILL)
				case "both":
					l.signal(t, syscall.SIGSTOP) // it does nothing any more
					_ = syscall.Kill(guard, syscall.SIGKILL)
					l.signal(t, syscall.SIGKILL)
				}
				code := l.wait(t)
				if victim == "guard" && code != 137 {
					t.Errorf("exit code %d", code)
				}
				l.awaitNone(t, 10*time.Second)
			})
		}
	}
}

// TestRunPortClash: a port that another process took before the command had it is replaced, once.
func TestRunPortClash(t *testing.T) {
	l := startRun(t, "clash", nil)
	awaitFile(filepath.Join(l.dir, "port"))
	port, err := os.ReadFile(filepath.Join(l.dir, "port"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("tcp", "127.0.0.1:"+string(port))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := os.WriteFile(filepath.Join(l.dir, "taken"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.log.await(t, `level=WARN msg="the command ended before it was ready, and another process has its port now: it is started once more, with another port" port=`+string(port)+` exit_code=1`)
	l.log.await(t, "vLLM is ready")
	ask(t, l.process)
	l.signal(t, syscall.SIGTERM)
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	l.awaitNone(t, 0)

	// The user's own port is not replaced.
	file, _ := os.Executable()
	l = startRun(t, "", nil, "env", roleVar+"=vllm", file, "serve", "--port", string(port))
	if code := l.wait(t); code != exitFailed || !strings.Contains(l.log.String(), "vllm-timings: 127.0.0.1:"+string(port)+", where the command's vLLM should listen, is in use by another process") {
		t.Errorf("exit code %d", code)
	}
}

// fakeDocker is a container engine's client: the server is the engine's child, and signals are passed on.
const fakeDocker = `#!/bin/sh
[ "$1 $2" = "run --rm" ] || exit 9
shift 2
setsid "$@" &
trap 'kill -TERM $!' TERM
wait $!
trap - TERM
wait $!
`

// TestRunUpstream: with --upstream the command gets no address, as with docker run.
func TestRunUpstream(t *testing.T) {
	docker := filepath.Join(t.TempDir(), "docker")
	if err := os.WriteFile(docker, []byte(fakeDocker), 0o755); err != nil {
		t.Fatal(err)
	}
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := probe.Addr().String()
	_, port, _ := net.SplitHostPort(address)
	probe.Close()
	file, _ := os.Executable()
	l := startRun(t, "", []string{"--upstream", "http://" + address}, docker, "run", "--rm", "env", roleVar+"=vllm", file, "serve", "--port="+port)
	l.log.await(t, `msg="starting the command" command=docker upstream=http://`+address+` added=""`)
	l.log.await(t, "vLLM is ready")
	ask(t, l.process)
	l.signal(t, syscall.SIGTERM)
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	l.awaitNone(t, 0)
}

// TestRunProcess1: as the first process of a container it waits for orphans that are not its own.
func TestRunProcess1(t *testing.T) {
	for _, tool := range []string{"unshare", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			needs.Unable(t, err)
		}
	}
	if out, err := exec.Command("unshare", "-Upf", "--map-root-user", "--mount-proc", "true").CombinedOutput(); err != nil {
		t.Skip("this machine allows no namespaces, which no package brings: ", err, string(out))
	}
	l := startMarked(t, "fork", "unshare -Upf --map-root-user --mount-proc --kill-child", []string{"--stop-timeout", "1s"})
	l.log.await(t, "vLLM is ready")
	l.out.await(t, "forked")
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", l.cmd.Process.Pid, l.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	first := strings.TrimSpace(string(children))
	enter := func(script string) string {
		t.Helper()
		out, err := exec.Command("nsenter", "-t", first, "-U", "-p", "-m", "sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	// As docker exec does: orphans of what has another parent outside.
	enter("for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
	const zombies = `grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l; grep -l '^Name:.sleep' /proc/[0-9]*/status | wc -l`
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if got := strings.Fields(enter(zombies)); got[0] == "0" && got[1] == "1" { // the one that fork started
			break
		} else if time.Now().After(end) {
			t.Fatalf("zombies and sleepers: %s\n%s", got, enter("ps -e -o pid,ppid,stat,args 2>/dev/null || true"))
		}
	}
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := l.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	l.awaitNone(t, time.Second)
}

// TestRunJSONLog: its lines can be read, and have no key in them.
func TestRunJSONLog(t *testing.T) {
	file, _ := os.Executable()
	cmd := exec.Command(file, "run", "--log-format=json", "--listen=127.0.0.1:0", "--", "sh", "-c", "exit 5", "serve", "--api-key", "secret")
	cmd.Env = append(os.Environ(), roleVar+"=program")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	_ = cmd.Run()
	if code := cmd.ProcessState.ExitCode(); code != 5 || strings.Contains(stderr.String(), "secret") {
		t.Errorf("exit code %d\n%s", code, &stderr)
	}
	for line := range strings.Lines(stderr.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("%q", line)
		}
	}
}

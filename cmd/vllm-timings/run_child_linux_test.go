package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/cmd/vllm-timings/launch"
	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// The test binary is also the program itself, and what that starts. It is one of these when this variable says so.
const (
	roleVar = "RUN_TEST_ROLE"
	doVar   = "RUN_TEST_DO"   // what the started program does besides serving, a list
	pathVar = "RUN_TEST_PATH" // a folder for what it shares with the test
	markVar = "RUN_TEST_MARK" // by which all processes of a test are found
)

func init() {
	switch os.Getenv(roleVar) {
	case "program":
		main()
	case "vllm":
		os.Exit(actVLLM(os.Args))
	case "sleeper": // ends when it is killed
		signal.Ignore(syscall.SIGTERM)
		select {}
	}
}

// actVLLM acts as vllm serve. Its first line tells its process id.
func actVLLM(args []string) int {
	do := strings.Split(os.Getenv(doVar), ",")
	does := func(what string) bool { return slices.Contains(do, what) }
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	fmt.Printf("pid %d\n", os.Getpid())
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, envPrefix+"_") {
			fmt.Fprintln(os.Stderr, "WARNING: Unknown vLLM environment variable detected:", e)
		}
	}
	switch {
	case does("exit 3"):
		fmt.Fprintln(os.Stderr, "ValueError: no such model")
		return 3
	case does("abort"):
		_ = syscall.Exec("/bin/sh", []string{"sh", "-c", "kill -ABRT $$"}, os.Environ())
	case does("flood"):
		flood()
	case does("clash"): // the first time, another process has the port in the end
		if _, err := os.Stat(shared("port")); err != nil {
			port, _ := launch.Flag(args, "--port")
			_ = os.WriteFile(shared("port.new"), []byte(port), 0o600)
			_ = os.Rename(shared("port.new"), shared("port"))
			awaitFile(shared("taken"))
			return 1
		}
	}
	if does("fork") {
		forkAll()
	}
	if does("storm") {
		go storm()
	}
	if does("wait") {
		awaitFile(shared("go"))
	}
	host, _ := launch.Flag(args, "--host")
	port, _ := launch.Flag(args, "--port")
	cfg := vllmsim.Default()
	cfg.DecodeStep = time.Millisecond
	if does("slow") {
		cfg.DecodeStep = 50 * time.Millisecond
	}
	cfg.PerRequestMetrics = slices.Contains(args, "--enable-per-request-metrics")
	cfg.PromptTokensDetails = slices.Contains(args, "--enable-prompt-tokens-details")
	cfg.SleepMode = slices.Contains(args, "--enable-sleep-mode") && !does("no sleep mode")
	cfg.DevMode = os.Getenv("VLLM_SERVER_DEV_MODE") == "1"
	if does("slow wake") {
		cfg.WakeTime = 500 * time.Millisecond
	}
	if name, ok := launch.Flag(args, "--served-model-name"); ok {
		cfg.Models = []string{name}
	}
	server, err := vllmsim.Listen(net.JoinHostPort(host, port), cfg)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer server.Close()
	if does("deaf") {
		signal.Ignore(syscall.SIGTERM)
		select {}
	}
	<-terminate
	return 0
}

func shared(name string) string { return filepath.Join(os.Getenv(pathVar), name) }

func awaitFile(name string) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if _, err := os.Stat(name); err == nil {
			return
		}
	}
}

// floodLines is how many lines flood writes to each of stdout and stderr: 3 MB each.
const floodLines = 30_000

func floodLine(stream string, i int) string {
	return fmt.Sprintf("%s %07d %s\n", stream, i, strings.Repeat("x", 80))
}

// flood writes as fast as it can, in pieces that end in the midst of lines.
func flood() {
	done := make(chan bool)
	for name, file := range map[string]*os.File{"out": os.Stdout, "err": os.Stderr} {
		go func() {
			w := bufio.NewWriterSize(file, 1000)
			for i := range floodLines {
				_, _ = io.WriteString(w, floodLine(name, i))
			}
			_ = w.Flush()
			done <- true
		}()
	}
	<-done
	<-done
}

// sleeperCommand is a process that only SIGKILL ends.
func sleeperCommand(attr *syscall.SysProcAttr) *exec.Cmd {
	file, _ := os.Executable()
	cmd := exec.Command(file)
	cmd.Env = append(os.Environ(), roleVar+"=sleeper")
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, os.Stderr, attr
	return cmd
}

// forkAll starts grandchildren of all kinds: in the group, in a group and in a session of their own, and one whose parent has
// ended.
func forkAll() {
	for _, attr := range []*syscall.SysProcAttr{nil, {Setpgid: true}, {Setsid: true}} {
		if err := sleeperCommand(attr).Start(); err != nil {
			panic(err)
		}
	}
	daemon := exec.Command("sh", "-c", "setsid sh -c 'trap \"\" TERM; sleep 60; sleep 60' & exit 0")
	daemon.Stdout, daemon.Stderr = os.Stdout, os.Stderr
	if err := daemon.Run(); err != nil {
		panic(err)
	}
	fmt.Println("forked")
}

// storm starts processes for 20 s, a hundred a second, each in a session of its own, whose parents sleep: some from the
// program's group, and some each from the one before. All end by themselves, so that a failed test leaves no storm behind.
func storm() {
	chain := shared("chain")
	calm := fmt.Sprintf(`[ "$(date +%%s)" -lt %d ]`, time.Now().Add(20*time.Second).Unix())
	script := "#!/bin/sh\ntrap '' TERM\nsleep 0.01\n" + calm + " && setsid " + chain + " &\nsleep 60\nsleep 60\n"
	if err := os.WriteFile(chain, []byte(script), 0o755); err != nil {
		panic(err)
	}
	_ = exec.Command("sh", "-c", "trap '' TERM; setsid "+chain+" & setsid "+chain+" & while "+calm+"; do setsid sh -c 'sleep 60; sleep 60' & sleep 0.01; done").Run()
}

// launched is vllm-timings run as a process of its own.
type launched struct {
	*process
	out  *console
	dir  string // shared with the program that it starts
	mark string
}

// startRun runs the command, which acts as vLLM and does what it is told besides.
func startRun(t *testing.T, do string, flags []string, command ...string) *launched {
	t.Helper()
	return startMarked(t, do, "", flags, command...)
}

// startMarked is startRun behind other words: prefix is a command that starts its arguments.
func startMarked(t *testing.T, do, prefix string, flags []string, command ...string) *launched {
	t.Helper()
	file, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l := &launched{process: &process{log: newConsole(), code: make(chan int, 1)}, out: newConsole(), dir: t.TempDir()}
	l.mark = fmt.Sprintf("%s-%d-%d", strings.ReplaceAll(t.Name(), "/", "_"), os.Getpid(), time.Now().UnixNano())
	if len(command) == 0 {
		command = []string{"env", roleVar + "=vllm", file, "serve"}
	}
	args := append(strings.Fields(prefix), file, "run", patient, "--listen", "127.0.0.1:0", "--log-level", "debug")
	args = append(append(append(args, flags...), "--"), command...)
	l.cmd = exec.Command(args[0], args[1:]...)
	l.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", roleVar+"=program", doVar+"="+do, pathVar+"="+l.dir, markVar+"="+l.mark)
	l.cmd.Stdout, l.cmd.Stderr = l.out, l.log
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = l.cmd.Wait() // ProcessState has the outcome
		l.code <- l.cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		_ = l.cmd.Process.Kill()
		for _, pid := range marked(l.mark) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		<-done
		if t.Failed() {
			t.Logf("stderr:\n%.4000s", l.log)
		}
	})
	l.url = l.log.await(t, servingLine)[1]
	return l
}

func (l *launched) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := l.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

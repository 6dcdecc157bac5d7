package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a program that was started and serves at an address.
type process struct {
	cmd *exec.Cmd
	log *os.File
}

// start starts a program and waits until it answers at path. What it writes goes to a file.
func start(ctx context.Context, addr, path string, args ...string) (*process, error) {
	out, err := os.CreateTemp("", "soak-*.log")
	if err != nil {
		return nil, err
	}
	p := &process{exec.Command(args[0], args[1:]...), out}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, out.Close(), os.Remove(out.Name()))
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		resp, err := client.Get("http://" + addr + path)
		if err == nil {
			_ = resp.Body.Close()
			return p, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			said, _ := os.ReadFile(out.Name())
			p.kill()
			return nil, fmt.Errorf("%v does not answer: %w\n%s", args, err, said)
		}
	}
}

// kill ends the process at once, as the kernel does when memory runs out.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.forget()
}

// stop ends it as a user does. It must end by itself, with exit code 0.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	return p.cmd.Wait()
}

func (p *process) forget() {
	_ = p.log.Close()
	_ = os.Remove(p.log.Name())
}

// complaints returns what the process wrote that it should never write.
func (p *process) complaints() (lines []string, err error) {
	b, err := os.ReadFile(p.log.Name())
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "panic") || strings.HasPrefix(line, "fatal error") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines, nil
}

// ownMemory returns the bytes of memory that are a process's own, as internal/bench counts them.
func ownMemory(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "Pss_Anon:" {
			kib, err := strconv.ParseFloat(f[1], 64)
			return kib * 1024, err
		}
	}
	return 0, fmt.Errorf("no Pss_Anon of process %d", pid)
}

// freeAddress returns an address that is not among those which the kernel gives to connections: while vLLM is dead, one of
// them must not get its port.
func freeAddress() (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000)))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", errors.New("no free port between 20000 and 30000")
}

//go:build unix

package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Process is a started program in a process group of its own, with its output in a file.
type Process struct {
	Name    string
	LogPath string

	cmd  *exec.Cmd
	done chan struct{} // closed when the program has ended
}

// start runs cmd, with its output appended to a log file in dir.
func start(dir, name string, cmd *exec.Cmd) (*Process, error) {
	p := &Process{Name: name, LogPath: filepath.Join(dir, name+".log"), cmd: cmd, done: make(chan struct{})}
	log, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the child has its own copy
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = processAttributes()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in its log; whoever cares asks Exited
		close(p.done)
	}()
	return p, nil
}

// Start runs a program, with env besides our environment, and waits until url answers 200.
func Start(ctx context.Context, dir, name, url string, env []string, program string, args ...string) (*Process, error) {
	cmd := exec.Command(program, args...)
	cmd.Env = append(CleanEnv(), env...)
	p, err := start(dir, name, cmd)
	if err != nil {
		return nil, err
	}
	if err := p.waitHealthy(ctx, url, time.Minute); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// PID is its process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Exited reports whether the program has ended.
func (p *Process) Exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Stop ends the program and everything it started: politely first, then by force.
func (p *Process) Stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
	}
	p.Kill()
}

// Kill ends the program and everything it started at once, as kill -9 or the kernel's out-of-memory killer does.
func (p *Process) Kill() {
	// The group outlives its leader while a child is left, so this is right after the leader's end too.
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// Tail returns the last n bytes of the program's output.
func (p *Process) Tail(n int64) string {
	f, err := os.Open(p.LogPath)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(b))
}

// waitHealthy polls url until it answers 200, the program ends, or the time is over.
func (p *Process) waitHealthy(ctx context.Context, url string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if status(ctx, url) == http.StatusOK {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready; the end of its output (%s):\n%s", p.Name, p.LogPath, p.Tail(4000))
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("%s was not ready at %s after %s; the end of its output (%s):\n%s", p.Name, url, limit, p.LogPath, p.Tail(4000))
			}
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// status returns the status that a GET gives, or 0 where there is no answer.
func status(ctx context.Context, url string) int {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// FreePort returns a TCP port on the loopback address that nothing listens on.
func FreePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

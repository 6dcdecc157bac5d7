package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// contender is something that stands between a client and the upstream. A new one needs a row in the list that
// [bench.contenders] returns.
type contender struct {
	name    string
	command func(listen, upstream string) []string // nil: nothing stands there
	mallocs string                                 // path of a page with its number of allocations
	timings bool                                   // it adds timings to answers
}

const (
	direct  = "direct"
	plain   = "plain"
	sidecar = "sidecar"
)

// contenders are what is compared. self is this program, binary the sidecar.
func contenders(self, binary string) []contender {
	return []contender{
		{name: direct},
		{name: plain, mallocs: mallocsPath, command: func(listen, upstream string) []string {
			return []string{self, "plain", listen, upstream}
		}},
		{name: sidecar, mallocs: "/-/metrics", timings: true, command: func(listen, upstream string) []string {
			return []string{binary, "serve", "--listen", listen, "--upstream", "http://" + upstream}
		}},
	}
}

// process is a program that was started.
type process struct {
	cmd  *exec.Cmd
	addr string
	log  *os.File
}

// start starts a program that serves at an address, and waits until it does. What it writes goes to a file, as it would
// with a user.
func start(ctx context.Context, command func(listen string) []string) (*process, error) {
	addr, err := freeAddress()
	if err != nil {
		return nil, err
	}
	args := command(addr)
	p := &process{cmd: exec.CommandContext(ctx, args[0], args[1:]...), addr: addr}
	if p.log, err = os.CreateTemp("", "bench-*.log"); err != nil {
		return nil, err
	}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 5 * time.Second
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, p.log.Close())
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get("http://" + addr + "/version")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return p, nil
			}
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(p.log.Name())
			p.stop()
			return nil, fmt.Errorf("%v is not ready: %w\n%s", args, err, said)
		}
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	exited := make(chan struct{})
	go func() { _ = p.cmd.Wait(); close(exited) }()
	select {
	case <-exited:
	case <-time.After(5 * time.Second):
		_ = p.cmd.Process.Kill()
		<-exited
	}
	_ = p.log.Close()
	_ = os.Remove(p.log.Name())
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// measure gives a job to a load generator, with a contender that was started just for it.
func (b *bench) measure(ctx context.Context, c contender, j job) (result, error) {
	j.Addr = b.upstream.addr
	j.Ours = []int{b.upstream.pid(), os.Getpid()}
	if c.command != nil {
		p, err := start(ctx, func(listen string) []string { return c.command(listen, b.upstream.addr) })
		if err != nil {
			return result{}, err
		}
		defer p.stop()
		j.Addr, j.PID = p.addr, p.pid()
		j.Ours = append(j.Ours, j.PID)
		if c.mallocs != "" {
			j.Mallocs = "http://" + p.addr + c.mallocs
		}
	}
	b.runs++
	j.Shape.Run = fmt.Sprint(b.runs)
	in, err := json.Marshal(j)
	if err != nil {
		return result{}, err
	}
	load := exec.CommandContext(ctx, b.self, "load")
	load.Stdin, load.Stderr = bytes.NewReader(in), os.Stderr
	out, err := load.Output()
	if err != nil {
		return result{}, fmt.Errorf("load generator for %s: %w", c.name, err)
	}
	var r result
	return r, json.Unmarshal(out, &r)
}

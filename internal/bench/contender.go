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
	"path/filepath"
	"syscall"
	"time"
)

// contender is something that stands between a client and the upstream. A new one needs a row in the list that
// [contenders] or [peers] returns.
type contender struct {
	name    string
	chain   []program // the first is what a client talks to; none: nothing stands there
	mallocs string    // path of a page with its number of allocations
	beside  string    // the contender that it is compared with
	bare    bool      // the upstream is a vLLM without flags: its answers have no metrics

	timings bool // it adds timings to every answer
	foreign bool // what it loses is shown, and is no fault of the sidecar
	slow    bool // it gets less work, in the first repetition only
}

// program is a part of a contender.
type program struct {
	// command may write files to a folder, which is there while the program runs.
	command func(listen, upstream, dir string) ([]string, error)
	env     []string
	ready   string        // path that is answered with 200 when it is; "": one that it passes on
	within  time.Duration // for that; 0: 10 s
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
		{name: plain, mallocs: mallocsPath, foreign: true, chain: []program{fixed(self, "plain", listenArg, upstreamArg)}},
		{name: sidecar, mallocs: "/-/metrics", beside: plain, timings: true, chain: []program{serve(binary)}},
	}
}

const (
	listenArg   = "LISTEN"
	upstreamArg = "UPSTREAM"
)

// fixed is a program that needs no files. listenArg and upstreamArg stand for addresses.
func fixed(args ...string) program {
	return program{command: func(listen, upstream, _ string) ([]string, error) {
		all := make([]string, len(args))
		for i, a := range args {
			switch a {
			case listenArg:
				a = listen
			case upstreamArg:
				a = upstream
			}
			all[i] = a
		}
		return all, nil
	}}
}

// serve is the sidecar.
func serve(binary string, flags ...string) program {
	return program{command: func(listen, upstream, _ string) ([]string, error) {
		return append([]string{binary, "serve", "--listen", listen, "--upstream", "http://" + upstream}, flags...), nil
	}}
}

// process is a program that was started.
type process struct {
	cmd  *exec.Cmd
	addr string
	dir  string // its files

	exited chan struct{} // closed when it has
}

// start starts a program that serves at an address, and waits until it does. What it writes goes to a file, as it would
// with a user.
func start(ctx context.Context, prog program, upstream string) (*process, error) {
	addr, err := freeAddress()
	if err != nil {
		return nil, err
	}
	p := &process{addr: addr}
	if p.dir, err = os.MkdirTemp("", "bench-*"); err != nil {
		return nil, err
	}
	if err := p.run(ctx, prog, upstream); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir))
	}
	return p, nil
}

func (p *process) run(ctx context.Context, prog program, upstream string) error {
	args, err := prog.command(p.addr, upstream, p.dir)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(p.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close() // the program has its own
	p.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	p.cmd.Env = append(os.Environ(), prog.env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 5 * time.Second
	ownGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.exited = make(chan struct{})
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	within, path := prog.within, prog.ready
	if within == 0 {
		within = 10 * time.Second
	}
	if path == "" {
		path = "/version"
	}
	for deadline := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		err := ready("http://" + p.addr + path)
		if err == nil {
			return nil
		}
		gone := false
		select {
		case <-p.exited:
			gone = true
		default:
		}
		if gone || time.Now().After(deadline) || ctx.Err() != nil {
			p.end()
			said, _ := os.ReadFile(log.Name())
			return fmt.Errorf("%v is not ready: %w\n%s", args, err, said[max(0, len(said)-4<<10):])
		}
	}
}

func ready(url string) error {
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// end ends the program, and at last the workers that it left behind.
func (p *process) end() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(5 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
	killGroup(p.pid())
}

func (p *process) stop() {
	p.end()
	_ = os.RemoveAll(p.dir)
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
	j.Ours = os.Getpid()
	for i := len(c.chain) - 1; i >= 0; i-- { // each needs the address of the next
		p, err := start(ctx, c.chain[i], j.Addr)
		if err != nil {
			return result{}, err
		}
		defer p.stop()
		j.Addr = p.addr
		j.PIDs = append(j.PIDs, p.pid())
	}
	if c.mallocs != "" {
		j.Mallocs = "http://" + j.Addr + c.mallocs
	}
	j.Shape.Run = fmt.Sprint(b.runs.Add(1))
	j.Shape.Bare = c.bare
	in, err := json.Marshal(j)
	if err != nil {
		return result{}, err
	}
	var said bytes.Buffer
	load := exec.CommandContext(ctx, b.self, "load")
	load.Stdin, load.Stderr = bytes.NewReader(in), &said
	out, err := load.Output()
	if err != nil {
		return result{}, fmt.Errorf("load generator for %s: %w: %s", c.name, err, bytes.TrimSpace(said.Bytes()))
	}
	var r result
	return r, json.Unmarshal(out, &r)
}

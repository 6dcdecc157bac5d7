package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

func main() { os.Exit(soakMain(os.Args[1:], os.Stdout, os.Stderr)) }

const usage = `Usage: go run ./internal/soak [flags]

Runs the sidecar under a load in which clients leave and vLLM dies, compares
what the clients counted with the sidecar's metrics, and prints a table. It
exits with 1 where something is not as it must be.

`

type options struct {
	length       time.Duration
	streams      int
	seed         uint64
	restartEvery time.Duration
}

// soakMain returns the exit code: 1 where something is not as it must be, 2 for a wrong flag.
func soakMain(args []string, stdout, stderr io.Writer) int {
	if len(args) == 3 && args[0] == "vllm" {
		fmt.Fprintln(stderr, "soak vllm:", vllmMain(args[1], args[2]))
		return 1
	}
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { fmt.Fprint(stderr, usage); flags.PrintDefaults() }
	var o options
	flags.DurationVar(&o.length, "for", 30*time.Minute, "how long the load lasts")
	flags.IntVar(&o.streams, "streams", 200, "requests at a time")
	flags.Uint64Var(&o.seed, "seed", 1, "of what the clients ask")
	flags.DurationVar(&o.restartEvery, "restart-every", 5*time.Minute, "time between deaths of vLLM")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if flags.NArg() > 0 || o.length < 10*time.Second || o.streams < 1 || o.restartEvery < 5*time.Second {
		fmt.Fprintln(stderr, "soak: --for must be 10s at least, --restart-every 5s, --streams 1, and there are no arguments")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := soak(ctx, o, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "soak:", err)
		return 1
	}
	if !r.write(stdout) {
		return 1
	}
	return 0
}

// beside is how many clients ask vLLM itself.
const beside = 4

func soak(ctx context.Context, o options, stderr io.Writer) (r *run, err error) {
	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	binary, err := stack.BuildSidecar(ctx, dir)
	if err != nil {
		return nil, err
	}
	v := &lives{}
	if v.self, err = os.Executable(); err != nil {
		return nil, err
	}
	if v.addr, err = freeAddress(); err != nil {
		return nil, err
	}
	if err := v.begin(ctx); err != nil {
		return nil, err
	}
	defer func() { v.now.kill() }()
	addr, err := freeAddress()
	if err != nil {
		return nil, err
	}
	sidecar, err := start(ctx, addr, "/-/healthy", binary, "serve", "--listen", addr, "--upstream", "http://"+v.addr)
	if err != nil {
		return nil, err
	}
	defer sidecar.forget()
	r = &run{options: o, clients: newLoad(addr, false), beside: newLoad(v.addr, true)}
	if err = r.measure(ctx, v, sidecar, addr, stderr); err != nil {
		sidecar.kill()
		return nil, err
	}
	r.gaps = v.gaps
	if err := sidecar.stop(); err != nil {
		r.ended = append(r.ended, "the sidecar ended with "+err.Error())
	}
	said, err := sidecar.complaints()
	r.ended = append(r.ended, said[:min(len(said), 20)]...)
	return r, err
}

// measure puts the load on and takes the samples.
func (r *run) measure(ctx context.Context, v *lives, sidecar *process, addr string, stderr io.Writer) (err error) {
	s, pid := newScraper(addr), sidecar.cmd.Process.Pid
	known := func() bool {
		p, err := s.read()
		return err == nil && p.sum("upstream_up") == 1
	}
	for end := time.Now().Add(time.Minute); !known(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("the sidecar has not found vLLM")
		}
	}
	if r.before, err = s.least(pid, func(sample) bool { return true }); err != nil {
		return err
	}
	loaded, stop := context.WithTimeout(ctx, r.length)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { r.clients.run(loaded, r.streams, r.seed) })
	wg.Go(func() { r.beside.run(loaded, beside, r.seed+1) })
	failed := make(chan error, 1)
	wg.Go(func() {
		for {
			select {
			case <-loaded.Done():
				return
			case <-time.After(r.restartEvery):
			}
			if err := v.again(context.WithoutCancel(ctx), time.Second); err != nil {
				failed <- err
				stop()
				return
			}
		}
	})
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 1; loaded.Err() == nil; n++ {
		select {
		case <-loaded.Done():
			continue
		case <-tick.C:
		}
		now, err := s.sample(pid)
		if err != nil {
			stop()
			wg.Wait()
			return err
		}
		r.samples = append(r.samples, now)
		if n%30 == 0 {
			r.clients.mu.Lock()
			fmt.Fprintf(stderr, "%d s: %d requests, %d wrong, %v goroutines, %v descriptors, %.1f MiB\n",
				n, r.clients.sent, r.clients.wrong, now.goroutines, now.descriptors, now.own/mib)
			r.clients.mu.Unlock()
		}
	}
	wg.Wait()
	select {
	case err := <-failed:
		return err
	default:
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if r.metrics, err = s.read(); err != nil {
			return err
		}
		if r.metrics.sum("in_flight_requests") == 0 || time.Now().After(end) {
			break
		}
	}
	r.after, err = s.least(pid, func(low sample) bool {
		for _, res := range resources {
			if !res.freed(r.before, low) {
				return false
			}
		}
		return true
	})
	return err
}

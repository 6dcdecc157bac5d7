package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
)

// profiled are the contenders within this program, each of which writes profiles when it ends. The product has no way
// to be profiled from outside, and needs none.
func profiled(self, dir string) []contender {
	as := func(name string) []program {
		return []program{fixed(self, "profiled", name, dir, listenArg, upstreamArg)}
	}
	return []contender{
		{name: direct},
		{name: plain, mallocs: mallocsPath, foreign: true, chain: as(plain)},
		{name: sidecar, mallocs: "/-/metrics", beside: plain, timings: true, chain: as(sidecar)},
	}
}

// profiledMain serves until SIGTERM, then writes the profiles to dir.
func profiledMain(name, dir, listen, upstream string) error {
	runtime.MemProfileRate = 1 << 10 // a stream's memory is made of small pieces
	u, err := url.Parse("http://" + upstream)
	if err != nil {
		return err
	}
	var handler http.Handler
	switch name {
	case plain:
		handler = plainHandler(u)
	case sidecar:
		p, err := proxy.New(proxy.Config{
			Upstream:   u,
			Log:        slog.New(slog.NewTextHandler(os.Stderr, nil)),
			Collectors: metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{}),
		})
		if err != nil {
			return err
		}
		defer p.Close()
		handler = p
	default:
		return fmt.Errorf("nothing is called %q", name)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	file := func(kind string) (io.WriteCloser, error) {
		return os.Create(filepath.Join(dir, fmt.Sprintf("%s-%d.%s", name, os.Getpid(), kind)))
	}
	cpu, err := file("cpu")
	if err != nil {
		return err
	}
	defer cpu.Close()
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	server := &http.Server{Handler: handler}
	go func() { _ = server.Serve(l) }()
	most := 0
	for tick := time.NewTicker(time.Second); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		// Memory is looked at while the most streams are open. That of goroutines' stacks is in no profile.
		if n := runtime.NumGoroutine(); n >= most {
			most = n
			if err := writeHeap(file, n); err != nil {
				return err
			}
		}
	}
}

func writeHeap(file func(string) (io.WriteCloser, error), goroutines int) error {
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	runtime.GC()
	heap, err := file("heap")
	if err != nil {
		return err
	}
	defer heap.Close()
	if err := pprof.WriteHeapProfile(heap); err != nil {
		return err
	}
	sizes, err := file("memory")
	if err != nil {
		return err
	}
	defer sizes.Close()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	_, err = fmt.Fprintf(sizes, "before a collection: heap in use %d KiB, allocated %d KiB, stacks %d KiB\ngoroutines %d\nstacks %d KiB\nheap in use %d KiB, allocated %d KiB, idle and kept %d KiB, next collection at %d KiB\nother %d KiB\n", before.HeapInuse>>10, before.HeapAlloc>>10, before.StackInuse>>10, goroutines,
		m.StackInuse>>10, m.HeapInuse>>10, m.HeapAlloc>>10, (m.HeapIdle-m.HeapReleased)>>10, m.NextGC>>10, (m.Sys-m.HeapSys-m.StackSys)>>10)
	return err
}

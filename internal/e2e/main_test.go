//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// programs are what every test here shares: vLLM takes a minute or two to start, so each configuration is started once.
type programs struct {
	logs      string
	sidecar   string // path of the binary
	llamaSwap string // path of the binary

	// plain is vLLM as people start it; exact has the flags that make it say its own figures.
	plain, exact *instance
	// early is a sidecar before plain that was up before there was any vLLM.
	early *stack.Sidecar
}

var shared programs

// instance is a vLLM that starts in the background.
type instance struct {
	url   string
	ready chan struct{} // closed when vllm and err are set
	vllm  *stack.VLLM
	err   error
}

// startInstance starts vLLM, or takes the running one that the environment variable env names: its start is most of the
// time that one test takes.
func startInstance(ctx context.Context, env, executable, logs, name string, port int, flags ...string) *instance {
	in := &instance{url: fmt.Sprintf("http://127.0.0.1:%d", port), ready: make(chan struct{})}
	if url := os.Getenv(env); url != "" {
		in.url, in.vllm = url, &stack.VLLM{URL: url}
		close(in.ready)
		return in
	}
	go func() {
		defer close(in.ready)
		in.vllm, in.err = stack.StartVLLM(ctx, executable, logs, name, port, flags...)
	}()
	return in
}

// started reports whether a vLLM runs that is ours to stop. Only for after ready.
func (in *instance) started() bool { return in.err == nil && in.vllm.Process != nil }

func TestMain(m *testing.M) {
	os.Exit(func() int {
		ctx, cancel := context.WithCancel(context.Background())
		stop, err := shared.start(ctx)
		defer stop()
		defer cancel() // first: a vLLM that is still starting gives up
		if err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			return 1
		}
		code := m.Run()
		if code != 0 {
			shared.printLogs()
		}
		return code
	}())
}

// start finds or builds all programs and starts what is shared. It reports everything that is missing, not only the
// first, and returns what ends it all.
func (p *programs) start(ctx context.Context) (stop func(), err error) {
	var stops []func()
	stop = func() {
		for i := len(stops) - 1; i >= 0; i-- {
			stops[i]()
		}
	}
	if p.logs, err = os.MkdirTemp("", "vllm-timings-e2e-"); err != nil {
		return stop, err
	}
	stops = append(stops, func() { _ = os.RemoveAll(p.logs) })

	var vllm string
	var errVLLM, errSidecar, errSwap error
	var wg sync.WaitGroup
	wg.Go(func() { vllm, errVLLM = stack.InstallVLLM(ctx, os.Getenv("VLLM_VERSION")) })
	wg.Go(func() { p.sidecar, errSidecar = stack.BuildSidecar(ctx, p.logs) })
	wg.Go(func() { p.llamaSwap, errSwap = stack.FindLlamaSwap() })
	wg.Wait()
	if err := errors.Join(errVLLM, errSidecar, errSwap); err != nil {
		return stop, err
	}

	var ports [2]int
	for i := range ports {
		if ports[i], err = stack.FreePort(); err != nil {
			return stop, err
		}
	}
	// The early sidecar goes first: there must be no vLLM yet.
	p.early, err = stack.StartSidecar(ctx, p.sidecar, p.logs, "sidecar-early", fmt.Sprintf("http://127.0.0.1:%d", ports[0]))
	if err != nil {
		return stop, err
	}
	stops = append(stops, p.early.Stop)
	p.plain = startInstance(ctx, "E2E_VLLM_PLAIN", vllm, p.logs, "vllm-plain", ports[0])
	p.exact = startInstance(ctx, "E2E_VLLM_EXACT", vllm, p.logs, "vllm-exact", ports[1], stack.ExactFlags...)
	for _, in := range []*instance{p.plain, p.exact} {
		stops = append(stops, func() {
			if <-in.ready; in.started() {
				in.vllm.Stop()
			}
		})
	}
	return stop, nil
}

// printLogs shows how the long-lived programs fared, after a failure.
func (p *programs) printLogs() {
	show := func(proc *stack.Process) {
		fmt.Fprintf(os.Stderr, "--- the end of the output of %s:\n%s\n", proc.Name, proc.Tail(3000))
	}
	show(p.early.Process)
	for _, in := range []*instance{p.plain, p.exact} {
		if <-in.ready; in.started() {
			show(in.vllm.Process)
		}
	}
}

// get waits for the instance and warms it up: the first use of some paths compiles for seconds, which is true of that
// request, but makes a test slow at a place where nobody expects it.
func (in *instance) get(t *testing.T) *stack.VLLM {
	t.Helper()
	select {
	case <-in.ready:
	case <-t.Context().Done():
		t.Fatal("the test ended before vLLM was ready")
	}
	if in.err != nil {
		t.Fatal(in.err)
	}
	for _, body := range []string{
		`{"model":"tiny","prompt":"warm","max_tokens":4,"ignore_eos":true,"temperature":0}`,
		`{"model":"tiny","prompt":"warm","max_tokens":4,"ignore_eos":true,"temperature":1,"seed":1}`,
	} {
		if a := send(t, in.url, request{path: "/v1/completions", body: body}); a.status != http.StatusOK {
			t.Fatalf("vLLM's answer to a warm-up: %d %s", a.status, a.body)
		}
	}
	return in.vllm
}

// startSidecar starts a sidecar for one test and shows its log if the test fails.
func startSidecar(t *testing.T, upstream string, flags ...string) *stack.Sidecar {
	t.Helper()
	s, err := stack.StartSidecar(t.Context(), shared.sidecar, t.TempDir(), "sidecar", upstream, flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() {
			t.Logf("the sidecar's log:\n%s", s.Tail(6000))
		}
	})
	return s
}

// waitFor polls until ok says so.
func waitFor(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after %s: %s", limit, what)
		}
	}
}

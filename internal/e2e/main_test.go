//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
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
	vllm      string // path of the executable
	clients   string // folder of the client libraries

	// plain is vLLM as people start it; exact has the flags that make it say its own figures.
	plain, exact *instance
	// speculative drafts tokens and has two served names; several is two API servers before two engines. They say their
	// own figures too, and are started when the first test wants them.
	speculative, several *instance
	// patched makes its timings itself; site is its package, nil where somebody else started it.
	patched *instance
	site    *stack.Site
	// early is a sidecar before plain that was up before there was any vLLM.
	early *stack.Sidecar
}

var shared programs

// instance is a vLLM that starts in the background once it is wanted.
type instance struct {
	url   string
	start func() (*stack.VLLM, error)
	once  sync.Once
	ready chan struct{} // closed when vllm and err are set
	vllm  *stack.VLLM
	err   error
}

// newInstance is a vLLM still to be started, or the running one that the environment variable E2E_VLLM_name names: its
// start is most of the time that one test takes.
func (p *programs) newInstance(ctx context.Context, name string, port int, flags ...string) *instance {
	in := &instance{url: fmt.Sprintf("http://127.0.0.1:%d", port), ready: make(chan struct{})}
	in.start = func() (*stack.VLLM, error) {
		return stack.StartVLLM(ctx, stack.Setup{Executable: p.vllm, Logs: p.logs, Name: "vllm-" + name, Port: port, Flags: flags})
	}
	if url := os.Getenv("E2E_VLLM_" + strings.ToUpper(name)); url != "" {
		in.url, in.start = url, func() (*stack.VLLM, error) { return &stack.VLLM{URL: url}, nil }
	}
	return in
}

// want starts it, if nobody has, and does not wait.
func (in *instance) want() {
	in.once.Do(func() {
		go func() {
			defer close(in.ready)
			in.vllm, in.err = in.start()
		}()
	})
}

// stop ends it. Nobody may want it afterwards.
func (in *instance) stop() {
	in.once.Do(func() {
		in.err = errors.New("nobody wanted it")
		close(in.ready)
	})
	if <-in.ready; in.started() {
		in.vllm.Stop()
		in.err = errors.New("it was stopped")
	}
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

	var errVLLM, errClients, errSidecar, errSwap error
	var wg sync.WaitGroup
	wg.Go(func() { p.clients, errClients = stack.InstallClients(ctx) })
	wg.Go(func() { p.vllm, errVLLM = stack.InstallVLLM(ctx, os.Getenv("VLLM_VERSION")) })
	wg.Go(func() { p.sidecar, errSidecar = stack.BuildSidecar(ctx, p.logs) })
	wg.Go(func() { p.llamaSwap, errSwap = stack.FindLlamaSwap() })
	wg.Wait()
	if err := errors.Join(errVLLM, errClients, errSidecar, errSwap); err != nil {
		return stop, err
	}

	var ports [5]int
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
	p.plain = p.newInstance(ctx, "plain", ports[0])
	p.exact = p.newInstance(ctx, "exact", ports[1], stack.ExactFlags...)
	p.speculative = p.newInstance(ctx, "speculative", ports[2], append([]string{
		"--served-model-name", stack.Model, "alias",
		"--speculative-config", `{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}`,
		"--per-request-spec-decode-metrics", "summary",
	}, stack.ExactFlags...)...)
	p.several = p.newInstance(ctx, "several", ports[3], append([]string{
		"--data-parallel-size", "2", "--api-server-count", "2",
	}, stack.ExactFlags...)...)
	p.patched = p.newInstance(ctx, "patched", ports[4])
	if os.Getenv("E2E_VLLM_PATCHED") == "" {
		if p.site, err = stack.NewSite(ctx, p.vllm); err != nil {
			return stop, err
		}
		stops = append(stops, func() { _ = p.site.Remove() })
		p.patched.start = func() (*stack.VLLM, error) {
			setup := stack.Setup{Executable: p.vllm, Logs: p.logs, Name: "vllm-patched", Port: ports[4], Env: []string{gate + "=1"}}
			return p.startPatched(ctx, setup, p.site)
		}
	}
	for _, in := range p.instances() {
		stops = append(stops, in.stop)
	}
	p.plain.want()
	p.exact.want()
	return stop, nil
}

func (p *programs) instances() []*instance {
	return []*instance{p.plain, p.exact, p.speculative, p.several, p.patched}
}

// printLogs shows how the long-lived programs fared, after a failure.
func (p *programs) printLogs() {
	show := func(proc *stack.Process) {
		fmt.Fprintf(os.Stderr, "--- the end of the output of %s:\n%s\n", proc.Name, proc.Tail(3000))
	}
	show(p.early.Process)
	for _, in := range p.instances() {
		select {
		case <-in.ready:
			if in.started() {
				show(in.vllm.Process)
			}
		default: // not wanted, or still starting
		}
	}
}

// get waits for the instance and warms it up: the first use of some paths compiles for seconds, which is true of that
// request, but makes a test slow at a place where nobody expects it.
func (in *instance) get(t *testing.T) *stack.VLLM {
	t.Helper()
	in.want()
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
			t.Logf("the sidecar's log:\n%s", s.Tail(20000))
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

package deploycheck

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// The speeds of the simulated vLLM.
const (
	prefillSpeed = 20_000
	decodeStep   = 5 * time.Millisecond
)

// engine is a simulated vLLM that can be told to fail.
type engine struct {
	sim *vllmsim.Sim
	url string
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	cfg := vllmsim.Default()
	cfg.PrefillTokensPerSecond, cfg.DecodeStep = prefillSpeed, decodeStep
	cfg.MaxRunning = 4 // so that requests queue
	e := &engine{sim: vllmsim.New(cfg)}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Test") == "fail" {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		e.sim.ServeHTTP(w, r)
	}))
	e.url = server.URL
	t.Cleanup(func() {
		server.CloseClientConnections()
		e.sim.Close()
		server.Close()
	})
	return e
}

// round sends one request of every kind that leads to another sample.
func (e *engine) round(ctx context.Context, sidecar string, n int) {
	prompt := strings.Repeat("The same words each time fill the prefix cache. ", 40)
	chat := func(more string) string {
		return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":"%s %d"}],"max_tokens":24,"ignore_eos":true%s}`, prompt, n, more)
	}
	const completions = "/v1/chat/completions"
	send(ctx, sidecar+completions, chat(""))
	send(ctx, sidecar+completions, chat(`,"stream":true`))
	send(ctx, sidecar+completions, chat(`,"n":2`)) // no timings for several choices
	send(ctx, sidecar+completions, chat(`,"stream":true`), "X-Test", "fail")
	get, err := http.Get(sidecar + "/health")
	if err == nil {
		get.Body.Close()
	}

	// Some finish in the same step, and more than the engine takes at once.
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { send(ctx, sidecar+completions, chat(`,"stream":true`)) })
	}
	all.Wait()

	// A client that leaves.
	short, cancel := context.WithTimeout(ctx, 10*decodeStep)
	send(short, sidecar+completions, strings.Replace(chat(`,"stream":true`), `"max_tokens":24`, `"max_tokens":2000`, 1))
	cancel()

	// A vLLM that breaks off, and one whose metrics take too long.
	e.sim.SetFaults(vllmsim.Faults{DieAfterEvents: 5})
	send(ctx, sidecar+completions, chat(`,"stream":true`))
	if n%4 == 3 {
		e.sim.SetFaults(vllmsim.Faults{MetricsDelay: 600 * time.Millisecond})
		send(ctx, sidecar+completions, chat(""))
	}
	e.sim.SetFaults(vllmsim.Faults{})
}

// send sends a request and takes its answer, whatever it is.
func send(ctx context.Context, url, body string, header ...string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader([]byte(body)))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
}

// traffic sends rounds until the test ends.
func (e *engine) traffic(t *testing.T, sidecar string) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ctx.Err() == nil; n++ {
			e.round(ctx, sidecar, n)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

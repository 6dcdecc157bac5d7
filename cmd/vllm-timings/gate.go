package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"sync"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
)

// phase is how far a vLLM that we start is.
type phase int

const (
	starting phase = iota
	waking         // from sleep: it takes so little time that requests wait for it
	serving
	ended
)

// retryAfter is what Retry-After says while vLLM starts, in seconds.
const retryAfter = "2"

// gate answers for a vLLM that is not there yet, and passes on to the proxy once it is. It implements served.
type gate struct {
	collectors *metrics.Collectors

	mu       sync.Mutex
	phase    phase
	proxy    *proxy.Proxy // not nil while serving, and after
	draining bool
	why      string        // what requests are told after the end
	changed  chan struct{} // closed by the next change
}

func newGate(c *metrics.Collectors) *gate {
	c.SetUpstreamUp(false)
	return &gate{collectors: c, changed: make(chan struct{})}
}

// change changes the state under the lock, and wakes all who wait for it.
func (g *gate) change(do func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	do()
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gate) enter(p phase)       { g.change(func() { g.phase = p }) }
func (g *gate) open(p *proxy.Proxy) { g.change(func() { g.phase, g.proxy = serving, p }) }
func (g *gate) end(why string)      { g.change(func() { g.phase, g.why = ended, why }) }

func (g *gate) current() (phase, *proxy.Proxy, bool, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.phase, g.proxy, g.draining, g.changed
}

// ServeHTTP implements http.Handler.
func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ph, p, draining, changed := g.current()
	if ph == serving {
		p.ServeHTTP(w, r)
		return
	}
	if proxy.EndsConnection(r) {
		w.Header().Set("Connection", "close")
	}
	switch r.URL.EscapedPath() { // as the proxy's routes: there is one name for each
	case "/-/healthy":
		plain(w, http.StatusOK, "ok\n")
		return
	case "/-/ready":
		plain(w, http.StatusServiceUnavailable, g.reason()+"\n")
		return
	case "/-/metrics":
		g.collectors.Handler().ServeHTTP(w, r)
		return
	case "/metrics": // as without vLLM: ours alone
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_ = g.collectors.WriteText(w)
		return
	case "/health":
		g.refuse(w)
		return
	}
	for ph == waking && !draining {
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		if ph, p, draining, changed = g.current(); ph == serving {
			p.ServeHTTP(w, r)
			return
		}
	}
	g.refuse(w)
}

func plain(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

// reason says why there is no vLLM.
func (g *gate) reason() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.draining:
		return "draining"
	case g.phase == ended:
		return g.why
	case g.phase == waking:
		return "vLLM wakes up"
	}
	return "vLLM is starting"
}

// refuse answers in the form of the OpenAI API.
func (g *gate) refuse(w http.ResponseWriter) {
	status, kind := http.StatusServiceUnavailable, "service_unavailable"
	if ph, _, _, _ := g.current(); ph == ended {
		status, kind = http.StatusBadGateway, "upstream_error"
	} else {
		w.Header().Set("Retry-After", retryAfter)
	}
	body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": g.reason(), "type": kind, "param": nil, "code": status}})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// Drain implements served.
func (g *gate) Drain() {
	g.change(func() { g.draining = true })
	if _, p, _, _ := g.current(); p != nil {
		p.Drain()
	}
}

// Open implements served.
func (g *gate) Open() int {
	if _, p, _, _ := g.current(); p != nil {
		return p.Open()
	}
	return 0
}

// Wait implements served.
func (g *gate) Wait(ctx context.Context) error {
	if _, p, _, _ := g.current(); p != nil {
		return p.Wait(ctx)
	}
	return nil
}

// Cut implements served.
func (g *gate) Cut() {
	if _, p, _, _ := g.current(); p != nil {
		p.Cut()
	}
}

// close ends what the proxy does in the background.
func (g *gate) close() {
	if _, p, _, _ := g.current(); p != nil {
		p.Close()
	}
}

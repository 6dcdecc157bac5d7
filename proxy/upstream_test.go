package proxy

import (
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

func TestAtLeast(t *testing.T) {
	for version, want := range map[string]bool{
		"0.25.0": true, "0.25.0rc1": true, "0.32.1": true, "0.100": true, "1.0.dev3+gabc": true, "0.25.1.dev7+g1234.d2026": true,
		"0.24.9": false, "0.11.2": false, "0.9.2": false, "": false, "nightly": false, "dev": false,
	} {
		if atLeast(version, 0, 25) != want {
			t.Errorf("atLeast(%q, 0, 25) is %v", version, !want)
		}
	}
}

// What is found is said once, in a sentence, with the flags that would make all numbers exact.
func TestSaysWhatItFound(t *testing.T) {
	for _, test := range []struct {
		name  string
		setup func(*vllmsim.Config)
		want  []string
	}{
		{"today's", quick, []string{"found vLLM 0.32.0:", "exact timings from its metrics", "--enable-per-request-metrics --enable-prompt-tokens-details"}},
		{"old", func(c *vllmsim.Config) { c.Version = "0.19.1" }, []string{"found vLLM 0.19.1:", "vLLM 0.25 or newer started with --enable-per-request-metrics"}},
		{"without statistics", func(c *vllmsim.Config) { c.DisableLogStats = true }, []string{"found vLLM 0.32.0 without usable metrics", "--enable-per-request-metrics"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			vllm := startEngine(t, test.setup)
			r := newRig(t, vllm.URL)
			r.warm()
			for range 3 {
				r.chat(true, 3)
			}
			lines := r.log.lines(t, slog.LevelInfo, "found ")
			if len(lines) != 1 {
				t.Fatalf("said %d times, want once:\n%s", len(lines), r.log)
			}
			for _, part := range test.want {
				if !strings.Contains(lines[0].Get("msg").Str, part) {
					t.Errorf("%q lacks %q", lines[0].Get("msg").Str, part)
				}
			}
			if lines[0].Get("upstream").Str != vllm.URL {
				t.Errorf("the upstream is not named: %s", lines[0].Raw)
			}
		})
	}
}

// A vLLM that sends all figures itself is noticed by its answers; then its metrics are read no more.
func TestNoticesPerRequestMetrics(t *testing.T) {
	vllm := startEngine(t, func(c *vllmsim.Config) { c.PerRequestMetrics, c.PromptTokensDetails = true, true })
	r := newRig(t, vllm.URL)
	r.learned()
	for i := range 4 {
		vllm.check(t, r.chat(i%2 == 0, 5))
		// An answer for which vLLM gives no figures says nothing about its flags.
		r.send(http.MethodPost, string(chat), `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":3,"n":2}`)
	}
	if n := len(r.log.lines(t, slog.LevelInfo, "sends its own per-request metrics")); n != 1 {
		t.Errorf("said %d times, want once:\n%s", n, r.log)
	}
	r.quietReadings()
	before := vllm.Stats()
	vllm.check(t, r.chat(true, 5))
	r.quietReadings()
	if after := vllm.Stats(); after.MetricsFiltered+after.MetricsFull != before.MetricsFiltered+before.MetricsFull {
		t.Error("metrics are read although every answer has its own")
	}
	r.wantMetric(5, "timings_total", "source", "native", "exactness", "exact")
}

// Without --enable-prompt-tokens-details the cached tokens come from the window, the durations from the answer.
func TestNativeWithoutCachedTokens(t *testing.T) {
	vllm := startEngine(t, func(c *vllmsim.Config) { c.PerRequestMetrics = true })
	r := newRig(t, vllm.URL)
	r.warm()
	for i := range 4 {
		vllm.check(t, r.chat(i%2 == 0, 5))
	}
	r.wantMetric(5, "timings_total", "source", "native")
}

// Another vLLM at the same address is found out by its metrics, without a failed request.
func TestLearnsAgainAfterRestart(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	vllm.Restart()
	r.chat(true, 3)
	r.chat(true, 3)
	r.learned()
	vllm.check(t, r.chat(true, 3))
	if warned := r.log.lines(t, slog.LevelWarn, ""); len(warned) > 0 {
		t.Errorf("a restart that broke nothing is nothing to warn of: %v", warned)
	}
}

// The sidecar asks vLLM for few things of its own accord, and for nothing while nobody uses it.
func TestAsksLittle(t *testing.T) {
	vllm := startEngine(t)
	asked := make(chan string, 1000)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Method + " " + r.URL.Path
		vllm.ServeHTTP(w, r)
	})
	r := newRig(t, up.URL)
	r.warm()
	r.quietReadings()
	for len(asked) > 0 {
		switch got := <-asked; got {
		case "GET /version", "GET /health", "GET /v1/models", "GET /metrics", "GET /metrics/", "POST " + string(chat):
		default:
			t.Errorf("asked for %s", got)
		}
	}
	r.quietReadings()
	if n := len(asked); n > 0 {
		t.Errorf("%d requests while nobody asked for anything", n)
	}
}

// A vLLM is known once the first reading of its metrics was made, at start and after it restarted: a request that comes
// before has nothing to compare its own reading with.
func TestKnownAfterFirstReading(t *testing.T) {
	vllm := startEngine(t)
	gates := []*gate{newGate(t), newGate(t)}
	var learnt, pages atomic.Int32
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/version":
			learnt.Add(1)
			pages.Store(0)
		case strings.HasPrefix(r.URL.Path, "/metrics") && pages.Add(1) == 2: // the first asks only which page there is
			gates[learnt.Load()-1].pass(r.Context())
		}
		vllm.ServeHTTP(w, r)
	})
	r := newRig(t, up.URL)
	for i, g := range gates {
		g.reached(t)
		if r.upstream.isKnown() {
			t.Errorf("known before a reading was made, the time %d", i)
		}
		g.open()
		r.learned()
		if i == 0 {
			r.upstream.forget()
		}
	}
}

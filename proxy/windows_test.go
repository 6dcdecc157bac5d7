package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/timings"
)

// warnings returns the warnings so far.
func (r *rig) warnings() int {
	r.t.Helper()
	return len(r.log.lines(r.t, slog.LevelWarn, ""))
}

// Whatever is wrong with /metrics, answers come, in time, with what can be known, and it is said once. When it is well
// again, that is said once too, and figures are exact again without a restart.
func TestMetricsFaults(t *testing.T) {
	const deadline = time.Second // longer than any answer takes, however busy the machine is
	for _, test := range []struct {
		name   string
		faults vllmsim.Faults
	}{
		{"missing", vllmsim.Faults{Metrics: vllmsim.MetricsNotFound}},
		{"unauthorized", vllmsim.Faults{Metrics: vllmsim.MetricsUnauthorized}},
		{"empty", vllmsim.Faults{Metrics: vllmsim.MetricsEmpty}},
		{"hanging", vllmsim.Faults{Metrics: vllmsim.MetricsHang}},
		{"slow", vllmsim.Faults{MetricsDelay: 2 * deadline}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // most of this is waiting
			vllm := startEngine(t)
			r := newRig(t, vllm.URL, func(c *Config) { c.Deadline = deadline })
			r.warm()
			r.quietReadings()
			vllm.SetFaults(test.faults)
			held := 0
			for i := range 8 {
				if a := r.estimate(i%2 == 0); a.took > deadline {
					held++
				}
			}
			if held > 1 {
				t.Errorf("%d answers were held for a deadline that was missed before", held)
			}
			if n := r.warnings(); n != 1 {
				t.Errorf("%d warnings, want one:\n%s", n, r.log)
			}
			vllm.SetFaults(vllmsim.Faults{})
			r.exactAgain(vllm, false)
			r.exactAgain(vllm, true)
			if n := len(r.log.lines(t, slog.LevelInfo, "can be read again")); n != 1 || r.warnings() != 1 {
				t.Errorf("said %d times that it is well again, want once; %d warnings:\n%s", n, r.warnings(), r.log)
			}
		})
	}
}

// exactAgain waits until answers have exact figures, and checks that they are true. Metrics that were not there are looked
// for now and then only; this test does not wait for that.
func (r *rig) exactAgain(vllm *engine, stream bool) {
	r.t.Helper()
	var a answer
	eventually(r.t, "figures are exact", func() bool {
		r.upstream.mu.Lock()
		if !r.upstream.learned.IsZero() {
			r.upstream.learned = r.upstream.learned.Add(-relearn)
		}
		r.upstream.mu.Unlock()
		time.Sleep(2 * fresh)
		a = r.chat(stream, 5)
		return a.exact()
	})
	vllm.check(r.t, a)
}

// estimate asks, and checks an answer of which no window tells.
func (r *rig) estimate(stream bool) answer {
	r.t.Helper()
	a := r.chat(stream, 5)
	// On a busy machine all events of a stream may come at once, of which nothing can be told. Not each time.
	for again := 5; stream && !a.timings.Exists() && again > 0; again-- {
		a = r.chat(stream, 5)
	}
	if a.status != http.StatusOK || a.err != nil {
		r.t.Fatalf("status %d, error %v", a.status, a.err)
	}
	switch {
	case !stream && a.timings.Exists():
		r.t.Errorf("nothing is known of an answer that came whole, yet it has %s", a.timings.Raw)
	case stream && (!a.timings.Get("estimated").Bool() || a.timings.Get("cache_n").Exists() || !a.timings.Get("predicted_per_second").Exists()):
		r.t.Errorf("want an estimate without cached tokens, got %s", a.timings.Raw)
	}
	return a
}

// The same from the start on: what was never there is missed once.
func TestMetricsNeverThere(t *testing.T) {
	for _, test := range []struct {
		name  string
		setup func(*vllmsim.Config)
		fault vllmsim.Faults
	}{
		{"no stats", func(c *vllmsim.Config) { c.DisableLogStats = true }, vllmsim.Faults{}},
		{"missing", quick, vllmsim.Faults{Metrics: vllmsim.MetricsNotFound}},
		{"unauthorized", quick, vllmsim.Faults{Metrics: vllmsim.MetricsUnauthorized}},
		{"hanging", quick, vllmsim.Faults{Metrics: vllmsim.MetricsHang}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			vllm := startEngine(t, test.setup)
			vllm.SetFaults(test.fault)
			r := newRig(t, vllm.URL)
			eventually(t, "it is found or hangs", func() bool { return vllm.Stats().MetricsFull+vllm.Stats().MetricsFiltered > 0 })
			for i := range 6 {
				if a := r.estimate(i%2 == 0); a.took >= r.windows.patience {
					t.Errorf("took %v", a.took)
				}
			}
			eventually(t, "it is said", func() bool { return strings.Contains(r.log.String(), "timings are estimated from the streams") })
			if n := strings.Count(r.log.String(), "timings are estimated from the streams"); n != 1 {
				t.Errorf("said %d times, want once:\n%s", n, r.log)
			}
			if test.fault == (vllmsim.Faults{}) {
				return
			}
			vllm.SetFaults(vllmsim.Faults{})
			r.exactAgain(vllm, false)
		})
	}
}

// With several API servers the filtered page is empty, and with an old prometheus_client nothing is filtered.
func TestWholePageOnly(t *testing.T) {
	vllm := startEngine(t)
	vllm.SetFaults(vllmsim.Faults{Metrics: vllmsim.MetricsEmptyFiltered})
	old := startEngine(t, func(c *vllmsim.Config) { c.FilteredMetrics = false })
	for _, e := range []*engine{vllm, old} {
		r := newRig(t, e.URL)
		r.warm()
		for _, stream := range []bool{true, false} {
			var a answer
			// Where the machine stood still meanwhile, one is rightly said to be an estimate.
			eventually(t, "figures are exact", func() bool { a = r.chat(stream, 10); return a.exact() })
			e.check(t, a)
		}
	}
}

// Several requests at once: each has a true figure or says that it is an estimate, and estimates are near.
func TestSharedWindows(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	var wg sync.WaitGroup
	answers := make(chan answer, 200)
	for i := range 8 {
		wg.Go(func() {
			for j := range 15 {
				answers <- r.chat(true, 10+(i*7+j*3)%40)
			}
		})
	}
	wg.Wait()
	close(answers)
	exact, far := 0, 0
	for a := range answers {
		if a.status != http.StatusOK || a.err != nil || !a.timings.Exists() {
			t.Fatalf("status %d, error %v, timings %s", a.status, a.err, a.timings.Raw)
		}
		if a.exact() {
			exact++
			vllm.check(t, a)
			continue
		}
		truth := vllm.record(t, a.id)
		decode := time.Duration(a.timings.Get("predicted_ms").Num * float64(time.Millisecond))
		if off := (decode - truth.Decode).Abs(); off > 30*time.Millisecond && off > truth.Decode/5 {
			far++
			t.Logf("estimated %v of decode, it was %v", decode, truth.Decode)
		}
	}
	if far > (120-exact)/2 {
		t.Errorf("%d of %d estimates are far off", far, 120-exact)
	}
	if exact == 0 {
		t.Error("no answer is exact")
	}
	t.Logf("%d of 120 are exact", exact)
}

// Requests that end in the same engine step share a window whatever is done; none of them may claim to be exact with
// the figures of another.
func TestSameStep(t *testing.T) {
	vllm := startEngine(t, func(c *vllmsim.Config) { c.DecodeStep = 10 * time.Millisecond })
	r := newRig(t, vllm.URL)
	r.warm()
	for range 5 {
		var wg sync.WaitGroup
		answers := make([]answer, 6)
		for i := range answers {
			wg.Go(func() { answers[i] = r.chat(i%2 == 0, 8) })
		}
		wg.Wait()
		for _, a := range answers {
			if a.exact() {
				vllm.check(t, a)
			}
		}
	}
}

// A client that asks vLLM itself moves its metrics too.
func TestDirectClientBeside(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				resp, err := http.Post(vllm.URL+string(chat), "application/json", strings.NewReader(chatRequest(false, 3+(n+i)%9, fmt.Sprint("direct ", i, n))))
				if err == nil {
					resp.Body.Close()
				}
			}
		})
	}
	exact := 0
	for i := range 40 {
		a := r.chat(i%2 == 0, 5+i%10)
		if a.status != http.StatusOK || a.err != nil {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
		if a.exact() {
			exact++
			if err := vllm.wrong(t, a); err != nil {
				t.Errorf("said to be exact: %v", err)
			}
		}
	}
	stop()
	wg.Wait()
	t.Logf("%d of 40 are exact", exact)
	http.DefaultClient.CloseIdleConnections()
	time.Sleep(2 * fresh)
	r.chat(true, 3)
	time.Sleep(2 * fresh)
	vllm.check(t, r.chat(true, 5)) // alone again
}

// Behind a balancer readings come from one vLLM or the other: they say nothing about a request.
func TestTwoBehindOneAddress(t *testing.T) {
	one, two := startEngine(t), startEngine(t)
	one.Restart() // another process start than that of two
	var turn atomic.Int64
	var proxies []*httputil.ReverseProxy
	for _, e := range []*engine{one, two} {
		base, err := url.Parse(e.URL)
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		proxies = append(proxies, &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(base) }, Transport: transport, FlushInterval: -1})
	}
	balancer := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		// A plain ReverseProxy cuts answers that come while it still reads the request.
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		proxies[turn.Add(1)%2].ServeHTTP(w, r)
	})
	r := newRig(t, balancer.URL)
	r.learned()
	for i := range 20 {
		a := r.chat(i%2 == 0, 5)
		if a.status != http.StatusOK || a.err != nil {
			t.Fatalf("status %d, error %v", a.status, a.err)
		}
		if a.exact() {
			e := one
			if !one.knows(a.id) {
				e = two
			}
			e.check(t, a)
		}
	}
	if n := len(r.log.lines(t, slog.LevelWarn, "several vLLM processes")); n != 1 {
		t.Errorf("said %d times, want once:\n%s", n, r.log)
	}
	r.quietReadings()
	before := one.Stats().MetricsFiltered + two.Stats().MetricsFiltered
	r.estimate(true)
	r.estimate(false)
	if after := one.Stats().MetricsFiltered + two.Stats().MetricsFiltered; after != before {
		t.Errorf("%d readings more, after it was said that they are over", after-before)
	}
}

func (e *engine) knows(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, ok := e.truth[id]
	return ok
}

// handlerTransport asks a handler without a network, so that a simulated clock rules all waiting.
type handlerTransport struct{ h http.Handler }

func (t handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	done := make(chan any, 1)
	go func() {
		defer func() { done <- recover() }()
		t.h.ServeHTTP(w, r)
	}()
	if err := <-done; err != nil {
		return nil, context.Cause(r.Context())
	}
	return w.Result(), nil
}

// An answer is held exactly as long as the deadline says, once.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := vllmsim.New(vllmsim.Default())
		defer sim.Close()
		base := &url.URL{Scheme: "http", Host: "vllm"}
		reader := metrics.NewReader(handlerTransport{sim}, base, metrics.ReaderOptions{})
		if _, err := reader.Probe(t.Context()); err != nil {
			t.Fatal(err)
		}
		log := &logBook{}
		w := newWindows(reader, metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{}),
			slog.New(slog.NewJSONHandler(log, nil)), DefaultDeadline, func() {})
		defer w.close()
		if _, err := w.readings.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		settle := func() time.Duration {
			start := time.Now()
			w.settle(t.Context(), &timings.Finished{Usage: timings.Usage{Prompt: 1, Completion: 1}, Sent: start, NotBefore: start, Seen: start})
			return time.Since(start)
		}
		for _, faults := range []vllmsim.Faults{{Metrics: vllmsim.MetricsHang}, {MetricsDelay: DefaultDeadline + time.Millisecond}} {
			sim.SetFaults(faults)
			if held := settle(); held != DefaultDeadline {
				t.Errorf("%+v: the first answer was held %v, want %v", faults, held, DefaultDeadline)
			}
			for range 100 {
				if held := settle(); held != 0 {
					t.Errorf("%+v: another answer was held %v", faults, held)
				}
				time.Sleep(100 * time.Millisecond)
			}
			// Asked about once a second whether it answers again: 10 s have gone by.
			sim.SetFaults(vllmsim.Faults{})
			time.Sleep(2 * pokeEvery)
			settle() // makes it ask
			time.Sleep(time.Second)
			if !w.ready() {
				t.Error("answers do not wait for readings again")
			}
		}
		if n := len(log.lines(t, slog.LevelWarn, "")); n != 2 {
			t.Errorf("%d warnings, want one for each time that it went wrong:\n%s", n, log)
		}
		if s := sim.Stats(); s.MetricsFiltered > 40 {
			t.Errorf("%d readings in 20 s of metrics that do not answer", s.MetricsFiltered)
		}
	})
}

// Where other clients' requests finish too, readings keep them out of the windows of ours, but take little of vLLM's time,
// and none when nothing of ours is there.
func TestReadingsBesideStrangers(t *testing.T) {
	for _, test := range []struct {
		name  string
		alone bool
		takes time.Duration // a reading
		most  int           // readings in the four seconds after one of ours
	}{
		{"nobody else", true, 0, 1},
		{"cheap readings", false, 0, 41},
		{"dear ones", false, 20 * time.Millisecond, 5},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := vllmsim.New(vllmsim.Default())
				defer sim.Close()
				sim.SetFaults(vllmsim.Faults{MetricsDelay: test.takes})
				reader := metrics.NewReader(handlerTransport{sim}, &url.URL{Scheme: "http", Host: "vllm"}, metrics.ReaderOptions{})
				if _, err := reader.Probe(t.Context()); err != nil {
					t.Fatal(err)
				}
				w := newWindows(reader, metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{}),
					slog.New(slog.DiscardHandler), DefaultDeadline, func() {})
				defer w.close()
				read := func() {
					if _, err := w.readings.Next(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				read()
				if !test.alone {
					req := httptest.NewRequest(http.MethodPost, "/v1/chat/completions",
						strings.NewReader(`{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":3}`))
					sim.ServeHTTP(httptest.NewRecorder(), req)
				}
				read()
				time.Sleep(3 * time.Second) // nobody came for it
				read()
				time.Sleep(time.Second)
				count := func(d time.Duration) int {
					before := sim.Stats().MetricsFiltered
					time.Sleep(d)
					return int(sim.Stats().MetricsFiltered - before)
				}
				if n := count(idle); n != 0 {
					t.Errorf("%d readings while nothing of ours is there", n)
				}
				w.baseline()
				if n := count(4 * time.Second); n > test.most || n < test.most-1 {
					t.Errorf("%d readings in four seconds, want %d or one less", n, test.most)
				}
				time.Sleep(2 * time.Second)
				if n := count(10 * time.Second); n != 0 {
					t.Errorf("%d readings long after ours", n)
				}
			})
		})
	}
}

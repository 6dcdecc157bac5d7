package metrics

import (
	"io"
	"math"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
)

// Prefix is before the name of every family of ours, those of the Go runtime
// and the process included, so that they can stand on one page with vLLM's.
const Prefix = "vllm_timings_"

// Registry is where the collectors are registered and gathered from: a
// *prometheus.Registry. It should hold nothing else.
type Registry interface {
	prometheus.Registerer
	prometheus.Gatherer
}

// Build is what the build_info family says of the program.
type Build struct {
	Version, Commit string
	GoVersion       string // runtime.Version() when empty
}

// Value is a number that may be unknown; its zero value is.
type Value struct {
	v  float64
	ok bool
}

// Known is the Value v.
func Known(v float64) Value { return Value{v, true} }

// Maybe is the Value v when ok, else an unknown one: Maybe(t.CacheN()).
func Maybe[N ~int | ~int64 | ~float64](v N, ok bool) Value { return Value{float64(v), ok} }

// Get gives the number and whether it is known. One that is not finite or
// below 0 never is: Prometheus' counters panic on it.
func (v Value) Get() (float64, bool) {
	if !v.ok || math.IsNaN(v.v) || math.IsInf(v.v, 0) || v.v < 0 {
		return 0, false
	}
	return v.v, true
}

// Observation is one answer that got its timings. Unknown members are not
// observed; they are never taken for 0.
type Observation struct {
	Endpoint string // the route, never the raw path
	Source   string // upstream, native, window, observed
	Exact    bool   // false when any member is an estimate
	Model    string // as vLLM answered it; bounded, see [Collectors]

	PrefillSeconds Value
	DecodeSeconds  Value
	// The rates are in tokens per second. A rate of 0 stands for "no tokens or
	// no time" (llama.cpp) and is not observed.
	PrefillRate Value
	DecodeRate  Value

	PromptTokens    Value // computed, without the cached ones
	CachedTokens    Value
	PredictedTokens Value
}

// Collectors are the metrics of the proxy itself. All methods are safe for
// concurrent use. The values of the label model are bounded: the first 32
// models seen, then "other". Those of endpoint, source, reason and kind are
// the caller's, who takes them from fixed sets, never from a request.
type Collectors struct {
	gatherer prometheus.Gatherer
	handler  http.Handler
	models   *models

	requests *prometheus.CounterVec
	timings  *prometheus.CounterVec
	unedited *prometheus.CounterVec
	errors   *prometheus.CounterVec
	inFlight prometheus.Gauge
	upstream prometheus.Gauge
	left     prometheus.Counter
	readings map[string]prometheus.Counter // by Result, fixed
	readTime prometheus.Histogram
	shared   prometheus.Histogram
	overhead prometheus.Histogram
	codes    [1000]string // status codes as text
	byModel  modelVecs
}

// modelVecs are the families with the label model alone.
type modelVecs struct {
	prefill, decode, prefillRate, decodeRate *prometheus.HistogramVec
	prompt, cached, predicted                *prometheus.CounterVec
}

// The buckets, in the family's unit. Those of durations reach from a cached
// prompt on a fast GPU to a long answer on a CPU.
var (
	prefillBuckets = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100}
	decodeBuckets  = []float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000}
	prefillRates   = []float64{10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000}
	decodeRates    = []float64{1, 2.5, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000}
	readBuckets    = []float64{0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1}
	sharedBuckets  = []float64{1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128}
	overheadBucket = []float64{0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1}
)

// NewCollectors registers all families in reg. It panics when one of their
// names is taken there, like prometheus.MustRegister.
func NewCollectors(reg Registry, build Build) *Collectors {
	c := &Collectors{gatherer: reg}
	prefixed := prometheus.WrapRegistererWithPrefix(Prefix, reg)
	prefixed.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	f := factory{prefixed}

	if build.GoVersion == "" {
		build.GoVersion = runtime.Version()
	}
	f.gaugeVec("build_info", "Always 1; the labels say which build of vllm-timings runs.", "version", "commit", "goversion").
		WithLabelValues(label(build.Version), label(build.Commit), label(build.GoVersion)).Set(1)
	c.requests = f.counterVec("requests_total", "Requests answered, by endpoint and status code.", "endpoint", "code")
	c.inFlight = f.gauge("in_flight_requests", "Requests being answered now.")
	c.timings = f.counterVec("timings_total", "Answers that got timings, by the source of the numbers and by whether all are exact.", "endpoint", "source", "exactness")
	c.unedited = f.counterVec("unedited_total", "Answers that got no timings although their endpoint is one that should, by reason.", "endpoint", "reason")
	c.errors = f.counterVec("upstream_errors_total", "Requests that vLLM did not answer, or not to the end, by kind.", "kind")
	c.left = f.counter("client_disconnects_total", "Clients that left before their answer was complete.")
	c.upstream = f.gauge("upstream_up", "Whether vLLM answered when last asked (1) or not (0).")
	c.overhead = f.histogram("overhead_seconds", "Time a request spent in the proxy itself, waiting for readings of vLLM's metrics included.", overheadBucket)

	results := f.counterVec("window_readings_total", "Readings of vLLM's metrics, by result.", "result")
	c.readings = make(map[string]prometheus.Counter)
	for _, r := range []string{"ok", "error", "timeout"} {
		c.readings[r] = results.WithLabelValues(r)
	}
	c.readTime = f.histogram("window_reading_seconds", "Duration of the readings of vLLM's metrics that succeeded.", readBuckets)
	c.shared = f.histogram("window_shared_requests", "Requests that finished between two readings of vLLM's metrics; one alone is exact.", sharedBuckets)

	c.byModel = modelVecs{
		prefill:     f.histogramVec("prefill_seconds", "Prefill of a request: first scheduled to first token.", prefillBuckets, "model"),
		decode:      f.histogramVec("decode_seconds", "Decode of a request: first token to last token.", decodeBuckets, "model"),
		prefillRate: f.histogramVec("prefill_tokens_per_second", "Computed prompt tokens of a request per second of its prefill.", prefillRates, "model"),
		decodeRate:  f.histogramVec("decode_tokens_per_second", "Generated tokens of a request per second of its decode.", decodeRates, "model"),
		prompt:      f.counterVec("prompt_tokens_total", "Prompt tokens that were computed, cached ones not counted.", "model"),
		cached:      f.counterVec("cached_tokens_total", "Prompt tokens that were taken from the prefix cache, where known.", "model"),
		predicted:   f.counterVec("predicted_tokens_total", "Generated tokens.", "model"),
	}
	c.models = newModels(&c.byModel)
	for i := range c.codes {
		c.codes[i] = strconv.Itoa(i)
	}
	c.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{
		EnableOpenMetrics: true,
		// One broken collector should not hide the others.
		ErrorHandling: promhttp.ContinueOnError,
	})
	return c
}

// RequestStarted counts a request as in flight; RequestDone must follow.
func (c *Collectors) RequestStarted() { c.inFlight.Inc() }

// RequestDone counts an answered request. A code outside 100 to 999, such as 0
// for a client that left before there was one, is counted as "none".
func (c *Collectors) RequestDone(endpoint string, code int) {
	c.inFlight.Dec()
	text := "none"
	if code >= 100 && code < len(c.codes) {
		text = c.codes[code]
	}
	c.requests.WithLabelValues(label(endpoint), text).Inc()
}

// ObserveTimings counts an answer that got timings. Call it for successful
// answers only: others must not take the places of model names.
func (c *Collectors) ObserveTimings(o Observation) {
	exactness := "estimated"
	if o.Exact {
		exactness = "exact"
	}
	c.timings.WithLabelValues(label(o.Endpoint), label(o.Source), exactness).Inc()

	m := c.models.get(o.Model)
	observe(m.prefill, o.PrefillSeconds)
	observe(m.decode, o.DecodeSeconds)
	observeRate(m.prefillRate, o.PrefillRate)
	observeRate(m.decodeRate, o.DecodeRate)
	add(m.prompt, o.PromptTokens)
	add(m.cached, o.CachedTokens)
	add(m.predicted, o.PredictedTokens)
}

// Unedited counts an answer of one of our endpoints that got no timings.
func (c *Collectors) Unedited(endpoint, reason string) {
	c.unedited.WithLabelValues(label(endpoint), label(reason)).Inc()
}

// ObserveReading counts a reading of vLLM's metrics; it fits
// [CoalescerOptions.OnReading].
func (c *Collectors) ObserveReading(r Reading, err error) {
	c.readings[Result(err)].Inc()
	if err == nil {
		c.readTime.Observe(max(0, r.Duration().Seconds()))
	}
}

// ObserveWindow takes how many requests finished between two readings.
func (c *Collectors) ObserveWindow(requests float64) { observe(c.shared, Known(requests)) }

// UpstreamError counts a request that vLLM did not answer to the end.
func (c *Collectors) UpstreamError(kind string) { c.errors.WithLabelValues(label(kind)).Inc() }

// ClientDisconnected counts a client that left early.
func (c *Collectors) ClientDisconnected() { c.left.Inc() }

// SetUpstreamUp says whether vLLM answers.
func (c *Collectors) SetUpstreamUp(up bool) {
	v := 0.0
	if up {
		v = 1
	}
	c.upstream.Set(v)
}

// ObserveOverhead takes the time that a request spent in the proxy itself.
func (c *Collectors) ObserveOverhead(d time.Duration) { c.overhead.Observe(max(0, d.Seconds())) }

// Handler serves the families alone, as text or OpenMetrics as asked.
func (c *Collectors) Handler() http.Handler { return c.handler }

// WriteText writes the families as text 0.0.4, without an end mark, so that
// they can follow vLLM's own page (which must end with a line feed).
func (c *Collectors) WriteText(w io.Writer) error {
	families, err := c.gatherer.Gather()
	if err != nil && len(families) == 0 {
		return err
	}
	enc := expfmt.NewEncoder(w, expfmt.NewFormat(expfmt.TypeTextPlain))
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			return err
		}
	}
	return err
}

func observe(o prometheus.Observer, v Value) {
	if n, ok := v.Get(); ok {
		o.Observe(n)
	}
}

func observeRate(o prometheus.Observer, v Value) {
	if n, ok := v.Get(); ok && n > 0 {
		o.Observe(n)
	}
}

func add(c prometheus.Counter, v Value) {
	if n, ok := v.Get(); ok {
		c.Add(n)
	}
}

// factory makes and registers collectors.
type factory struct{ reg prometheus.Registerer }

func (f factory) counter(name, help string) prometheus.Counter {
	return register(f, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
}

func (f factory) counterVec(name, help string, labels ...string) *prometheus.CounterVec {
	return register(f, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels))
}

func (f factory) gauge(name, help string) prometheus.Gauge {
	return register(f, prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help}))
}

func (f factory) gaugeVec(name, help string, labels ...string) *prometheus.GaugeVec {
	return register(f, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels))
}

func (f factory) histogram(name, help string, buckets []float64) prometheus.Histogram {
	return register(f, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}))
}

func (f factory) histogramVec(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return register(f, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels))
}

func register[C prometheus.Collector](f factory, c C) C {
	f.reg.MustRegister(c)
	return c
}

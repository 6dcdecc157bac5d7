package vllmsim

import "sort"

// The upper bounds of vLLM's histogram buckets, without +Inf.
var (
	tokenBounds   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000}
	stepBounds    = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	nBounds       = []float64{1, 2, 5, 10, 20}
	ttftBounds    = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBounds     = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	latencyBounds = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	preemptBounds = []float64{1, 2, 3, 4, 5, 10, 20}
)

// maxBuckets is the largest number of buckets, +Inf included.
const maxBuckets = 23

// histogram is a value type, so that copying the counters copies it whole.
type histogram struct {
	counts [maxBuckets]uint64 // not cumulative
	sum    float64
	count  uint64
}

func (h *histogram) observe(bounds []float64, v float64) { h.observeN(bounds, v, 1) }

// observeN counts the same value n times; its sum moves n times too.
func (h *histogram) observeN(bounds []float64, v float64, n int) {
	h.counts[sort.SearchFloat64s(bounds, v)] += uint64(n)
	h.sum += v * float64(n)
	h.count += uint64(n)
}

// counters is everything that /metrics shows. It is a value type without
// pointers: a copy made under the engine's lock is an atomic snapshot of all
// families.
type counters struct {
	startTime float64 // process start, seconds since 1970
	created   float64 // the families' creation, seconds since 1970

	running, waiting float64

	prefixQueries, prefixHits         float64 // tokens, move when scheduled
	promptTokens, promptCached        float64 // tokens, move at the first token
	generationTokens                  float64
	successStop, successLength        float64
	timeToFirstToken, interToken      histogram
	iterationTokens                   histogram
	requestPromptTokens               histogram // this one and all below: when a request finishes
	requestGenerationTokens           histogram
	requestMaxGenerationTokens        histogram
	requestParamsN, requestParamsMax  histogram
	requestTimePerOutputToken         histogram
	e2eLatency, queueTime             histogram
	inferenceTime, prefillTime        histogram
	decodeTime, preemptions, computed histogram
}

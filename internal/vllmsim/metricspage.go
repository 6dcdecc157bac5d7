package vllmsim

import (
	"compress/gzip"
	"net/http"
	"strconv"
	"strings"
)

// metrics answers /metrics, and /metrics/ which is another handler in vLLM:
// prometheus_client's own, which can filter and compress.
func (s *Sim) metrics(w http.ResponseWriter, r *http.Request) {
	faults := s.Faults()
	slash := r.URL.Path != "/metrics"
	var filter map[string]bool
	if names := r.URL.Query()["name[]"]; slash && s.cfg.FilteredMetrics && len(names) > 0 {
		filter = make(map[string]bool, len(names))
		for _, n := range names {
			filter[n] = true
		}
		s.metricsFiltered.Add(1)
	} else {
		s.metricsFull.Add(1)
	}
	if !s.pause(r.Context(), faults.MetricsDelay) {
		panic(http.ErrAbortHandler)
	}
	var body []byte
	mode := faults.Metrics
	switch {
	case mode == MetricsHang:
		select {
		case <-r.Context().Done():
		case <-s.quit:
		}
		panic(http.ErrAbortHandler)
	case mode == MetricsUnauthorized:
		writeJSON(w, http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		return
	case mode == MetricsNotFound:
		writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
		return
	case mode == MetricsEmpty, mode == MetricsEmptyFiltered && filter != nil:
	default:
		body = s.exposition(filter)
	}

	h := w.Header()
	if !slash {
		h.Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
		h.Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body)
		return
	}
	h.Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	h.Set("Transfer-Encoding", "chunked") // even when net/http could tell the length
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = z.Write(body)
		_ = z.Close()
		return
	}
	_, _ = w.Write(body)
}

// exposition renders all families, from one snapshot.
func (s *Sim) exposition(filter map[string]bool) []byte {
	c := s.engine.snapshot()
	p := newPage(s.cfg.Models[0], filter)
	p.process(&c)
	if !s.cfg.DisableLogStats {
		p.scheduler(&c, s.era, s.Sleeping())
		p.counters(&c, s.era)
		p.histograms(&c, s.era)
	}
	return p.buf
}

// process writes a few families of the Python process.
func (p *page) process(c *counters) {
	p.begin("python_info", "gauge", "Python platform information")
	p.sample("python_info", `implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"`, 1)
	p.begin("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
	p.sample("process_resident_memory_bytes", "", 9.85800704e+08)
	p.begin("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	p.sample("process_start_time_seconds", "", c.startTime)
	p.begin("process_max_fds", "gauge", "Maximum number of open file descriptors.")
	p.sample("process_max_fds", "", 20000)
}

func (p *page) scheduler(c *counters, v era, sleepLevel int) {
	p.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", c.running)
	p.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", c.waiting)
	if v == era032 {
		p.gaugeBy("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason",
			value{"capacity", c.waiting}, value{"deferred", 0})
	}
	p.gaugeBy("vllm:engine_sleep_state", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
		"sleep_state", sleepStates(sleepLevel)...)
	p.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", 0)
}

func (p *page) counters(c *counters, v era) {
	at := c.created
	p.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", c.prefixQueries, at)
	p.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", c.prefixHits, at)
	p.counter("vllm:external_prefix_cache_queries", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.", 0, at)
	p.counter("vllm:external_prefix_cache_hits", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.", 0, at)
	p.counter("vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", 0, at)
	p.counter("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", 0, at)
	p.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", 0, at)
	p.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", c.promptTokens, at)
	if v >= era019 {
		p.counterBy("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", "source", at,
			value{"local_compute", c.promptTokens - c.promptCached}, value{"local_cache_hit", c.promptCached}, value{"external_kv_transfer", 0})
		p.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", c.promptCached, at)
	}
	p.counter("vllm:generation_tokens", "Number of generation tokens processed.", c.generationTokens, at)
	p.counterBy("vllm:request_success", "Count of successfully processed requests.", "finished_reason", at,
		value{"stop", c.successStop}, value{"length", c.successLength}, value{"abort", 0})
}

func (p *page) histograms(c *counters, v era) {
	at := c.created
	h := func(name, help string, bounds []float64, h *histogram) {
		p.histogram("vllm:"+name, help, bounds, h, at)
	}
	h("request_prompt_tokens", "Number of prefill tokens processed.", tokenBounds, &c.requestPromptTokens)
	h("request_generation_tokens", "Number of generation tokens processed.", tokenBounds, &c.requestGenerationTokens)
	h("iteration_tokens_total", "Histogram of number of tokens per engine_step.", stepBounds, &c.iterationTokens)
	h("request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", tokenBounds, &c.requestMaxGenerationTokens)
	h("request_params_n", "Histogram of the n request parameter.", nBounds, &c.requestParamsN)
	h("request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokenBounds, &c.requestParamsMax)
	h("time_to_first_token_seconds", "Histogram of time to first token in seconds.", ttftBounds, &c.timeToFirstToken)
	h("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", itlBounds, &c.interToken)
	if v == era011 {
		h("time_per_output_token_seconds", "Histogram of time per output token in seconds.DEPRECATED: Use vllm:inter_token_latency_seconds instead.", itlBounds, &c.interToken)
	}
	h("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", itlBounds, &c.requestTimePerOutputToken)
	h("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", latencyBounds, &c.e2eLatency)
	h("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", latencyBounds, &c.queueTime)
	h("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", latencyBounds, &c.inferenceTime)
	h("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", latencyBounds, &c.prefillTime)
	h("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", latencyBounds, &c.decodeTime)
	if v == era032 {
		h("request_num_preemptions", "Histogram of the number of times a request was preempted.", preemptBounds, &c.preemptions)
	}
	if v >= era019 {
		h("request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", tokenBounds, &c.computed)
	}
}

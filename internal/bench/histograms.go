package main

import (
	"fmt"
	"sync"
	"time"
)

// histograms are the counts and sums that vLLM tells of the requests that it finished.
type histograms struct {
	mu         sync.Mutex
	running    int
	requests   int
	generation int // tokens
	prefill    time.Duration
	decode     time.Duration
}

func (h *histograms) begin() {
	h.mu.Lock()
	h.running++
	h.mu.Unlock()
}

// end takes requests that ended together, before their last events go out, as vLLM does.
func (h *histograms) end(requests, generation int, prefill, decode time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running -= requests
	h.requests += requests
	h.generation += requests * generation
	h.prefill += time.Duration(requests) * prefill
	h.decode += time.Duration(requests) * decode
}

// page is the answer to GET /metrics/?name[]=..., whatever names are asked for: those of the sidecar, but for prefix
// cache and drafts, which this vLLM has none of.
func (h *histograms) page() []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	var b []byte
	one := func(name string, v float64) {
		b = fmt.Appendf(b, "vllm:%s{engine=\"0\",model_name=\"%s\"} %v\n", name, model, v)
	}
	for _, f := range []struct {
		name string
		sum  float64
	}{
		{"request_prefill_time_seconds", h.prefill.Seconds()},
		{"request_decode_time_seconds", h.decode.Seconds()},
		{"request_queue_time_seconds", 0},
		{"request_prompt_tokens", float64(promptTokens * h.requests)},
		{"request_generation_tokens", float64(h.generation)},
		{"request_prefill_kv_computed_tokens", float64(promptTokens * h.requests)},
	} {
		b = fmt.Appendf(b, "# HELP vllm:%s Histogram.\n# TYPE vllm:%s histogram\n", f.name, f.name)
		one(f.name+"_count", float64(h.requests))
		one(f.name+"_sum", f.sum)
	}
	one("num_requests_running", float64(h.running))
	b = append(b, "process_start_time_seconds 1.79596231e+09\n"...)
	return append(fmt.Appendf(nil, "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:31:59 GMT\r\nserver: uvicorn\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\ncontent-length: %d\r\n\r\n", len(b)), b...)
}

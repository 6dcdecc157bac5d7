// Package metrics has the two sides of Prometheus in vllm-timings: it reads
// vLLM's own /metrics page, from which the exact durations of a request are
// computed ([Reader], [Coalescer]), and it counts what the proxy itself does
// ([Collectors]).
//
// It knows nothing of windows, requests or timings: that is package timings.
package metrics

//go:build e2e

package e2e

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// TestWindowAloneIsExact: a request that is alone in its window gets from the histograms what vLLM itself says about it.
func TestWindowAloneIsExact(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL, "--sources", "window", "--keep-metrics")
	n := 0
	for _, kind := range []string{"chat", "text"} {
		for _, stream := range []string{"", `"stream":true,"stream_options":{"include_usage":true}`} {
			for _, tokens := range []int{1, 2, 17, 60, 17} {
				n++
				// The last of the five repeats the third's prompt: mostly from the cache.
				prompt := longPrompt(fmt.Sprintf("%s %s %d window", kind, stream, tokens))
				a := send(t, sidecar.URL, newRequest(kind, "tiny", prompt, tokens, stream))
				timings := a.timings(t)
				metrics, m := a.member("metrics")
				usage, u := a.member("usage")
				if m != 1 || u != 1 {
					t.Fatalf("%d `metrics` and %d `usage` in the answer, want one each:\n%s", m, u, a.body)
				}
				if timings.Get("estimated").Exists() {
					t.Errorf("request %d is estimated: %s", n, timings.Raw)
				}
				for ours, theirs := range map[string]string{"prompt_ms": "time_to_first_token_ms", "predicted_ms": "generation_time_ms"} {
					got, want := timings.Get(ours), metrics.Get(theirs)
					if !got.Exists() || math.Abs(got.Float()-want.Float()) > 0.01 {
						t.Errorf("request %d, %d tokens: %s is %s, vLLM says %s", n, tokens, ours, got.Raw, want.Raw)
					}
				}
				if got, want := timings.Get("cache_n"), usage.Get("prompt_tokens_details.cached_tokens"); !got.Exists() || got.Int() != want.Int() {
					t.Errorf("request %d: cache_n is %q, vLLM says %q", n, got.Raw, want.Raw)
				}
				if got := timings.Get("predicted_n").Int(); got != int64(tokens) {
					t.Errorf("request %d: predicted_n is %d, want %d", n, got, tokens)
				}
			}
		}
	}
	t.Logf("%d requests, each with vLLM's own durations to 0.01 ms", n)
}

// TestNativeIsVLLMsOwn: with vLLM's own figures in the answer, those are the timings, and `metrics` is gone: llama-swap
// computes nonsense from both together.
func TestNativeIsVLLMsOwn(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL, "--sources", "native")
	for _, stream := range []string{"", `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`} {
		begin := time.Now()
		a := send(t, sidecar.URL, newRequest("chat", "tiny", longPrompt("native"+stream), 20, stream))
		wall := float64(time.Since(begin)) / float64(time.Millisecond)
		timings := a.timings(t)
		if _, n := a.member("metrics"); n != 0 {
			t.Errorf("`metrics` beside `timings`:\n%s", a.body)
		}
		if timings.Get("estimated").Exists() {
			t.Errorf("vLLM's own figures are estimated: %s", timings.Raw)
		}
		if sum := timings.Get("prompt_ms").Float() + timings.Get("predicted_ms").Float(); sum <= 0 || sum > wall {
			t.Errorf("prefill and decode take %.1f ms of %.1f ms: %s", sum, wall, timings.Raw)
		}
	}
}

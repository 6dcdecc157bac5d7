//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"
)

// TestAloneIsExact: a request that is alone in its window gets from the histograms what vLLM itself says about it, and so
// does any from that.
func TestAloneIsExact(t *testing.T) {
	vllm := shared.exact.get(t)
	for _, source := range []string{"window", "native"} {
		sidecar := startSidecar(t, vllm.URL, "--sources", source, "--keep-metrics")
		for kind, streams := range map[string]string{
			"chat":      `"stream":true,"stream_options":{"include_usage":true}`,
			"text":      `"stream":true,"stream_options":{"include_usage":true}`,
			"responses": `"stream":true`,
		} {
			for _, stream := range []string{"", streams} {
				for n, tokens := range []int{1, 2, 17, 60, 17} {
					t.Run(fmt.Sprintf("%s/%s/%s/%d", source, kind, stream, n), func(t *testing.T) {
						// The last of the five repeats the third's prompt: mostly from the cache.
						prompt := longPrompt(fmt.Sprintf("%s %s %s %d", source, kind, stream, tokens))
						checkOwnFigures(t, send(t, sidecar.URL, newRequest(kind, "tiny", prompt, tokens, stream)), tokens)
					})
				}
			}
		}
	}
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

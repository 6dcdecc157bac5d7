//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestActivity is the product: llama-swap's Activity page shows for each request what the client's `timings` say, with
// the sidecar as a model's cmd and as a peer, before a vLLM with no flags at all and before one that says its figures.
func TestActivity(t *testing.T) {
	for name, in := range map[string]*instance{"plain": shared.plain, "exact": shared.exact} {
		t.Run(name, func(t *testing.T) {
			vllm := in.get(t)
			peer := startSidecar(t, vllm.URL)
			swap := startLlamaSwap(t, fmt.Sprintf(`
models:
  tiny-cmd:
    cmd: %s serve --listen 127.0.0.1:${PORT} --upstream %s
    proxy: http://127.0.0.1:${PORT}
    useModelName: tiny
peers:
  always-on:
    proxy: %s
    models: [tiny]
`, shared.sidecar, vllm.URL, peer.URL))
			last := 0
			for _, model := range []string{"tiny", "tiny-cmd"} {
				for _, kind := range []string{"chat", "text"} {
					for _, stream := range []string{"", `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`} {
						t.Run(strings.Join([]string{model, kind, stream}, "/"), func(t *testing.T) {
							// A prompt of its own for each case, the same one twice: the second is mostly in the cache.
							prompt := longPrompt(t.Name())
							for _, round := range []string{"first", "second"} {
								a := send(t, swap.URL, newRequest(kind, model, prompt, 12, stream))
								timings := a.timings(t)
								entry, err := swap.ActivityAfter(t.Context(), last)
								if err != nil {
									t.Fatal(err)
								}
								last = entry.ID
								checkActivity(t, entry, timings)
								checkAlone(t, a, timings, round == "second")
							}
						})
					}
				}
			}
		})
	}
}

// checkActivity compares llama-swap's entry with the `timings` that the client got.
func checkActivity(t *testing.T, got stack.Activity, timings gjson.Result) {
	t.Helper()
	want := got
	want.Status = 200
	want.Tokens.Input = int(timings.Get("prompt_n").Int())
	want.Tokens.Output = int(timings.Get("predicted_n").Int())
	want.Tokens.Cached = int(timings.Get("cache_n").Int())
	want.Tokens.PromptPerSecond = timings.Get("prompt_per_second").Float()
	want.Tokens.TokensPerSecond = timings.Get("predicted_per_second").Float()
	if got != want {
		t.Errorf("llama-swap shows %+v\nwant             %+v\nfor timings %s", got, want, timings.Raw)
	}
	if least := int(timings.Get("prompt_ms").Float() + timings.Get("predicted_ms").Float()); got.DurationMs < least {
		t.Errorf("llama-swap shows a duration of %d ms, less than prefill and decode, %d ms", got.DurationMs, least)
	}
}

// checkAlone checks the `timings` of a request that had vLLM to itself: nothing in them is estimated.
func checkAlone(t *testing.T, a answer, timings gjson.Result, cached bool) {
	t.Helper()
	if timings.Get("estimated").Exists() {
		t.Errorf("the only request is estimated: %s", timings.Raw)
	}
	for _, name := range []string{"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"} {
		if timings.Get(name).Float() <= 0 {
			t.Errorf("%s is missing or not positive: %s", name, timings.Raw)
		}
	}
	if n := timings.Get("cache_n"); !n.Exists() || (n.Int() > 0) != cached {
		t.Errorf("cache_n is %s, want a cached prefix: %v; %s", n.Raw, cached, timings.Raw)
	}
	if usage, n := a.member("usage"); n > 0 {
		if got, want := timings.Get("prompt_n").Int()+timings.Get("cache_n").Int(), usage.Get("prompt_tokens").Int(); got != want {
			t.Errorf("prompt_n + cache_n is %d, usage says %d", got, want)
		}
		if got, want := timings.Get("predicted_n").Int(), usage.Get("completion_tokens").Int(); got != want {
			t.Errorf("predicted_n is %d, usage says %d", got, want)
		}
	}
}

// startLlamaSwap starts llama-swap for one test and shows its log if the test fails.
func startLlamaSwap(t *testing.T, config string) *stack.LlamaSwap {
	t.Helper()
	s, err := stack.StartLlamaSwap(t.Context(), shared.llamaSwap, t.TempDir(), "llama-swap", config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() {
			t.Logf("llama-swap's log:\n%s", s.Tail(3000))
		}
	})
	return s
}

// longPrompt is a prompt of several hundred tokens that begins with name, so that it shares no cache block with others.
func longPrompt(name string) string {
	return name + strings.Repeat(" one two three four five six seven eight nine ten", 12)
}

// newRequest makes a request for exactly n tokens at the endpoint of a kind: chat, text, responses or messages; more is
// further members of the body.
func newRequest(kind, model, prompt string, n int, more string) request {
	if more != "" {
		more = "," + more
	}
	common := fmt.Sprintf(`"temperature":0,"ignore_eos":true%s}`, more)
	chat := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":%d,`, model, prompt, n)
	switch kind {
	case "chat":
		return request{"/v1/chat/completions", chat + `"seed":1,` + common}
	case "messages":
		return request{"/v1/messages", chat + common}
	case "responses":
		return request{"/v1/responses", fmt.Sprintf(`{"model":%q,"input":%q,"max_output_tokens":%d,`, model, prompt, n) + common}
	}
	return request{"/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":%q,"max_tokens":%d,"seed":1,`, model, prompt, n) + common}
}

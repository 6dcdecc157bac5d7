//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// TestSpeculative: drafts are counted, from vLLM's own figures and from its counters. The vLLM has two served names; its
// metrics bear the first, whichever a request uses.
func TestSpeculative(t *testing.T) {
	shared.several.want() // the next test's vLLM starts beside this one's
	vllm := shared.speculative.get(t)
	t.Cleanup(shared.speculative.stop) // each engine has 3 GB
	var drafted, accepted int64
	for _, source := range []string{"window", "native"} {
		sidecar := startSidecar(t, vllm.URL, "--sources", source, "--keep-metrics")
		checkSoonExact(t, sidecar) // a reading before the first is needed for the drafts
		for model, kind := range map[string]string{"alias": "chat", "tiny": "text"} {
			for _, stream := range []string{"", `"stream":true,"stream_options":{"include_usage":true}`} {
				t.Run(fmt.Sprintf("%s/%s/%s", source, model, stream), func(t *testing.T) {
					// The tiny model soon repeats itself, which is what n-grams guess well.
					a := send(t, sidecar.URL, newRequest(kind, model, t.Name()+strings.Repeat(" one two three", 8), 16, stream))
					checkOwnFigures(t, a, 16)
					drafted += a.timings(t).Get("draft_n").Int()
					accepted += a.timings(t).Get("draft_n_accepted").Int()
				})
			}
		}
		if source == "window" {
			t.Run("window/messages", func(t *testing.T) {
				before := readCounters(t, vllm.URL)
				a := send(t, sidecar.URL, newRequest("messages", "alias", "one two three one two three", 16, `"stream":true`))
				checkMoved(t, a, before, readCounters(t, vllm.URL), 16)
			})
		}
	}
	if drafted == 0 || accepted == 0 {
		t.Error("vLLM drafted nothing, or accepted nothing")
	}
	t.Logf("%d tokens drafted, %d accepted", drafted, accepted)
}

// TestSeveralEngines: two API servers before two engines. The metrics are one page for both servers, with a series for
// each engine, and only as a whole.
func TestSeveralEngines(t *testing.T) {
	vllm := shared.several.get(t)
	t.Cleanup(shared.several.stop)
	if a := get(t, vllm.URL+"/metrics/?name[]=vllm:request_prefill_time_seconds_sum"); len(a.body) > 0 {
		t.Errorf("the filtered page is not empty any more: read it, it is cheaper\n%s", a.body)
	}
	sidecar := startSidecar(t, vllm.URL, "--sources", "window", "--keep-metrics")
	checkSoonExact(t, sidecar)
	for _, kind := range []string{"chat", "text", "responses"} {
		streams := `"stream":true`
		if kind != "responses" {
			streams += `,"stream_options":{"include_usage":true}`
		}
		for _, stream := range []string{"", streams} {
			for n := range 4 {
				t.Run(fmt.Sprintf("%s/%s/%d", kind, stream, n), func(t *testing.T) {
					checkOwnFigures(t, send(t, sidecar.URL, newRequest(kind, "tiny", longPrompt(t.Name()), 7+n, stream)), 7+n)
				})
			}
		}
	}
	page := string(get(t, vllm.URL+"/metrics").body)
	for _, engine := range []string{"0", "1"} {
		if series := fmt.Sprintf("vllm:request_success_total{engine=%q", engine); !strings.Contains(page, series) {
			t.Errorf("engine %s has answered nothing: this test shows less than it says", engine)
		}
	}
}

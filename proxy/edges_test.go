package proxy

import (
	"io"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/sse"
	"github.com/vllm-timings/vllm-timings/timings"
)

// TestReasons: why a stream has no timings is known, whatever of it did not come.
func TestReasons(t *testing.T) {
	const (
		token  = `data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n"
		finish = `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}` + "\n\n"
		done   = "data: [DONE]\n\n"
	)
	for answer, want := range map[string]string{
		"":                           "no_usage",
		token:                        "no_usage",
		done:                         "no_usage",
		token + done:                 "no_usage",
		token + finish:               "no_usage",
		token + finish + done:        "no_usage",
		token + finish + done + done: "no_usage",
		`data: {"error":{"message":"x"}}` + "\n\n" + done:                   "upstream_error",
		token + `data: {"choices":[{"index":1,"text":"a"}]}` + "\n\n":       "no_usage", // not looked at after the first token
		`data: {"choices":[{"index":1,"text":"a"}]}` + "\n\n" + finish:      "several_choices",
		token + `data: {"usage":{"prompt_tokens":1,"completion_tokens":1}}`: "no_usage",
	} {
		for _, show := range []bool{false, true} {
			ex := testExchange(plan{endpoint: completions, showUsage: show}, timings.Native)
			got, err := throughStream(t, ex, strings.NewReader(answer), nil, 100)
			if got != answer || err != io.EOF {
				t.Errorf("%q became %q, %v", answer, got, err)
			}
			if ex.reason != want || ex.figures.Known {
				t.Errorf("%q, usage shown %v: reason %q, want %q", answer, show, ex.reason, want)
			}
		}
	}
}

// TestHiddenUsageLeavesNull: straight vLLM until 0.20 says `"usage":null` in each event of a text completion, so that is
// what is left of usage in every event that a client asked for in vain.
func TestHiddenUsageLeavesNull(t *testing.T) {
	const (
		open  = `data: {"choices":[{"index":0,"text":"a","finish_reason":`
		usage = `"usage":{"prompt_tokens":9,"completion_tokens":2}}` + "\n\n"
		null  = `"usage":null}` + "\n\n"
		done  = "data: [DONE]\n\n"
	)
	ex := testExchange(plan{endpoint: completions, askedRunning: true, nullUsage: true})
	answer := open + `null}],` + usage + open + `"stop"}],` + usage + `data: {"choices":[],` + usage + done
	got, err := throughStream(t, ex, strings.NewReader(answer), nil, 100)
	if want := open + `null}],` + null + open + `"stop"}],` + null + done; got != want || err != io.EOF {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestForcedUsageStays: a vLLM with --enable-force-include-usage sends usage in every event, and did so before.
func TestForcedUsageStays(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":9,"completion_tokens":2}}` + "\n\n"
	answer := `data: {"choices":[{"index":0,"text":"a","finish_reason":null}],` + usage +
		`data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}],` + usage +
		`data: {"choices":[],` + usage + "data: [DONE]\n\n"
	got, err := throughStream(t, testExchange(plan{endpoint: completions}), strings.NewReader(answer), []byte{3}, 100)
	if got != answer || err != io.EOF {
		t.Errorf("got %q, want %q", got, answer)
	}
}

// TestLineFeedAfterDroppedEvent: only the line feed that belongs to the usage event is taken out with it, not one of the
// event behind it, which is so long that it comes in pieces.
func TestLineFeedAfterDroppedEvent(t *testing.T) {
	_, asked := chunks("\n", "a", "b")
	usageAndDone := asked[strings.Index(asked, `data: {"id":"chatcmpl-1","choices":[],"usage"`):]
	usage, _, _ := strings.Cut(usageAndDone, "data: [DONE]")
	head := strings.TrimSuffix(asked, usageAndDone)
	long := "data: " + strings.Repeat("x", sse.MinLimit)
	answer := io.MultiReader(strings.NewReader(head+usage+long), strings.NewReader("\n"), strings.NewReader("data: y"), strings.NewReader("\n"))
	got, err := throughStream(t, testExchange(plan{endpoint: chat}), answer, nil, 64<<10)
	if want := head + long + "\ndata: y\n"; got != want || err != io.EOF {
		t.Errorf("%d bytes, want %d; they end in %q", len(got), len(want), got[len(got)-20:])
	}
}

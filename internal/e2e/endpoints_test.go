//go:build e2e

package e2e

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// checkOwnFigures checks that the timings are what vLLM itself says about the request, in the same answer.
func checkOwnFigures(t *testing.T, a answer, tokens int) {
	t.Helper()
	timings := a.timings(t)
	metrics, m := a.member("metrics")
	usage, u := a.member("usage")
	if m != 1 || u != 1 {
		t.Fatalf("%d `metrics` and %d `usage` in the answer, want one each:\n%s", m, u, a.body)
	}
	if timings.Get("estimated").Exists() {
		t.Errorf("estimated: %s", timings.Raw)
	}
	checkDuration(t, timings, "prompt_ms", metrics.Get("time_to_first_token_ms").Float())
	checkDuration(t, timings, "predicted_ms", metrics.Get("generation_time_ms").Float())
	cached := usage.Get("prompt_tokens_details.cached_tokens")
	if !cached.Exists() {
		cached = usage.Get("input_tokens_details.cached_tokens") // Responses API
	}
	if got := timings.Get("cache_n"); !got.Exists() || got.Int() != cached.Int() {
		t.Errorf("cache_n is %q, vLLM says %q", got.Raw, cached.Raw)
	}
	if got := timings.Get("predicted_n").Int(); got != int64(tokens) {
		t.Errorf("predicted_n is %d, want %d", got, tokens)
	}
	drafts := metrics.Get("speculative_decoding")
	for ours, theirs := range map[string]string{"draft_n": "num_draft_tokens", "draft_n_accepted": "num_accepted_draft_tokens"} {
		if got, want := timings.Get(ours), drafts.Get(theirs).Int(); got.Int() != want || got.Exists() != (drafts.Get("num_draft_tokens").Int() > 0) {
			t.Errorf("%s is %q, vLLM says %s", ours, got.Raw, drafts.Raw)
		}
	}
}

// checkDuration checks one duration of the timings, in ms, against what vLLM says.
func checkDuration(t *testing.T, timings gjson.Result, name string, want float64) {
	t.Helper()
	if got := timings.Get(name); !got.Exists() || math.Abs(got.Float()-want) > 0.01 {
		t.Errorf("%s is %s, vLLM says %v", name, got.Raw, want)
	}
}

// counters are vLLM's samples, each family summed over its labels: engines and served names.
type counters map[string]float64

func readCounters(t *testing.T, base string) counters {
	t.Helper()
	c := counters{}
	for line := range strings.Lines(string(get(t, base+"/metrics").body)) {
		name, _, labelled := strings.Cut(line, "{")
		_, value, spaced := strings.Cut(line[strings.LastIndex(line, "}")+1:], " ")
		if v, err := strconv.ParseFloat(strings.TrimSpace(value), 64); labelled && spaced && err == nil {
			c[name] += v
		}
	}
	return c
}

// TestMessages: the Anthropic endpoint has no metrics of its own, so its figures come from windows. What they must be is
// in vLLM's counters.
func TestMessages(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL)
	send(t, sidecar.URL, messagesRequest("the first has no reading to be compared with", 3, ""))
	for _, stream := range []string{"", `"stream":true`} {
		prompt := longPrompt(fmt.Sprint(time.Now().UnixNano(), stream)) // new to the cache
		for round, tokens := range []int{1, 24, 9} {
			t.Run(fmt.Sprintf("%s/%d tokens", stream, tokens), func(t *testing.T) {
				before := readCounters(t, vllm.URL)
				a := send(t, sidecar.URL, messagesRequest(prompt, tokens, stream))
				checkMoved(t, a, before, readCounters(t, vllm.URL), tokens)
				usage, _ := a.member("usage")
				timings := a.timings(t)
				// What goes into the cache is not in input_tokens either.
				want := usage.Get("input_tokens").Int() + usage.Get("cache_creation_input_tokens").Int()
				if got := timings.Get("prompt_n").Int(); got != want {
					t.Errorf("prompt_n is %d, usage says %d", got, want)
				}
				cached, want := timings.Get("cache_n").Int(), usage.Get("cache_read_input_tokens").Int()
				if cached != want || (cached > 0) != (round > 0) {
					t.Errorf("cache_n is %d, usage says %d, in round %d with one prompt", cached, want, round)
				}
			})
		}
	}
}

// TestMessagesAfterChats: what vLLM tells about the sidecar's own chats is in windows too, but needs none there. They must
// not spoil those of /v1/messages.
func TestMessagesAfterChats(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL)
	checkSoonExact(t, sidecar)
	send(t, sidecar.URL, messagesRequest("the first has no reading to be compared with", 3, ""))
	for _, stream := range []string{"", `"stream":true`} {
		for n := range 3 {
			t.Run(fmt.Sprintf("%s/%d", stream, n), func(t *testing.T) {
				for range 3 {
					send(t, sidecar.URL, newRequest("chat", "tiny", t.Name(), 9, ""))
				}
				before := readCounters(t, vllm.URL)
				a := send(t, sidecar.URL, messagesRequest(t.Name(), 9, stream))
				checkMoved(t, a, before, readCounters(t, vllm.URL), 9)
			})
		}
	}
}

// checkMoved checks the timings of the only request between two readings of the counters.
func checkMoved(t *testing.T, a answer, before, after counters, tokens int) {
	t.Helper()
	timings := a.timings(t)
	moved := func(name string) float64 { return after["vllm:"+name] - before["vllm:"+name] }
	if n := moved("request_prefill_time_seconds_count"); n != 1 {
		t.Fatalf("%v requests ended, want 1", n)
	}
	if timings.Get("estimated").Exists() {
		t.Errorf("the only request is estimated: %s", timings.Raw)
	}
	checkDuration(t, timings, "prompt_ms", 1000*moved("request_prefill_time_seconds_sum"))
	checkDuration(t, timings, "predicted_ms", 1000*moved("request_decode_time_seconds_sum"))
	for ours, theirs := range map[string]string{
		"prompt_n":         "request_prefill_kv_computed_tokens_sum",
		"predicted_n":      "request_generation_tokens_sum",
		"draft_n":          "spec_decode_num_draft_tokens_total",
		"draft_n_accepted": "spec_decode_num_accepted_tokens_total",
	} {
		if got, want := timings.Get(ours).Float(), moved(theirs); got != want {
			t.Errorf("%s is %v, vLLM counted %v", ours, got, want)
		}
	}
	if got := timings.Get("predicted_n").Int(); got != int64(tokens) {
		t.Errorf("predicted_n is %d, want %d", got, tokens)
	}
}

func messagesRequest(prompt string, n int, more string) request {
	return newRequest("messages", "tiny", prompt, n, more)
}

// TestTimingsPerToken: llama.cpp's request member gives every event with text the timings so far.
func TestTimingsPerToken(t *testing.T) {
	for name, in := range map[string]*instance{"plain": shared.plain, "exact": shared.exact} {
		vllm := in.get(t)
		sidecar := startSidecar(t, vllm.URL)
		checkSoonExact(t, sidecar)
		for _, kind := range []string{"chat", "text"} {
			for _, options := range []string{"", `,"stream_options":{"include_usage":true}`} {
				t.Run(name+"/"+kind+options, func(t *testing.T) {
					const tokens = 20
					more := `"stream":true,"timings_per_token":true` + options
					var a answer
					// On a busy machine many tokens come in one burst.
					for range 5 {
						a = send(t, sidecar.URL, newRequest(kind, "tiny", longPrompt(t.Name()), tokens, more))
						if n := checkPerToken(t, a, tokens, options != ""); n >= 5 || t.Failed() {
							return
						}
					}
					t.Errorf("never 5 events with timings:\n%s", a.body)
				})
			}
		}
	}
}

// checkPerToken checks the timings of all events, and returns how many have some.
func checkPerToken(t *testing.T, a answer, tokens int64, usage bool) (events int) {
	t.Helper()
	docs := a.documents()
	var last gjson.Result
	for i, doc := range docs {
		event := gjson.ParseBytes(doc)
		timings := event.Get("timings")
		// Before the first that have some, events that came in one burst with the headers may have none.
		if text := event.Get("choices.0.delta.content").Str + event.Get("choices.0.text").Str; text != "" && !timings.Exists() && events > 0 {
			t.Errorf("an event with text has no timings: %s", doc)
		}
		if u := event.Get("usage"); u.IsObject() != (usage && i == len(docs)-1) {
			t.Errorf("event %d of %d: usage is %q", i+1, len(docs), u.Raw)
		}
		if !timings.Exists() {
			continue
		}
		events++
		for _, member := range []string{"predicted_n", "predicted_ms"} {
			// The last are vLLM's own figures, which may be less than what was observed.
			if got, before := timings.Get(member).Float(), last.Get(member).Float(); got < before && i < len(docs)-1 {
				t.Errorf("event %d: %s fell from %v to %v", i+1, member, before, got)
			}
		}
		last = timings
	}
	if last.Get("predicted_n").Int() != tokens || last.Get("estimated").Exists() || !gjson.GetBytes(docs[len(docs)-1], "timings").Exists() {
		t.Errorf("%d events with timings, the last %s", events, last.Raw)
	}
	return events
}

package vllmsim

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// near reports whether two sums of seconds or milliseconds agree to within
// the rounding of floating point.
func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*(1+math.Abs(a)) }

// recorder collects the engine's records and signals each one.
type recorder struct {
	mu      sync.Mutex
	records []Record
	ended   chan Record
}

func newRecorder() *recorder { return &recorder{ended: make(chan Record, 1024)} }

func (r *recorder) onEnd(rec Record) {
	r.mu.Lock()
	r.records = append(r.records, rec)
	r.mu.Unlock()
	r.ended <- rec
}

// A request alone: its metrics, the difference of two readings, and the
// engine's own record are the same, and the reading made right after the last
// event has it.
func TestOneRequestIsTheDifferenceOfTwoReadings(t *testing.T) {
	rec := newRecorder()
	cfg := Default()
	cfg.DecodeStep = time.Millisecond
	cfg.PerRequestMetrics, cfg.PromptTokensDetails = true, true
	cfg.OnEnd = rec.onEnd
	s, client := start(t, cfg)
	before := samples(t, client, s.URL)
	for i, streamed := range []bool{true, false, true} {
		body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":%d,"ignore_eos":true}`, strings.Repeat("wind and water ", 20+i), 1+5*i)
		if streamed {
			body = strings.TrimSuffix(body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
		}
		answer := ask(t, client, s.URL+"/v1/completions", body)
		if streamed {
			lines := strings.Split(strings.TrimSpace(answer), "\n\n")
			answer = strings.TrimPrefix(lines[len(lines)-2], "data: ")
		}
		after := samples(t, client, s.URL)
		diff := func(name string) float64 { return after[name] - before[name] }
		got, r := gjson.Parse(answer), <-rec.ended
		for _, c := range []struct {
			what      string
			a, b, own float64
		}{
			{"prefill ms", got.Get("metrics.time_to_first_token_ms").Float(), 1e3 * diff("vllm:request_prefill_time_seconds_sum"), r.Prefill.Seconds() * 1e3},
			{"decode ms", got.Get("metrics.generation_time_ms").Float(), 1e3 * diff("vllm:request_decode_time_seconds_sum"), r.Decode.Seconds() * 1e3},
			{"queue ms", got.Get("metrics.queue_time_ms").Float(), 1e3 * diff("vllm:request_queue_time_seconds_sum"), r.Queue.Seconds() * 1e3},
			{"prompt tokens", got.Get("usage.prompt_tokens").Float(), diff("vllm:request_prompt_tokens_sum"), float64(r.PromptTokens)},
			{"completion tokens", got.Get("usage.completion_tokens").Float(), diff("vllm:request_generation_tokens_sum"), float64(1 + 5*i)},
			{"cached tokens", got.Get("usage.prompt_tokens_details.cached_tokens").Float(),
				diff("vllm:request_prompt_tokens_sum") - diff("vllm:request_prefill_kv_computed_tokens_sum"), float64(r.CachedTokens)},
			{"count", 1, diff("vllm:request_prefill_time_seconds_count"), 1},
		} {
			if !near(c.a, c.b) || !near(c.a, c.own) {
				t.Errorf("request %d: %s: answer %v, readings %v, engine %v", i, c.what, c.a, c.b, c.own)
			}
		}
		if i > 0 && r.CachedTokens == 0 {
			t.Errorf("request %d shares a prefix with the one before, and nothing was cached", i)
		}
		before = after
	}
}

// 32 streams of random lengths, some of which leave half way: sums over all
// answers equal the histograms, and those that left move none of them.
func TestManyStreams(t *testing.T) {
	const streams = 32
	rec := newRecorder()
	cfg := Default()
	cfg.DecodeStep = time.Millisecond
	cfg.PrefillTokensPerSecond = 100_000
	cfg.MaxRunning = 12 // some queue
	cfg.PerRequestMetrics, cfg.PromptTokensDetails = true, true
	cfg.OnEnd = rec.onEnd
	s, client := start(t, cfg)

	var (
		mu   sync.Mutex
		sums = map[string]float64{}
		left int
		wg   sync.WaitGroup
	)
	for i := range streams {
		tokens, leaves := 1+rand.IntN(60), i%5 == 0
		if leaves {
			tokens = 10_000
		}
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			body := fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":"%d %s"}],"max_tokens":%d,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`,
				i%3, strings.Repeat("some words ", i), tokens)
			resp, err := post(t, ctx, client, s.URL+"/v1/chat/completions", body)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if leaves {
				for sc, n := bufio.NewScanner(resp.Body), 0; n < 8 && sc.Scan(); n++ {
				}
				mu.Lock()
				left++
				mu.Unlock()
				return
			}
			data, err := events(resp.Body)
			if err != nil || len(data) != tokens+3 {
				t.Errorf("%d events for %d tokens, error %v", len(data), tokens, err)
				return
			}
			got := gjson.Parse(data[tokens+1])
			if n := got.Get("usage.completion_tokens").Int(); n != int64(tokens) {
				t.Errorf("usage has %d tokens, not %d", n, tokens)
			}
			mu.Lock()
			defer mu.Unlock()
			sums["vllm:request_prefill_time_seconds_sum"] += got.Get("metrics.time_to_first_token_ms").Float() / 1e3
			sums["vllm:request_decode_time_seconds_sum"] += got.Get("metrics.generation_time_ms").Float() / 1e3
			sums["vllm:request_queue_time_seconds_sum"] += got.Get("metrics.queue_time_ms").Float() / 1e3
			sums["vllm:request_prompt_tokens_sum"] += got.Get("usage.prompt_tokens").Float()
			sums["vllm:request_generation_tokens_sum"] += got.Get("usage.completion_tokens").Float()
			sums["vllm:request_prefill_kv_computed_tokens_sum"] += got.Get("usage.prompt_tokens").Float() -
				got.Get("usage.prompt_tokens_details.cached_tokens").Float()
			sums["vllm:request_prefill_time_seconds_count"]++
		})
	}
	wg.Wait()
	for range streams {
		<-rec.ended
	}
	page := samples(t, client, s.URL)
	for name, want := range sums {
		if !near(page[name], want) {
			t.Errorf("%s is %v, the answers' sum is %v", name, page[name], want)
		}
	}
	if got := page["vllm:time_to_first_token_seconds_count"]; got != streams {
		t.Errorf("%v first tokens", got)
	}
	if page["vllm:prefix_cache_hits_total"] == 0 || page["vllm:prompt_tokens_total"] != page["vllm:prefix_cache_queries_total"] {
		t.Errorf("prefix cache: %v hits of %v, %v prompt tokens", page["vllm:prefix_cache_hits_total"],
			page["vllm:prefix_cache_queries_total"], page["vllm:prompt_tokens_total"])
	}
	st := s.Stats()
	if st.Requests != streams || st.Aborted != int64(left) || st.Finished != int64(streams-left) || st.Running+st.Waiting != 0 {
		t.Errorf("%d left: %+v", left, st)
	}
}

func TestQueue(t *testing.T) {
	rec := newRecorder()
	cfg := Default()
	cfg.DecodeStep = time.Millisecond
	cfg.MaxRunning = 1
	cfg.OnEnd = rec.onEnd
	s, client := start(t, cfg)
	ctx, leave := context.WithCancel(t.Context())
	first, err := post(t, ctx, client, s.URL+"/v1/completions", `{"prompt":"first","max_tokens":30000,"ignore_eos":true,"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Body.Close()
	eventually(t, "the first runs", func() bool { return s.Stats().Running == 1 })
	answer := make(chan string)
	go func() { answer <- ask(t, client, s.URL+"/v1/completions", `{"prompt":"second","max_tokens":2}`) }()
	eventually(t, "the second waits", func() bool { return s.Stats().Waiting == 1 })
	page := samples(t, client, s.URL)
	if page["vllm:num_requests_running"] != 1 || page["vllm:num_requests_waiting"] != 1 {
		t.Errorf("%v running, %v waiting", page["vllm:num_requests_running"], page["vllm:num_requests_waiting"])
	}
	leave()
	<-answer
	if r := <-rec.ended; !r.Aborted || r.PromptTokens != 1 {
		t.Errorf("first to end: %+v", r)
	}
	if r := <-rec.ended; r.Aborted || r.Queue <= 0 || r.CompletionTokens != 2 {
		t.Errorf("second to end: %+v", r)
	}
}

func TestClientLeavesWhileQueued(t *testing.T) {
	rec := newRecorder()
	cfg := Default()
	cfg.MaxRunning = 1
	cfg.OnEnd = rec.onEnd
	s, client := start(t, cfg)
	stay, end := context.WithCancel(t.Context())
	defer end()
	ctx, leave := context.WithCancel(t.Context())
	for i, c := range []context.Context{stay, ctx} {
		resp, err := post(t, c, client, s.URL+"/v1/completions", `{"prompt":"p","max_tokens":30000,"ignore_eos":true,"stream":true}`)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		eventually(t, "submitted", func() bool { st := s.Stats(); return st.Running+st.Waiting == i+1 })
	}
	leave()
	if r := <-rec.ended; !r.Aborted || r.CompletionTokens != 0 {
		t.Errorf("%+v", r)
	}
	if page := samples(t, client, s.URL); page["vllm:prefix_cache_queries_total"] != 1 {
		t.Errorf("%v prompt tokens scheduled", page["vllm:prefix_cache_queries_total"])
	}
}

func TestCountsOfSeveralChoices(t *testing.T) {
	s, client := start(t, fast())
	ask(t, client, s.URL+"/v1/completions", `{"prompt":["one two three","four"],"n":2,"max_tokens":3}`)
	page := samples(t, client, s.URL)
	for name, want := range map[string]float64{
		"vllm:request_prefill_time_seconds_count": 4,
		"vllm:request_prompt_tokens_sum":          2*3 + 2*1,
		"vllm:request_generation_tokens_sum":      12,
		"vllm:request_params_n_count":             2,
		"vllm:request_params_n_sum":               4,
		"vllm:request_success_total":              4,
	} {
		if page[name] != want {
			t.Errorf("%s is %v, not %v", name, page[name], want)
		}
	}
}

func TestAnswerEndsByItself(t *testing.T) {
	s, client := start(t, fast())
	body := `{"messages":[{"role":"user","content":[{"type":"text","text":"Tell me a story"}]}]}`
	first := gjson.Parse(ask(t, client, s.URL+"/v1/chat/completions", body))
	text := first.Get("choices.0.message.content").String()
	n := int(first.Get("usage.completion_tokens").Int())
	if first.Get("choices.0.finish_reason").String() != "stop" || len(strings.Fields(text)) != n-1 {
		t.Errorf("%d tokens: %s", n, first.Raw)
	}
	if again := gjson.Parse(ask(t, client, s.URL+"/v1/chat/completions", body)); again.Get("choices.0.message.content").String() != text {
		t.Errorf("not the same text again: %s", again.Raw)
	}
	echo := gjson.Parse(ask(t, client, s.URL+"/v1/completions", `{"prompt":"a \"b\"","max_tokens":1,"echo":true}`))
	if got := echo.Get("choices.0.text").String(); !strings.HasPrefix(got, `a "b" `) || echo.Get("usage.completion_tokens").Int() != 1 {
		t.Errorf("echo: %s", echo.Raw)
	}
	if resp, err := post(t, t.Context(), client, s.URL+"/v1/completions", `{"prompt":{},"max_tokens":1}`); err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("%v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
}

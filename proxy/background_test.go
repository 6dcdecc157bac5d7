package proxy

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// meter is a vLLM whose answers a test writes itself, and whose metrics move when the test says that a request ran.
type meter struct {
	url     string
	version string

	mu       sync.Mutex
	answer   http.HandlerFunc
	asked    []string                      // bodies of the clients' requests
	readings int                           // of the metrics
	sums     map[string]map[string]float64 // by engine and sample
	draft    bool                          // it has the counters of speculative decoding
}

// ran is one request that an engine has finished.
type ran struct {
	engine             string // "" is 0
	prompt, completion int
	cached             int
	prefill, decode    time.Duration
	drafted, accepted  int
}

func startMeter(t testing.TB, answer http.HandlerFunc) *meter {
	t.Helper()
	m := &meter{version: "0.32.0", answer: answer, sums: map[string]map[string]float64{"0": {}}}
	m.url = startUpstream(t, m.serve).URL
	return m
}

func (m *meter) serve(w http.ResponseWriter, r *http.Request) {
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, "/version"):
		_, _ = io.WriteString(w, `{"version":"`+m.version+`"}`)
	case strings.HasSuffix(path, "/metrics/"):
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = io.WriteString(w, m.page(r.URL.Query()["name[]"]))
	default:
		body, _ := io.ReadAll(r.Body)
		m.mu.Lock()
		m.asked = append(m.asked, string(body))
		answer := m.answer
		m.mu.Unlock()
		answer(w, r)
	}
}

// finish moves the metrics.
func (m *meter) finish(all ...ran) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range all {
		engine := r.engine
		if engine == "" {
			engine = "0"
		}
		sums := m.sums[engine]
		for name, by := range map[string]float64{
			"request_prefill_time_seconds": r.prefill.Seconds(), "request_decode_time_seconds": r.decode.Seconds(), "request_queue_time_seconds": 0.001,
			"request_prompt_tokens": float64(r.prompt), "request_generation_tokens": float64(r.completion),
			"request_prefill_kv_computed_tokens": float64(r.prompt - r.cached),
		} {
			sums[name+"_sum"] += by
			sums[name+"_count"]++
		}
		sums["prefix_cache_queries_total"] += float64(r.prompt)
		sums["prefix_cache_hits_total"] += float64(r.cached)
		sums["generation_tokens_total"] += float64(r.completion)
		sums["spec_decode_num_draft_tokens_total"] += float64(r.drafted)
		sums["spec_decode_num_accepted_tokens_total"] += float64(r.accepted)
	}
}

func (m *meter) page(names []string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.readings++
	var page strings.Builder
	for _, name := range names {
		if name == "process_start_time_seconds" {
			page.WriteString(name + " 1.79596224685e+09\n")
			continue
		}
		if strings.Contains(name, "spec_decode") && !m.draft {
			continue // vLLM has the families only when it speculates
		}
		for _, engine := range slices.Sorted(maps.Keys(m.sums)) {
			fmt.Fprintf(&page, "%s{engine=%q,model_name=\"first\"} %s\n", name, engine,
				strconv.FormatFloat(m.sums[engine][strings.TrimPrefix(name, "vllm:")], 'g', -1, 64))
		}
	}
	return page.String()
}

// rig starts a sidecar before m, and waits until it has a reading with which the next can be compared.
func (m *meter) rig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	patient := func(c *Config) { c.Deadline = time.Second } // nothing here is about it
	r := newRig(t, m.url, append([]func(*Config){patient}, change...)...)
	r.learned()
	eventually(t, "the sidecar has a baseline", func() bool {
		r.windows.mu.Lock()
		defer r.windows.mu.Unlock()
		return r.windows.ledger.Based()
	})
	return r
}

// last returns the body of the last request.
func (m *meter) last() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.asked) == 0 {
		return ""
	}
	return m.asked[len(m.asked)-1]
}

// whole writes a JSON answer, events a streamed one, in one burst.
func whole(body string) http.HandlerFunc   { return typed("application/json", body) }
func burst(events string) http.HandlerFunc { return typed("text/event-stream; charset=utf-8", events) }

func typed(contentType, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = io.WriteString(w, body)
	}
}

// wantMember checks that what the client got is want with just one member more.
func wantMember(t *testing.T, what, got, want, member string) {
	t.Helper()
	if n := strings.Count(got, `"timings"`); n != 1 {
		t.Errorf("%s: %d timings, in %s", what, n, got)
	} else if !strings.Contains(got, member) {
		t.Errorf("%s: no %s in %s", what, member, got)
	} else if plain := strings.Replace(got, member, "", 1); plain != want {
		t.Errorf("%s: got %q, want %q and timings", what, plain, want)
	}
}

const (
	queuedResponse = `{"id":"resp_1","object":"response","background":true,"status":"queued","output":[],"usage":null}`
	doneResponse   = `{"id":"resp_1","object":"response","background":true,"status":"completed","output":[{}],` +
		`"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":4,"input_tokens_per_turn":[%s]},"output_tokens":5,"total_tokens":17}}`
)

var (
	oneTurn  = fmt.Sprintf(doneResponse, "12")
	twoTurns = fmt.Sprintf(doneResponse, "5,7")
	newTurns = fmt.Sprintf(doneResponse, "") // vLLM does not fill it in for a response of one turn
)

const backgroundFigures = `,"timings":{"cache_n":4,"prompt_n":8,"prompt_ms":12,"prompt_per_token_ms":1.5,"prompt_per_second":666.667,` +
	`"predicted_n":5,"predicted_ms":40,"predicted_per_token_ms":8,"predicted_per_second":125}`

// TestBackground: a response that ran in the background has timings when it is fetched, if it and nothing else ran since.
func TestBackground(t *testing.T) {
	first := ran{prompt: 5, completion: 2, cached: 0, prefill: 4 * time.Millisecond, decode: 10 * time.Millisecond}
	second := ran{prompt: 7, completion: 3, cached: 4, prefill: 8 * time.Millisecond, decode: 30 * time.Millisecond}
	both := ran{prompt: 12, completion: 5, cached: 4, prefill: 12 * time.Millisecond, decode: 40 * time.Millisecond}
	for _, test := range []struct {
		name   string
		answer string
		ran    []ran
		exact  bool
	}{
		{"alone", oneTurn, []ran{both}, true},
		{"alone, turns not told", newTurns, []ran{both}, true},
		{"two turns", twoTurns, []ran{first, second}, true},
		{"beside another", oneTurn, []ran{both, first}, false},
		{"two turns beside another", twoTurns, []ran{first, second, both}, false},
		{"two turns, one of them not recorded", twoTurns, []ran{first}, false},
		{"another of as many tokens ran as well", oneTurn, []ran{both, both}, false},
		{"other tokens", oneTurn, []ran{{prompt: 13, completion: 5, prefill: 1, decode: 1}}, false},
		{"one request where two are told", twoTurns, []ran{both}, false},
		{"two requests where one is told", oneTurn, []ran{first, second}, false},
		{"nothing", oneTurn, nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := startMeter(t, whole(queuedResponse))
			r := m.rig(t)
			const request = `{"model":"other","input":"x","background":true}`
			if a := r.send(http.MethodPost, string(responses), request); a.body != queuedResponse || m.last() != request {
				t.Errorf("queued: %s; asked %s", a.body, m.last())
			}
			r.wantMetric(1, "unedited_total", "endpoint", string(responses), "reason", "not_finished")
			if a := r.send(http.MethodGet, string(responses)+"/resp_1", ""); a.body != queuedResponse {
				t.Errorf("still queued: %s", a.body)
			}
			m.finish(test.ran...)
			m.mu.Lock()
			m.answer = whole(test.answer)
			m.mu.Unlock()
			for range 2 { // it may be fetched again
				a := r.send(http.MethodGet, string(responses)+"/resp_1", "")
				if test.exact {
					wantMember(t, "fetched", a.body, test.answer, backgroundFigures)
				} else if a.body != test.answer {
					t.Errorf("got %s, want no timings", a.body)
				}
			}
			m.finish(first) // now another ran
			if a := r.send(http.MethodGet, string(responses)+"/resp_1", ""); a.body != test.answer && !test.exact {
				t.Errorf("fetched later: %s", a.body)
			}
		})
	}
}

// TestBackgroundUnknown: of a response that this process did not send, and of one that is not there, nothing is known.
func TestBackgroundUnknown(t *testing.T) {
	m := startMeter(t, whole(oneTurn))
	r := m.rig(t)
	m.finish(ran{prompt: 12, completion: 5, cached: 4, prefill: time.Millisecond, decode: time.Millisecond})
	if a := r.send(http.MethodGet, string(responses)+"/resp_1", ""); a.body != oneTurn {
		t.Errorf("got %s", a.body)
	}
	r.wantMetric(1, "unedited_total", "endpoint", string(responses), "reason", "no_source")
	const gone = `{"error":{"message":"Response with id 'resp_2' not found.","code":404}}`
	m.mu.Lock()
	m.answer = func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, gone)
	}
	m.mu.Unlock()
	for _, path := range []string{"/resp_2", "/resp_2/cancel", "/a%2Fb", "/resp_2/input_items?limit=2"} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
			if a := r.send(method, string(responses)+path, ""); a.status != http.StatusNotFound || a.body != gone {
				t.Errorf("%s %s: %d %s", method, path, a.status, a.body)
			}
		}
	}
}

// TestBackgroundNative: vLLM's own figures of a stored response are as good later as they were at first.
func TestBackgroundNative(t *testing.T) {
	const metrics = `,"metrics":{"time_to_first_token_ms":12.0,"generation_time_ms":40.0}`
	answer := strings.TrimSuffix(oneTurn, "}") + metrics + "}"
	m := startMeter(t, whole(answer))
	r := m.rig(t)
	wantMember(t, "native", r.send(http.MethodGet, string(responses)+"/resp_1", "").body, oneTurn, backgroundFigures)
	m.mu.Lock()
	m.answer = burst("event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":9,\"response\":" + answer + "}\n\n")
	m.mu.Unlock()
	wantMember(t, "streamed", r.send(http.MethodGet, string(responses)+"/resp_1?stream=true", "").body,
		"event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":9,\"response\":"+oneTurn+"}\n\n", backgroundFigures)
	// vLLM's metrics of a response of several turns are those of one of them.
	several := strings.TrimSuffix(twoTurns, "}") + metrics + "}"
	m.mu.Lock()
	m.answer = whole(several)
	m.mu.Unlock()
	if a := r.send(http.MethodGet, string(responses)+"/resp_1", ""); a.body != several {
		t.Errorf("several turns: %s", a.body)
	}
}

// TestTurns: an answer that several engine requests made one after the other has their sums, or nothing: its stream has
// the pauses of the tools in it.
func TestTurns(t *testing.T) {
	first := ran{prompt: 5, completion: 2, prefill: 4 * time.Millisecond, decode: 10 * time.Millisecond}
	second := ran{prompt: 7, completion: 3, cached: 4, prefill: 8 * time.Millisecond, decode: 30 * time.Millisecond}
	const head = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"usage\":null}}\n\n" +
		"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":1,\"delta\":\"a\"}\n\n" +
		"event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":"
	stream := head + twoTurns + "}\n\n"
	for _, other := range []bool{false, true} {
		for answer, content := range map[string]string{twoTurns: "application/json", stream: "text/event-stream"} {
			m := startMeter(t, nil)
			m.answer = func(w http.ResponseWriter, r *http.Request) {
				m.finish(first, second)
				if other {
					m.finish(first)
				}
				typed(content, answer)(w, r)
			}
			a := m.rig(t).send(http.MethodPost, string(responses), `{"input":"x"}`)
			if other {
				if a.body != answer {
					t.Errorf("another ran too: %s", a.body)
				}
				continue
			}
			wantMember(t, "two turns", a.body, answer, backgroundFigures)
		}
	}
}

// TestBackgroundMemory: how many responses are kept in mind is bounded, the newest stay.
func TestBackgroundMemory(t *testing.T) {
	var b background
	sent := time.Unix(1, 0)
	b.add("", sent)
	b.add("never", time.Time{})
	for i := range 3 * maxBackground {
		b.add(fmt.Sprint(i), sent.Add(time.Duration(i)))
		b.add(fmt.Sprint(i), sent) // a response that is asked for again was sent when it was
	}
	if len(b.sent) != maxBackground || len(b.ids) != maxBackground {
		t.Errorf("%d and %d are kept", len(b.sent), len(b.ids))
	}
	for i, want := range map[int]time.Time{0: {}, 2*maxBackground - 1: {}, 2 * maxBackground: sent.Add(2 * maxBackground), 3*maxBackground - 1: sent.Add(3*maxBackground - 1)} {
		if got := b.when(fmt.Sprint(i)); !got.Equal(want) {
			t.Errorf("%d: %v, want %v", i, got, want)
		}
	}
}

// TestDraftWindow: the draft tokens of a request that was alone are those that the counters tell.
func TestDraftWindow(t *testing.T) {
	const answer = `{"choices":[{}],"usage":{"prompt_tokens":12,"completion_tokens":5}}`
	one := ran{prompt: 12, completion: 5, prefill: 12 * time.Millisecond, decode: 40 * time.Millisecond, drafted: 9, accepted: 4}
	for name, test := range map[string]struct {
		also []ran
		off  bool
		want string
	}{
		"alone":          {want: `"draft_n":9,"draft_n_accepted":4}`},
		"no speculation": {off: true, want: `"predicted_per_second":125}`},
		"another":        {also: []ran{{engine: "0", prompt: 3, completion: 2, prefill: 1, decode: 1, drafted: 2}}},
	} {
		m := startMeter(t, nil)
		m.draft = !test.off
		m.answer = func(w http.ResponseWriter, r *http.Request) {
			m.finish(append(test.also, one)...)
			whole(answer)(w, r)
		}
		a := m.rig(t).send(http.MethodPost, string(completions), `{"prompt":"x"}`)
		if test.want == "" {
			if a.timings.Get("draft_n").Exists() || a.exact() {
				t.Errorf("%s: %s", name, a.body)
			}
		} else if !strings.HasSuffix(a.body, test.want+"}") || !a.exact() {
			t.Errorf("%s: %s", name, a.body)
		}
	}
}

// TestEngines: windows go by engine: two that finish between the same readings on two engines are both exact, though the
// label of their model is that of the first name that vLLM serves, not the one that was asked for.
func TestEngines(t *testing.T) {
	var m *meter
	both := newGate(t)
	m = startMeter(t, func(w http.ResponseWriter, r *http.Request) {
		one, prompt := ran{prompt: 12, completion: 5, cached: 4, prefill: 12 * time.Millisecond, decode: 40 * time.Millisecond}, "12"
		if strings.Contains(r.URL.RawQuery, "second") {
			one, prompt = ran{engine: "1", prompt: 30, completion: 5, cached: 0, prefill: 20 * time.Millisecond, decode: 50 * time.Millisecond}, "30"
		}
		both.pass(r.Context())
		m.finish(one)
		whole(`{"choices":[{}],"usage":{"prompt_tokens":`+prompt+`,"completion_tokens":5}}`)(w, r)
	})
	m.sums["1"] = map[string]float64{}
	r := m.rig(t)
	var wg sync.WaitGroup
	answers := map[string]*answer{"first": {}, "second": {}}
	for name, a := range answers {
		wg.Go(func() {
			*a = r.send(http.MethodPost, string(completions)+"?"+name, `{"model":"adapter-`+name+`","prompt":"x"}`)
		})
	}
	both.reached(t)
	both.reached(t)
	both.open()
	wg.Wait()
	for name, want := range map[string]string{
		"first":  backgroundFigures,
		"second": `,"timings":{"cache_n":0,"prompt_n":30,"prompt_ms":20,"prompt_per_token_ms":0.667,"prompt_per_second":1500,"predicted_n":5,"predicted_ms":50,"predicted_per_token_ms":10,"predicted_per_second":100}`,
	} {
		if a := answers[name]; !strings.Contains(a.body, want) {
			t.Errorf("%s: %s", name, a.body)
		}
	}
	r.wantMetric(5, "predicted_tokens_total", "model", "adapter-first") // as it was asked for
}

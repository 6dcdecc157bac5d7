package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
)

// startAll serves a simulated vLLM and a sidecar before it.
func startAll(t *testing.T, life int) (vllmAddr, sidecarAddr string) {
	t.Helper()
	v := newVLLM(life)
	up := httptest.NewServer(v)
	t.Cleanup(func() { v.sim.Close(); up.Close() })
	base, err := url.Parse(up.URL)
	if err != nil {
		t.Fatal(err)
	}
	p, err := proxy.New(proxy.Config{Upstream: base, Collectors: metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{})})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(p)
	t.Cleanup(func() { s.Close(); p.Close() })
	return up.Listener.Addr().String(), s.Listener.Addr().String()
}

// TestEveryCall: each kind of request with each fate ends as it is said to, through the sidecar and straight.
func TestEveryCall(t *testing.T) {
	for life := range 2 {
		straight, sidecar := startAll(t, life)
		for _, bare := range []bool{false, true} {
			addr := map[bool]string{false: sidecar, true: straight}[bare]
			for f, count := range map[fate]func(*load) int{
				ends:   func(l *load) int { return l.whole },
				leaves: func(l *load) int { return l.aborted },
				dies:   func(l *load) int { return l.broken },
			} {
				l, n := newLoad(addr, bare), 0
				for i := range kinds {
					for _, stream := range []bool{false, true} {
						for _, usage := range []bool{false, true} {
							c := &call{kind: &kinds[i], stream: stream, usage: usage, tokens: 6, prompt: fmt.Sprint("a prompt ", life, i, stream, usage), fate: f, after: 1}
							if usage && (!stream || !c.openAI) {
								continue
							}
							n++
							l.one(c)
						}
					}
				}
				l.client.CloseIdleConnections()
				if got := count(l); got != n || l.sent != n || l.wrong > 0 {
					t.Errorf("life %d, straight %v, fate %d: %d of %d, %d wrong: %q", life, bare, f, got, n, l.wrong, l.errors)
				}
				if timed := l.timed > 0; timed != (!bare && f == ends) {
					t.Errorf("life %d, straight %v, fate %d: %d timings", life, bare, f, l.timed)
				}
			}
		}
	}
}

// TestWrongAnswers: what is not as it must be is noticed.
func TestWrongAnswers(t *testing.T) {
	const (
		token  = `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
		figure = `"timings":{"prompt_n":3,"cache_n":1,"predicted_n":2}`
		finish = `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]`
		usages = `data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}`
		end    = "}\n\n"
		over   = "data: [DONE]\n\n"
	)
	plain := call{kind: &kinds[0], stream: true, tokens: 2}
	asks, whole := plain, plain
	asks.usage, whole.stream = true, false
	body := `{"choices":[{"message":{"content":"a b"}}],"usage":{"prompt_tokens":4,"completion_tokens":2}`
	for _, test := range []struct {
		name, answer string
		of           call
		ok           bool
	}{
		{"whole", token + finish + "," + figure + end + over, plain, true},
		{"without timings", token + finish + end + over, plain, true},
		{"usage", token + finish + end + usages + "," + figure + end + over, asks, true},
		{"one token less", finish + end + over, plain, false},
		{"no end", token + finish + end, plain, false},
		{"half an end", token + finish + end + "data: [DO", plain, false},
		{"behind the end", token + finish + end + over + over, plain, false},
		{"no finish", token + token + over, plain, false},
		{"usage that nobody asked for", token + finish + end + usages + end + over, plain, false},
		{"no usage", token + finish + end + over, asks, false},
		{"timings in another place", token + finish + "," + figure + end + usages + end + over, asks, false},
		{"timings twice", token + finish + end + usages + "," + figure + "," + figure + end + over, asks, false},
		{"timings of another", token + finish + "," + strings.Replace(figure, "2}", "3}", 1) + end + over, plain, false},
		{"timings of another prompt", token + finish + end + usages + "," + strings.Replace(figure, "3", "4", 1) + end + over, asks, false},
		{"timings null", token + finish + `,"timings":null` + end + over, plain, false},
		{"metrics too", token + finish + "," + figure + `,"metrics":{}` + end + over, plain, false},
		{"no JSON", token + "data: {\n\n" + finish + end + over, plain, false},
		{"no stream", body + "," + figure + "}", whole, true},
		{"no stream, broken", body, whole, false},
		{"no stream, one token less", strings.Replace(body, "a b", "a", 1) + "}", whole, false},
		{"no stream, other usage", strings.Replace(body, ":2", ":3", 1) + "}", whole, false},
	} {
		if err := test.of.read([]byte(test.answer), true, &seen{}); (err == nil) != test.ok {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

// TestCleanEnd: an answer that broke off must not look whole, and a wrong one is counted.
func TestCleanEnd(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, `{"choices":[{"message":{"content":"a b"}}],"usage":{"prompt_tokens":4,"completion_tokens":2}}`)
	}))
	defer s.Close()
	for f, want := range map[fate]int{ends: 0, dies: 1} {
		l := newLoad(s.Listener.Addr().String(), false)
		l.one(&call{kind: &kinds[0], tokens: 2, fate: f, after: 1})
		l.client.CloseIdleConnections()
		if l.wrong != want || l.whole != 1-want {
			t.Errorf("fate %d: %d wrong, %d whole, %q", f, l.wrong, l.whole, l.errors)
		}
	}
}

func TestGrown(t *testing.T) {
	r := resource{of: func(s sample) float64 { return s.goroutines }, share: 0.1, more: 2, left: 1}
	all := make([]sample, 100)
	for i := range all {
		all[i].goroutines = 100
	}
	all[30].goroutines, all[90].goroutines = 5, 5000 // alone they mean nothing
	if from, to, ok := r.grown(all); from != 100 || to != 100 || !ok {
		t.Error(from, to, ok)
	}
	for i := range all {
		all[i].goroutines = float64(i)
	}
	if from, to, ok := r.grown(all); from != 30 || to != 90 || ok {
		t.Error(from, to, ok)
	}
	if !r.freed(sample{goroutines: 5}, sample{goroutines: 6}) || r.freed(sample{goroutines: 5}, sample{goroutines: 7}) {
		t.Error("what is left is not judged")
	}
}

// TestSums: sums that differ fail, except by what nobody can know.
func TestSums(t *testing.T) {
	at := time.Unix(1000, 0)
	family := func(text string) page {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, text) }))
		defer s.Close()
		p, err := newScraper(s.Listener.Addr().String()).read()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	text := `vllm_timings_requests_total{code="200",endpoint="a"} 5
vllm_timings_requests_total{code="200",endpoint="b"} 1
vllm_timings_requests_total{code="502",endpoint="a"} 1
vllm_timings_upstream_errors_total{kind="x"} 2
vllm_timings_client_disconnects_total 1
vllm_timings_timings_total{endpoint="a",exactness="exact",source="native"} 4
vllm_timings_unedited_total{endpoint="a",reason="x"} 2
vllm_timings_predicted_tokens_total{model="tiny"} 40
`
	for _, test := range []struct {
		name, was, is string
		gone          departure
		bad           int
	}{
		{"equal", "", "", departure{}, 0},
		{"a token", "} 40", "} 41", departure{}, 1},
		{"a request", `"a"} 5`, `"a"} 6`, departure{}, 3},
		{"left", "disconnects_total 1", "disconnects_total 0", departure{}, 1},
		{"left while vLLM died", "disconnects_total 1", "disconnects_total 0", departure{gap: gap{at.Add(-time.Second), at}}, 0},
		{"left at the end", "disconnects_total 1", "disconnects_total 0", departure{late: true}, 0},
	} {
		r := &run{clients: newLoad("", false), beside: newLoad("", true), gaps: []gap{{at, at.Add(time.Second)}}}
		r.clients.tally.sent, r.clients.whole, r.clients.aborted, r.clients.refused, r.clients.broken = 7, 4, 1, 1, 1
		r.clients.timed, r.clients.predicted = 4, 40
		r.clients.left = []departure{test.gone}
		r.metrics = family(strings.Replace(text, test.was, test.is, 1))
		bad := 0
		for _, row := range r.sums() {
			if !row.ok {
				bad++
			}
		}
		if bad != test.bad {
			t.Errorf("%s: %d lines are not as they must be: %+v", test.name, bad, r.sums())
		}
	}
}

// TestCalls: all kinds and fates come, and those that leave do so well before the end.
func TestCalls(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	fates, paths := map[fate]int{}, map[string]int{}
	for range 10000 {
		c := newCall(r)
		fates[c.fate]++
		paths[c.path]++
		if c.tokens < fewest || c.tokens > most || c.fate == leaves && 2*c.after > c.tokens || c.fate == dies && c.after < 1 || c.usage && !c.stream {
			t.Errorf("%+v", c)
		}
		if n := len(c.prompt)/4 + 40; n > longestPrompt {
			t.Errorf("a prompt of about %d tokens", n)
		}
	}
	if len(paths) != len(kinds) || fates[leaves] < 50 || fates[leaves] > 200 || fates[dies] < 50 || fates[dies] > 200 {
		t.Error(fates, paths)
	}
}

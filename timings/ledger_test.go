package timings

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// hand is a ledger with readings made by hand. Times are in ms.
type hand struct {
	t       *testing.T
	ledger  Ledger
	series  []Series
	process float64
	none    bool // a page without samples
}

func newHand(t *testing.T) *hand {
	return &hand{t: t, process: 1, series: []Series{{Key: "0", Totals: Totals{Computed: Some(0)},
		Progress: Progress{CacheQueries: Some(0), CacheHits: Some(0), Generated: Some(0)}}}}
}

func at(t int) time.Time { return epoch.Add(time.Duration(t) * ms) }

// record is vLLM's, of a request with so many tokens that took so many ms.
func (h *hand) record(engine, prompt, completion, cached, prefill, decode int) {
	s := &h.series[engine]
	s.Requests++
	s.Prompt += prompt
	s.Generation += completion
	s.Computed.Value += prompt - cached
	s.Prefill += time.Duration(prefill) * ms
	s.Decode += time.Duration(decode) * ms
	s.CacheQueries.Value += prompt
	s.CacheHits.Value += cached
	s.Generated.Value += completion
}

func (h *hand) read(began int) Change {
	r := Reading{Began: at(began), Ended: at(began + 2), ProcessStart: h.process}
	if !h.none {
		r.Series = append(r.Series, h.series...)
	}
	return h.ledger.Observe(r)
}

// stream adds a request that was streamed: last token seen at the given time, after the decode time was observed.
func (h *hand) stream(prompt, completion, prefill, decode, seen int) *Finished {
	f := h.body(prompt, completion, seen-prefill-decode-1, seen)
	f.NotBefore = at(max(seen-10, seen-decode))
	f.Observed = phases(time.Duration(prefill)*ms, time.Duration(decode)*ms)
	return f
}

// body adds a request whose answer came whole.
func (h *hand) body(prompt, completion, sent, seen int) *Finished {
	f := &Finished{Usage: Usage{Prompt: prompt, Completion: completion}, Sent: at(sent), NotBefore: at(sent), Seen: at(seen)}
	f.Observed = Plausible(f.Usage, Phases{})
	h.ledger.Add(f, nil)
	return f
}

func (h *hand) verdict(f *Finished, want Verdict) {
	h.t.Helper()
	if _, got := h.ledger.Look(f); got != want {
		h.t.Errorf("verdict %v, want %v", got, want)
	}
}

func (h *hand) settle(f *Finished, want Share) {
	h.t.Helper()
	got, ok := h.ledger.Settle(f)
	if !ok {
		h.t.Error("not found")
	}
	if got.Estimated { // what is divided has fractions
		got.Prefill.Value, got.Decode.Value = got.Prefill.Value.Round(time.Microsecond), got.Decode.Value.Round(time.Microsecond)
	}
	if d := cmp.Diff(want, got); d != "" {
		h.t.Error(d)
	}
}

func (h *hand) lost(f *Finished) {
	h.t.Helper()
	h.verdict(f, Missing)
	if got, ok := h.ledger.Settle(f); ok {
		h.t.Errorf("found %+v", got)
	}
}

func exactly(prefill, decode, cached int) Share {
	return Share{Phases: phases(time.Duration(prefill)*ms, time.Duration(decode)*ms), Cached: Some(cached), Requests: 1}
}

func about(prefill, decode int, cached Opt[int], requests int) Share {
	return Share{Phases: phases(time.Duration(prefill)*ms, time.Duration(decode)*ms), Cached: cached, Requests: requests, Estimated: true}
}

func TestLedger(t *testing.T) {
	unknown := Opt[int]{}
	tests := []struct {
		name string
		do   func(h *hand)
	}{
		{"alone", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 32, 20, 100)
			f := h.stream(100, 11, 25, 101, 200)
			h.verdict(f, Missing)
			h.read(200)
			h.verdict(f, Resolved)
			h.settle(f, exactly(20, 100, 32))
		}},
		{"alone, answer came whole", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 20, 100)
			f := h.body(100, 11, 50, 200)
			h.read(201)
			h.settle(f, exactly(20, 100, 0))
		}},
		{"no reading before", func(h *hand) {
			h.record(0, 100, 11, 0, 20, 100)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(201)
			h.lost(f)
		}},
		{"recorded late", func(h *hand) {
			h.read(0)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(201)
			h.verdict(f, Missing)
			h.record(0, 100, 11, 32, 20, 100)
			h.read(210)
			h.settle(f, exactly(20, 100, 32))
		}},
		{"a reading that began before the answer is no proof", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 32, 20, 100)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(199)
			h.verdict(f, Unclear)
			h.record(0, 100, 11, 32, 30, 110)
			h.read(202)
			h.verdict(f, Unclear)
		}},
		{"too late for that request", func(h *hand) {
			h.read(0)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(201)
			h.read(290)
			h.record(0, 100, 11, 32, 20, 100)
			h.read(300)
			h.lost(f)
		}},
		{"other numbers of tokens", func(h *hand) {
			h.read(0)
			h.record(0, 100, 12, 0, 20, 100)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(201)
			h.lost(f)
		}},
		{"durations that cannot be", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 20, 1000)
			f := h.stream(100, 11, 25, 101, 200)
			h.read(201)
			h.lost(f)
		}},
		{"two of ours in one window", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 200, 21, 0, 60, 200)
			f, g := h.stream(100, 11, 40, 102, 300), h.stream(200, 21, 80, 204, 301)
			h.read(302)
			h.settle(f, about(30, 99, Some(0), 2))
			h.settle(g, about(60, 201, Some(0), 2))
		}},
		{"two of ours, the other's answer comes after the reading", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 200, 21, 0, 60, 200)
			f := h.stream(100, 11, 40, 102, 300)
			h.read(302)
			h.verdict(f, Unclear)
			g := h.stream(200, 21, 80, 204, 310)
			h.read(312)
			h.settle(f, about(30, 99, Some(0), 2))
			h.settle(g, about(60, 201, Some(0), 2))
		}},
		{"cached tokens of the one who does not tell them", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 32, 30, 100)
			h.record(0, 200, 21, 64, 60, 200)
			f, g := h.stream(100, 11, 40, 102, 300), h.stream(200, 21, 80, 204, 301)
			f.Cached = Some(32)
			h.read(302)
			h.settle(f, about(30, 99, unknown, 2))
			h.settle(g, about(60, 201, Some(64), 2))
		}},
		{"cached tokens of neither", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 32, 30, 100)
			h.record(0, 200, 21, 64, 60, 200)
			f, g := h.stream(100, 11, 40, 102, 300), h.stream(200, 21, 80, 204, 301)
			h.read(302)
			h.settle(f, about(30, 99, unknown, 2))
			h.settle(g, about(60, 201, unknown, 2))
		}},
		{"two that came whole", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 100, 21, 0, 30, 200)
			f, g := h.body(100, 11, 170, 301), h.body(100, 21, 70, 301)
			h.read(302)
			h.settle(f, about(30, 100, Some(0), 2))
			h.settle(g, about(30, 200, Some(0), 2))
		}},
		{"two that came whole and waited long elsewhere", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 100, 21, 0, 30, 200)
			f, g := h.body(100, 11, -5000, 301), h.body(100, 21, 70, 301)
			h.read(302)
			h.settle(f, about(30, 100, Some(0), 2))
			h.settle(g, about(30, 200, Some(0), 2))
		}},
		{"a direct client's request in the window", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 77, 5, 0, 12, 40)
			f := h.stream(100, 11, 35, 101, 200)
			h.read(201)
			h.verdict(f, Unclear)
			h.read(205)
			h.verdict(f, Unclear)
			h.settle(f, about(35, 101, Some(0), 2))
		}},
		{"a direct client's request in the window before", func(h *hand) {
			h.read(0)
			h.record(0, 77, 5, 0, 12, 40)
			h.read(60)
			h.record(0, 100, 11, 16, 30, 100)
			f := h.stream(100, 11, 35, 101, 200)
			h.read(201)
			h.settle(f, exactly(30, 100, 16))
		}},
		{"a direct client's of the same shape just before", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 101)
			h.read(185)
			h.record(0, 100, 11, 0, 40, 120)
			f := h.stream(100, 11, 35, 102, 200)
			h.read(201)
			h.verdict(f, Unclear)
			h.settle(f, about(30, 101, Some(0), 1)) // the decode time is nearer
		}},
		{"a direct client's of the same shape long before", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 101)
			h.read(185)
			h.read(900)
			h.record(0, 100, 11, 0, 40, 120)
			f := h.stream(100, 11, 45, 122, 1000)
			h.read(1100) // late enough for whoever is late
			h.settle(f, exactly(40, 120, 0))
		}},
		{"the same shape again and again, of one client", func(h *hand) {
			h.read(0)
			for i := range 3 {
				h.record(0, 100, 11, 0, 30+i, 100+i)
				f := h.stream(100, 11, 35, 102, 1000*i+500)
				f.Alone = true
				h.read(1000*i + 501)
				h.settle(f, exactly(30+i, 100+i, 0))
			}
		}},
		{"same shapes in windows side by side", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 35, 101, 200)
			g := h.stream(100, 11, 35, 120, 215)
			h.read(201)
			h.verdict(f, Resolved) // but the window may be g's, and vLLM late with f
			h.record(0, 100, 11, 0, 31, 119)
			h.read(216)
			h.settle(f, about(30, 100, Some(0), 1))
			h.settle(g, about(31, 119, Some(0), 1))
		}},
		{"same shapes far apart", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 35, 101, 200)
			h.read(270)
			h.settle(f, exactly(30, 100, 0))
			h.record(0, 100, 11, 16, 31, 119)
			g := h.stream(100, 11, 35, 120, 700)
			h.read(770)
			h.settle(g, exactly(31, 119, 16))
		}},
		{"same shapes, an engine that is never late", func(h *hand) {
			h.series[0].Running = Some(3)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.settle2(h.stream(100, 11, 35, 101, 200), 201, exactly(30, 100, 0))
			h.record(0, 100, 11, 16, 31, 119)
			h.settle2(h.stream(100, 11, 35, 120, 800), 801, exactly(31, 119, 16))
		}},
		{"same shapes, an engine that may be late", func(h *hand) {
			h.series[0].Running = Some(neverLate + 1)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.settle2(h.stream(100, 11, 35, 101, 200), 201, exactly(30, 100, 0))
			h.record(0, 100, 11, 16, 31, 119)
			h.settle2(h.stream(100, 11, 35, 120, 800), 801, about(31, 119, Some(16), 1))
		}},
		{"an event that starved", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 16, 30, 100)
			h.read(60)
			f := h.stream(100, 11, 35, 250, 210) // recorded 150 ms before, and so long seems the decode
			h.read(211)
			h.settle(f, exactly(30, 100, 16))
		}},
		{"a guess takes nothing from who was really there", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 200, 21, 0, 60, 200)
			f := h.stream(100, 11, 40, 102, 300)
			h.read(302)
			h.settle(f, about(40, 102, Some(0), 2))
			g := h.stream(200, 21, 80, 204, 400)
			h.read(402)
			h.settle(g, about(60, 201, Some(0), 2))
		}},
		{"a stream and an answer that came whole", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 100, 21, 0, 34, 200)
			f, g := h.stream(100, 11, 32, 102, 300), h.body(100, 21, 50, 301)
			h.read(302)
			h.settle(f, about(32, 102, Some(0), 2))
			h.settle(g, about(32, 198, Some(0), 2))
		}},
		{"hidden among others, while an unseen twin is alone in the next window", func(h *hand) {
			h.read(0)
			h.record(0, 359, 86, 0, 25, 1098) // ours
			h.record(0, 200, 50, 0, 20, 600)  // somebody's, whose answer has not come
			h.read(1200)
			h.record(0, 359, 86, 0, 24, 1085) // with as many tokens, and its answer has not come either
			f := h.stream(359, 86, 26, 1098, 1205)
			h.read(1206)
			h.verdict(f, Unclear)
			if got, _ := h.ledger.Settle(f); !got.Estimated {
				h.t.Errorf("called exact: %+v", got)
			}
		}},
		{"settled twice", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 40, 101, 300)
			h.read(302)
			h.settle(f, exactly(30, 100, 0))
			h.settle(f, exactly(30, 100, 0))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.do(newHand(t)) })
	}
}

// settle2 reads and settles.
func (h *hand) settle2(f *Finished, began int, want Share) {
	h.t.Helper()
	h.read(began)
	h.settle(f, want)
}

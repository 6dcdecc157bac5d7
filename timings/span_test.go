package timings

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// span checks what a ledger says of all that ran since sent.
func (h *hand) span(prompt, completion, sent, requests int, want *Share) {
	h.t.Helper()
	got, ok := h.ledger.Span(&Finished{Usage: Usage{Prompt: prompt, Completion: completion}, Sent: at(sent)}, requests)
	if want == nil {
		if ok {
			h.t.Errorf("found %+v", got)
		}
		return
	}
	if d := cmp.Diff(*want, got); !ok || d != "" {
		h.t.Errorf("found %v: %s", ok, d)
	}
}

func TestSpan(t *testing.T) {
	sum := func(prefill, decode, cached, requests int) *Share {
		s := exactly(prefill, decode, cached)
		s.Requests = requests
		return &s
	}
	for name, test := range map[string]func(h *hand){
		"nothing was read": func(h *hand) { h.span(5, 2, 10, 1, nil) },
		"nothing ran":      func(h *hand) { h.read(0); h.read(20); h.span(5, 2, 10, 1, nil) },
		"no reading since": func(h *hand) { h.read(0); h.record(0, 5, 2, 0, 3, 4); h.span(5, 2, 10, 1, nil) },
		"alone": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 2, 10, 1, sum(3, 4, 1, 1))
		},
		// The reading beside sending is the baseline where others ran since the one before.
		"others before": func(h *hand) {
			h.read(0)
			h.record(0, 9, 9, 0, 9, 9)
			h.read(11)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 2, 10, 1, sum(3, 4, 1, 1))
		},
		// It was over before the reading that was begun beside sending it.
		"quick": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(11)
			h.read(20)
			h.span(5, 2, 10, 1, sum(3, 4, 1, 1))
		},
		"quick, and others before": func(h *hand) {
			h.read(0)
			h.record(0, 9, 9, 0, 9, 9)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(11)
			h.read(20)
			h.span(5, 2, 10, 1, nil)
		},
		"others after": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(30)
			h.span(5, 2, 10, 1, nil)
			h.span(10, 4, 10, 2, sum(6, 8, 2, 2))
		},
		// Where it may be over when the first reading comes, those behind may be another's.
		"another with as many tokens after, some before": func(h *hand) {
			h.read(0)
			h.record(0, 9, 9, 0, 9, 9)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.record(0, 5, 2, 0, 30, 40)
			h.read(30)
			h.span(5, 2, 10, 1, nil)
		},
		"one of two was over before": func(h *hand) {
			h.read(0)
			h.record(0, 9, 9, 0, 9, 9)
			h.read(20)
			h.record(0, 5, 2, 0, 30, 40)
			h.record(0, 7, 3, 0, 30, 40)
			h.read(30)
			h.span(12, 5, 10, 2, nil)
		},
		"first reading ever": func(h *hand) {
			h.read(20)
			h.record(0, 5, 2, 0, 30, 40)
			h.read(30)
			h.span(5, 2, 10, 1, nil)
		},
		"over many readings": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			for i := range historyLen - 2 {
				h.read(20 + 10*i)
			}
			h.record(0, 7, 3, 4, 8, 30)
			h.read(1000)
			h.span(12, 5, 10, 2, sum(11, 34, 5, 2))
		},
		// All that is left of the time before it was sent is not enough to tell.
		"longer ago than is known": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			for i := range historyLen + 1 {
				h.read(20 + 10*i)
			}
			h.span(5, 2, 10, 1, nil)
		},
		"tokens differ": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 3, 10, 1, nil)
			h.span(6, 2, 10, 1, nil)
			h.span(5, 2, 10, 2, nil)
		},
		"on two engines": func(h *hand) {
			h.series = append(h.series, Series{Key: "1", Totals: Totals{Computed: Some(0)}})
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.record(1, 7, 3, 4, 8, 30)
			h.read(20)
			h.span(12, 5, 10, 2, sum(11, 34, 5, 2))
			h.span(5, 2, 10, 1, nil)
		},
		"an engine more": func(h *hand) {
			h.read(0)
			h.series = append(h.series, Series{Key: "1", Totals: Totals{Computed: Some(0)}})
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 2, 10, 1, nil)
		},
		"torn": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.series[0].Torn = true
			h.read(20)
			h.span(5, 2, 10, 1, nil)
			h.series[0].Torn = false
			h.read(30)
			h.span(5, 2, 10, 1, sum(3, 4, 1, 1))
		},
		"baseline torn": func(h *hand) {
			h.series[0].Torn = true
			h.read(0)
			h.series[0].Torn = false
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 2, 10, 1, nil)
		},
		"restarted": func(h *hand) {
			h.read(0)
			h.process = 2
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			h.span(5, 2, 10, 1, nil)
		},
		"the page is empty": func(h *hand) {
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.none = true
			h.read(20)
			h.span(5, 2, 10, 1, nil)
		},
		// vLLM before 0.16 does not count computed tokens.
		"cached unknown": func(h *hand) {
			h.series[0].Computed = Opt[int]{}
			h.read(0)
			h.record(0, 5, 2, 1, 3, 4)
			h.read(20)
			want := sum(3, 4, 0, 1)
			want.Cached = Opt[int]{}
			h.span(5, 2, 10, 1, want)
		},
	} {
		t.Run(name, func(t *testing.T) { test(newHand(t)) })
	}
}

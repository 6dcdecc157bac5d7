package timings

import (
	"testing"
	"time"
)

// grows makes known how prefills grow: by two requests, alone, with so many tokens and ms.
func (h *hand) grows(prompt, prefill, longer, took int) {
	h.t.Helper()
	h.record(0, prompt, 11, 0, prefill, 100)
	f := h.body(prompt, 11, 50, 200)
	h.read(201)
	h.settle(f, exactly(prefill, 100, 0))
	h.record(0, longer, 11, 0, took, 100)
	g := h.body(longer, 11, 300, 1300)
	h.read(1301)
	h.settle(g, exactly(took, 100, 0))
}

// TestFill: what nobody observed of a request is its part of the window.
func TestFill(t *testing.T) {
	unknown := Opt[int]{}
	tests := []struct {
		name string
		do   func(h *hand)
	}{
		{"an answer that came whole, beside a stranger's, gets its part of their tokens", func(h *hand) {
			h.read(0)
			h.record(0, 100, 21, 0, 35, 205)
			h.record(0, 300, 5, 0, 55, 35)
			f := h.body(100, 21, 300, 560)
			h.read(561)
			h.verdict(f, Unclear)
			h.settle(f, about(30, 200, Some(0), 2))
		}},
		{"the same, when it is known how prefills grow", func(h *hand) {
			h.read(0)
			h.grows(100, 30, 300, 70)
			h.record(0, 164, 21, 64, 35, 205) // 100 computed
			h.record(0, 300, 5, 0, 85, 35)    // both together 1.2 times what they should take
			i := h.body(164, 21, 1400, 1660)
			i.Cached = Some(64)
			h.read(1661)
			h.settle(i, about(36, 200, unknown, 2))
		}},
		{"the same, with cached tokens that are not told", func(h *hand) {
			h.read(0)
			h.grows(100, 30, 4000, 810)
			h.record(0, 4000, 21, 3900, 25, 560)
			h.record(0, 4000, 5, 3900, 15, 112)
			i := h.body(4000, 21, 1400, 2000)
			h.read(2001)
			h.settle(i, about(20, 560, unknown, 2)) // 30 of 60 ms that 100 tokens of each should take, and took 40
		}},
		{"the same, of a vLLM that does not count computed tokens", func(h *hand) {
			h.read(0)
			h.grows(100, 30, 4000, 810)
			h.series[0].Computed = unknown
			h.record(0, 100, 21, 0, 30, 200)
			h.record(0, 4000, 5, 0, 810, 40)
			i := h.body(100, 21, 1400, 1640)
			i.Cached = Some(0)
			h.read(1641)
			h.settle(i, about(30, 200, unknown, 2))
		}},
		{"the same, when all so far were about as long", func(h *hand) {
			h.read(0)
			h.grows(100, 30, 101, 31)
			h.record(0, 100, 21, 0, 30, 200)
			h.record(0, 3700, 5, 0, 770, 40)
			i := h.body(100, 21, 1400, 1900)
			h.read(1901)
			h.settle(i, about(40, 200, Some(0), 2)) // of 800 ms 200 of 4000 tokens' part
		}},
		{"the same, when all prefills of a step took much longer than one", func(h *hand) {
			h.read(0)
			h.grows(100, 30, 300, 70)
			for range 4 {
				h.record(0, 100, 11, 0, 500, 100)
			}
			i := h.body(100, 11, 1400, 2050)
			h.read(2051)
			h.settle(i, about(500, 100, Some(0), 4))
		}},
		{"the same, when that is more than all the time that it took", func(h *hand) {
			h.read(0)
			h.record(0, 100, 21, 0, 10, 105)
			h.record(0, 300, 5, 0, 80, 135)
			f := h.body(100, 21, 445, 560)
			h.read(561)
			h.settle(f, about(15, 100, Some(0), 2)) // 30 and 200 ms
		}},
		{"the same, of one token", func(h *hand) {
			h.read(0)
			h.record(0, 100, 1, 0, 10, 0)
			h.record(0, 300, 1, 0, 14, 0)
			f := h.body(100, 1, 500, 560)
			h.read(561)
			h.settle(f, about(8, 0, Some(0), 2))
		}},
		{"the same, beside one of no tokens", func(h *hand) {
			h.read(0)
			h.record(0, 100, 5, 0, 10, 40)
			h.record(0, 300, 0, 0, 14, 0)
			h.record(0, 300, 0, 0, 14, 0)
			h.record(0, 300, 0, 0, 14, 0)
			h.record(0, 300, 0, 0, 14, 0)
			f := h.body(100, 5, 500, 560)
			h.read(561)
			if got, _ := h.ledger.Settle(f); got.Decode.Known {
				h.t.Errorf("decode %v, which nothing tells", got.Decode.Value)
			}
		}},
		{"a stream whose headers came with its first token, beside a stranger's", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 200, 98)
			h.record(0, 300, 11, 0, 200, 112)
			f := h.stream(100, 11, 1, 98, 500)
			f.Observed.Prefill = Opt[time.Duration]{}
			h.read(502)
			h.settle(f, about(2, 98, Some(0), 2)) // all the time there was
		}},
		{"an answer that came whole beside a stream whose end came late", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(0, 100, 21, 0, 34, 200)
			f, g := h.stream(100, 11, 32, 299, 500), h.body(100, 21, 250, 501)
			h.read(502)
			h.settle(f, about(32, 299, Some(0), 2))
			h.settle(g, about(32, 200, Some(0), 2)) // not the 1 ms that the stream leaves
		}},
		{"two that came whole, of which one waited long", func(h *hand) {
			h.read(0)
			h.record(0, 100, 3, 0, 30, 20)
			h.record(0, 100, 11, 0, 30, 100)
			f, g := h.body(100, 3, 250, 300), h.body(100, 11, 55, 301)
			h.read(302)
			h.settle(f, about(30, 20, Some(0), 2))
			h.settle(g, about(30, 100, Some(0), 2))
		}},
		{"how prefills grow is learnt from one that may have been another's", func(h *hand) {
			h.read(0)
			h.record(0, 50, 5, 0, 20, 40)
			h.read(100) // a stranger's
			h.record(0, 50, 5, 0, 20, 40)
			f := h.body(50, 5, 150, 230)
			h.read(231)
			h.settle(f, about(20, 40, Some(0), 1))
			h.record(0, 250, 5, 0, 60, 40)
			g := h.body(250, 5, 300, 420)
			h.read(421)
			h.settle(g, exactly(60, 40, 0))
			h.record(0, 50, 5, 0, 30, 40)
			h.record(0, 250, 5, 0, 50, 40)
			i := h.body(50, 5, 500, 640)
			h.read(641)
			h.settle(i, about(20, 40, Some(0), 2))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.do(newHand(t)) })
	}
}

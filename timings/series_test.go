package timings

import (
	"testing"
	"time"
)

// TestSeries is about what readings are made of.
func TestSeries(t *testing.T) {
	second := func(h *hand) {
		h.series = append(h.series, Series{Key: "1", Totals: Totals{Computed: Some(0)},
			Progress: Progress{CacheQueries: Some(0), CacheHits: Some(0), Generated: Some(0)}})
	}
	change := func(h *hand, began int, want Change) {
		h.t.Helper()
		if got := h.read(began); got != want {
			h.t.Errorf("change at %d is %v, want %v", began, got, want)
		}
	}
	tests := []struct {
		name string
		do   func(h *hand)
	}{
		{"a window for each engine", func(h *hand) {
			second(h)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(1, 200, 21, 64, 60, 200)
			f, g := h.stream(100, 11, 40, 101, 300), h.stream(200, 21, 80, 202, 301)
			h.read(302)
			h.settle(f, exactly(30, 100, 0))
			h.settle(g, exactly(60, 200, 64))
		}},
		{"the same shape in two engines", func(h *hand) {
			second(h)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.record(1, 100, 11, 0, 60, 90)
			f, g := h.stream(100, 11, 40, 101, 300), h.stream(100, 11, 80, 92, 301)
			h.read(302)
			h.verdict(f, Unclear)
			h.settle(f, about(30, 100, Some(0), 1))
			h.settle(g, about(60, 90, Some(0), 1))
		}},
		{"torn", func(h *hand) {
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			h.series[0].Torn = true
			change(h, 201, Same)
			h.verdict(f, Missing)
			h.series[0].Torn = false
			change(h, 205, Same)
			h.settle(f, exactly(30, 100, 0))
		}},
		{"torn when read first", func(h *hand) {
			h.series[0].Torn = true
			h.read(0)
			h.series[0].Torn = false
			h.record(0, 70, 7, 0, 30, 100)
			h.read(10)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			h.read(205)
			h.settle(f, exactly(30, 100, 0))
		}},
		{"torn when read first: what it counted before is no window", func(h *hand) {
			h.record(0, 100, 11, 0, 30, 100)
			h.series[0].Torn = true
			h.read(0)
			h.series[0].Torn = false
			f := h.stream(100, 11, 40, 101, 200)
			h.read(201)
			h.lost(f)
		}},
		{"a torn engine may hide the request", func(h *hand) {
			second(h)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100) // a direct client's
			h.record(1, 100, 11, 0, 60, 101)
			f := h.stream(100, 11, 40, 101, 200)
			h.series[1].Torn = true
			h.read(205)
			h.verdict(f, Unclear)
			h.series[1].Torn = false
			h.read(210)
			h.verdict(f, Unclear)
		}},
		{"a new series", func(h *hand) {
			h.read(0)
			second(h)
			h.record(1, 100, 11, 16, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			change(h, 201, Same)
			h.settle(f, exactly(30, 100, 16))
		}},
		{"a page that was empty at first", func(h *hand) {
			h.none = true
			h.read(0)
			h.none = false
			h.record(0, 100, 11, 16, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			change(h, 201, Same)
			h.settle(f, exactly(30, 100, 16))
		}},
		{"another process", func(h *hand) {
			h.record(0, 50, 5, 0, 5, 50)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			h.process = 2
			change(h, 201, Restarted)
			h.lost(f)
			h.record(0, 120, 11, 0, 30, 100)
			g := h.stream(120, 11, 40, 101, 400)
			change(h, 401, Same)
			h.settle(g, exactly(30, 100, 0))
		}},
		{"two processes in turn", func(h *hand) {
			h.read(0)
			for i, want := range []Change{Restarted, Alternates, Alternates} {
				h.process = float64(2 - i%2)
				change(h, 10+10*i, want)
			}
		}},
		{"a counter that fell", func(h *hand) {
			h.process = 0
			h.record(0, 50, 5, 0, 5, 50)
			h.read(0)
			h.series[0].Totals = Totals{Computed: Some(0)}
			change(h, 10, Restarted)
			h.record(0, 100, 11, 0, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			change(h, 201, Same)
			h.settle(f, exactly(30, 100, 0))
		}},
		{"a series that vanished", func(h *hand) {
			second(h)
			h.read(0)
			h.series = h.series[:1]
			change(h, 10, Restarted)
			change(h, 20, Same)
		}},
		{"counters that fall again and again", func(h *hand) {
			h.process = 0
			// Only falls are seen; the way up looks like requests.
			for i, want := range []Change{Restarted, Restarted, Alternates, Alternates} {
				h.series[0].Totals = Totals{Requests: 9}
				change(h, 20*i, Same)
				h.series[0].Totals = Totals{Requests: 3}
				change(h, 20*i+10, want)
			}
		}},
		{"falls a minute apart are restarts", func(h *hand) {
			h.process = 0
			for i := range 5 {
				h.series[0].Totals = Totals{Requests: 9}
				change(h, 61_000*i, Same)
				h.series[0].Totals = Totals{Requests: 3}
				change(h, 61_000*i+10, Restarted)
			}
		}},
		{"no computed tokens: cached from the prefix cache's counters", func(h *hand) {
			h.series[0].Computed = Opt[int]{}
			h.read(0)
			h.record(0, 100, 11, 32, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			f.Alone = true
			h.read(201)
			h.settle(f, exactly(30, 100, 32))
		}},
		{"no computed tokens, with others", func(h *hand) {
			h.series[0].Computed = Opt[int]{}
			h.read(0)
			h.record(0, 100, 11, 32, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			h.read(201)
			want := exactly(30, 100, 0)
			want.Cached = Opt[int]{}
			h.settle(f, want)
		}},
		{"no computed tokens, and a direct client's request was scheduled", func(h *hand) {
			h.series[0].Computed = Opt[int]{}
			h.read(0)
			h.record(0, 100, 11, 32, 30, 100)
			h.series[0].CacheQueries.Value += 50
			f := h.stream(100, 11, 40, 101, 200)
			f.Alone = true
			h.read(201)
			want := exactly(30, 100, 0)
			want.Cached = Opt[int]{}
			h.settle(f, want)
		}},
		{"no computed tokens, and no reading since before the request", func(h *hand) {
			h.series[0].Computed = Opt[int]{}
			h.read(100)
			h.record(0, 100, 11, 32, 30, 100)
			f := h.stream(100, 11, 40, 101, 200)
			f.Alone = true
			h.read(201)
			want := exactly(30, 100, 0)
			want.Cached = Opt[int]{}
			h.settle(f, want)
		}},
		{"drafts while alone", func(h *hand) {
			h.series[0].Drafted, h.series[0].Accepted = Some(7), Some(3)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.series[0].Drafted.Value += 12
			h.series[0].Accepted.Value += 8
			f := h.stream(100, 11, 40, 101, 200)
			f.Alone = true
			h.read(201)
			want := exactly(30, 100, 0)
			want.Draft = Some(Draft{12, 8})
			h.settle(f, want)
		}},
		{"drafts while a direct client's request ran", func(h *hand) {
			h.series[0].Drafted, h.series[0].Accepted = Some(7), Some(3)
			h.read(0)
			h.record(0, 100, 11, 0, 30, 100)
			h.series[0].Generated.Value += 3
			h.series[0].Drafted.Value += 12
			f := h.stream(100, 11, 40, 101, 200)
			f.Alone = true
			h.read(201)
			h.settle(f, exactly(30, 100, 0))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.do(newHand(t)) })
	}
}

// TestNotify: whoever waits is told from within Observe, once.
func TestNotify(t *testing.T) {
	h := newHand(t)
	h.read(0)
	h.record(0, 100, 11, 0, 30, 100)
	f := h.stream(100, 11, 40, 101, 200)
	told := 0
	f.notify = func() { told++ }
	h.read(201)
	h.read(205)
	if told != 1 {
		t.Errorf("told %d times", told)
	}
}

// TestLedgerStaysSmall: what is kept does not grow with the number of requests, those of strangers and those that were
// never recorded included.
func TestLedgerStaysSmall(t *testing.T) {
	h := newHand(t)
	h.read(0)
	windows, pending, held := 0, 0, 0
	for i := range 100_000 {
		now := 10 + 60*i
		h.record(0, 100+i%1000, 11+i/1000, 0, 1, 2)
		if i%3 == 0 {
			h.record(0, 7, 7, 0, 1, 2)
		}
		n := 11 + i/1000
		if i%5 == 0 {
			n = 2000 + i
		}
		f := h.stream(100+i%1000, n, 1, 2, now)
		h.read(now + 1)
		h.ledger.Settle(f)
		windows, pending = max(windows, len(h.ledger.windows)), max(pending, len(h.ledger.pending))
		held = max(held, len(h.ledger.shapes.now)+len(h.ledger.shapes.before))
	}
	if windows > 200 || pending > 100 || held > 2*shapesMax || len(h.ledger.history) > historyLen || cap(h.ledger.windows) > 1000 {
		t.Errorf("windows %d (capacity %d), pending %d, shapes %d, readings %d", windows, cap(h.ledger.windows), pending, held, len(h.ledger.history))
	}
	h.read(6_000_000 + int((lookBack+4*slack)/time.Millisecond))
	if n := len(h.ledger.windows) + len(h.ledger.pending); n != 0 {
		t.Errorf("%d are left in the end", n)
	}
}

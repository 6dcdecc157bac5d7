package timings

import (
	"cmp"
	"slices"
	"time"
)

// Totals are cumulative sums over requests that one engine series has finished.
type Totals struct {
	Requests   int
	Prompt     int      // tokens, cached ones included
	Generation int      // tokens
	Computed   Opt[int] // prompt tokens really computed (vLLM from 0.16 on)
	Prefill    time.Duration
	Decode     time.Duration
	Queue      time.Duration
}

func (t Totals) minus(o Totals) Totals {
	t.Requests -= o.Requests
	t.Prompt -= o.Prompt
	t.Generation -= o.Generation
	t.Computed = Opt[int]{t.Computed.Value - o.Computed.Value, t.Computed.Known && o.Computed.Known}
	t.Prefill -= o.Prefill
	t.Decode -= o.Decode
	t.Queue -= o.Queue
	return t
}

// wentBack reports whether a counter of t is lower than in o, an earlier reading of the same process.
func (t Totals) wentBack(o Totals) bool {
	d := t.minus(o)
	return d.Requests < 0 || d.Prompt < 0 || d.Generation < 0 || d.Prefill < 0 || d.Decode < 0 || d.Queue < 0
}

// Progress are counters that move while requests run, not when they end.
type Progress struct {
	CacheQueries, CacheHits Opt[int] // prompt tokens looked up and found in the prefix cache, counted when scheduled
	Generated               Opt[int] // tokens, counted in each engine step
	Drafted, Accepted       Opt[int] // speculative decoding
}

// Series is one engine's figures at one reading.
type Series struct {
	Key string
	Totals
	Progress
	Running Opt[int] // requests in the engine, as of its last step
	// Torn is true where the page was put together while it changed: it is not used, the next is.
	Torn bool
}

// Reading is what vLLM's /metrics said once.
type Reading struct {
	Began, Ended time.Time // it was made somewhere in between
	ProcessStart float64   // tells processes apart; 0 is unknown
	Series       []Series
}

func (r *Reading) series(key string) (Series, bool) {
	i := slices.IndexFunc(r.Series, func(s Series) bool { return s.Key == key })
	if i < 0 {
		return Series{}, false
	}
	return r.Series[i], true
}

// Change tells what a reading says about the process that it came from.
type Change int

const (
	Same       Change = iota
	Restarted         // another process: what was known of the old one's windows is gone
	Alternates        // several processes answer in turn (a balancer): windows have no meaning
)

const (
	// slack is how much later than they happened events and readings may be noted when a machine or a network is busy. An
	// answer's last event is never early, so slack only widens the choice of windows that a request may be in.
	slack = 200 * time.Millisecond
	// maxLate is how long after an answer's last event vLLM may record the request.
	maxLate = 60 * time.Millisecond
	// neverLate is how many requests vLLM can run without ever being late. It wakes clients in slices of 128 outputs of a
	// step and records after the last slice; with one slice nobody can be woken before the record. Between two readings
	// more may run than both tell, hence half of that.
	neverLate = 64
	// lookBack bounds how long before its last byte a request without events can have been recorded.
	lookBack = 2 * time.Second
	// historyLen is how many readings are kept to look up counters of Progress at a request's start.
	historyLen = 256
)

// window is what finished in one series between two readings. It is attributed to all its requests at once.
type window struct {
	Totals
	began time.Time // of the first reading
	ended time.Time // of the second
	taken bool      // it is attributed
}

// base is where a series' next window begins.
type base struct {
	Totals
	began time.Time // of the reading that it is from
}

// Ledger turns readings into windows and attributes them to the requests that ended. It is not safe for concurrent use.
type Ledger struct {
	process float64
	gone    []float64       // process starts seen before
	backs   []time.Time     // when counters fell
	bases   map[string]base // of the last reading that was not torn
	windows []*window
	pending []*Finished
	history []Reading
	read    time.Time // when the last whole reading began: it has all that was recorded before
	calm    bool      // no more requests run than vLLM can record in time
	shapes  shapes
	pace    pace
	foreign time.Time // when a window was last given up that held requests of nobody known
}

// Observe takes a reading, which must have begun after the one before it, and resolves the requests that it can.
func (l *Ledger) Observe(r Reading) Change {
	change := l.continuity(r)
	if change != Same {
		l.windows, l.history, l.bases, l.calm = nil, nil, nil, false
		l.read = time.Time{}
		l.pending = slices.DeleteFunc(l.pending, func(f *Finished) bool { return f.settled })
	}
	first := l.bases == nil
	if first {
		l.bases = map[string]base{}
	}
	whole, calm := len(r.Series) > 0, true
	for i := range r.Series {
		s := &r.Series[i]
		calm = calm && s.Running.Known && s.Running.Value <= neverLate
		if s.Torn {
			whole = false // the next reading makes a window that is longer
			continue
		}
		// A series that is new started at zero, but not one that was only torn until now.
		before, known := l.bases[s.Key]
		if d := s.Totals.minus(before.Totals); d.Requests > 0 && !first && (known || !l.tornBefore(s.Key)) {
			if before.Requests == 0 {
				d.Computed = s.Computed
			}
			l.windows = append(l.windows, &window{Totals: d, began: before.began, ended: r.Ended})
		}
		l.bases[s.Key] = base{s.Totals, r.Began}
	}
	if whole {
		l.read = r.Began
	}
	l.process = cmp.Or(r.ProcessStart, l.process)
	l.history = append(l.history, r)
	if len(l.history) > historyLen {
		l.history = slices.Delete(l.history, 0, len(l.history)-historyLen)
	}
	l.resolve(calm && l.calm)
	l.calm = calm
	l.forget(r.Ended)
	return change
}

// Based reports whether there is a reading with which the next can be compared.
func (l *Ledger) Based() bool { return len(l.bases) > 0 }

// Strangers reports whether requests that did not come through this process finished lately.
func (l *Ledger) Strangers(now time.Time) bool {
	return !l.foreign.IsZero() && now.Sub(l.foreign) < shapesFor
}

// tornBefore reports whether the last reading had the series.
func (l *Ledger) tornBefore(key string) bool {
	if len(l.history) == 0 {
		return false
	}
	_, there := l.history[len(l.history)-1].series(key)
	return there
}

// forget drops what cannot matter any more.
func (l *Ledger) forget(now time.Time) {
	old := func(t time.Time) bool { return now.Sub(t) > lookBack+2*slack }
	l.windows = slices.DeleteFunc(l.windows, func(w *window) bool {
		if !w.taken && old(w.ended) {
			l.foreign = now
			if w.Requests == 1 {
				l.shapes.seen(shape{w.Prompt, w.Generation}, now)
			}
			return true
		}
		return w.taken
	})
	// Who was settled by a guess stays until the events of all that may share its window must have come.
	l.pending = slices.DeleteFunc(l.pending, func(f *Finished) bool {
		return f.settled && (f.resolved || now.Sub(f.Seen) > 2*slack)
	})
}

// continuity finds out whether r comes from the process of the readings before it.
func (l *Ledger) continuity(r Reading) Change {
	if l.bases == nil {
		return Same
	}
	if r.ProcessStart != 0 && l.process != 0 && r.ProcessStart != l.process {
		alternates := slices.Contains(l.gone, r.ProcessStart)
		if !slices.Contains(l.gone, l.process) {
			l.gone = append(l.gone, l.process)
		}
		if alternates {
			return Alternates
		}
		return Restarted
	}
	for key, b := range l.bases {
		s, there := r.series(key)
		if there && (s.Torn || !s.wentBack(b.Totals)) {
			continue
		}
		// Pages without a process start (several API server processes) tell a restart only by their counters.
		// One process can restart now and then; counters that fall again and again are several processes.
		l.backs = append(l.backs, r.Ended)
		l.backs = slices.DeleteFunc(l.backs, func(t time.Time) bool { return r.Ended.Sub(t) > time.Minute })
		if len(l.backs) >= 3 {
			return Alternates
		}
		return Restarted
	}
	return Same
}

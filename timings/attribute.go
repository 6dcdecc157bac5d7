package timings

import (
	"math"
	"sort"
	"time"
)

// Finished is a request whose answer is there and that is to be found in the windows.
type Finished struct {
	Usage
	Observed  Phases          // of a stream, as Plausible leaves them; of an answer that came whole only that one token takes no decode time
	Prefills  []time.Duration // of a stream; what its prefill time may be, as Steps tells
	Sent      time.Time       // when it went to vLLM
	NotBefore time.Time       // when it had surely not finished: the arrival of the event before the last token's, else Sent
	Seen      time.Time       // when its last token, or its body, arrived
	Alone     bool            // no other request of this process was in flight between Sent and Seen

	share    Share
	resolved bool // its window is attributed
	settled  bool // nobody waits for it any more
	twin     bool // another request had the same numbers of tokens, and not long ago
	notify   func()
}

// Share is what a window says about one request.
type Share struct {
	Phases
	Cached    Opt[int]
	Draft     Opt[Draft]
	Estimated bool
	Requests  int // that finished in the same window
}

// Verdict says how much the readings so far tell about a request.
type Verdict int

const (
	Missing  Verdict = iota // no window can hold it: the reading came too early, or it is not in these metrics
	Unclear                 // it is in a window with requests that are not known (yet)
	Resolved                // its share is known or as well estimated as can be
)

// Add registers a request whose share is wanted; Settle must follow. notify is called, from within Observe, when it is
// resolved.
func (l *Ledger) Add(f *Finished, notify func()) {
	f.notify = notify
	f.twin = l.shapes.seen(shape{f.Prompt, f.Completion}, f.Seen)
	if f.twin {
		for _, g := range l.pending {
			g.twin = g.twin || g.Prompt == f.Prompt && g.Completion == f.Completion
		}
	}
	l.pending = append(l.pending, f)
}

// Look returns what is known about f.
func (l *Ledger) Look(f *Finished) (Share, Verdict) {
	switch {
	case f.resolved:
		return f.share, Resolved
	case len(l.candidates(f, 1)) > 0:
		return Share{}, Unclear
	default:
		return Share{}, Missing
	}
}

// Settle ends the search for f and returns its share: the attributed one, or an estimate from a window that it must be in.
// It is false where no window can hold it.
//
// A guess attributes no window, or the request that was really in it would be looked for in the wrong one: f stays on
// the books until later readings and requests tell where it belongs.
func (l *Ledger) Settle(f *Finished) (Share, bool) {
	if f.settled {
		return f.share, f.resolved
	}
	f.settled, f.notify = true, nil
	if f.resolved {
		return f.share, true
	}
	w := f.nearest(l.candidates(f, math.MaxInt))
	if w == nil {
		return Share{}, false
	}
	share := l.guess(f, w)
	l.complete(f, w, &share)
	return share, true
}

// resolve attributes windows to pending requests as far as they leave no choice.
//
// What was recorded before a reading began is in one of the windows up to it, so a request that can be in one of them
// only is in that one, and when nobody else is, the window says exactly what it took. Requests that can be in several
// wait for others to leave them no choice. Whether several pending requests fit is no question of taste: two that can
// only be in a window of one mean that one of them was not recorded in time.
func (l *Ledger) resolve(calm bool) {
	for again := true; again; {
		again = false
		only := l.only()
		for _, w := range l.windows {
			members := only[w]
			if len(members) != w.Requests {
				continue
			}
			if len(members) == 1 {
				share := whole(w)
				share.Estimated = l.doubtful(members[0], w, calm)
				l.give(members[0], w, share)
				l.pace.learn(members[0], share)
				again = true
			} else if sums(members) == (shape{w.Prompt, w.Generation}) {
				l.divide(w, members)
				again = true
			}
		}
	}
}

// only returns the pending requests that were recorded and are in one certain window, by that window.
func (l *Ledger) only() map[*window][]*Finished {
	only := map[*window][]*Finished{}
	for _, f := range l.pending {
		if f.resolved || f.Seen.After(l.read) {
			continue
		}
		if ws := l.candidates(f, 2); len(ws) == 1 {
			only[ws[0]] = append(only[ws[0]], f)
		}
	}
	return only
}

func sums(fs []*Finished) (sum shape) {
	for _, f := range fs {
		sum.prompt += f.Prompt
		sum.completion += f.Completion
	}
	return sum
}

// doubtful reports whether w, the only window that f fits, may be another request's all the same: one with as many
// tokens, whose event has not come yet or never will, while f itself is recorded late.
//
// It takes both. vLLM is never late with few requests, and no more so some time after the answer. And of another request
// with just as many tokens nothing can be known in advance, but those that come in such numbers come again and again:
// a benchmark's, a health check's.
func (l *Ledger) doubtful(f *Finished, w *window, calm bool) bool {
	if calm || l.read.Sub(f.Seen) >= maxLate {
		return false
	}
	strangers := l.Strangers(f.Seen)
	for _, other := range l.windows {
		if other == w || other.taken {
			continue
		}
		strangers = true
		if other.Prompt == f.Prompt && other.Generation == f.Completion {
			return true
		}
	}
	return f.twin && (strangers || !f.Alone)
}

// shape is what requests are recognised by.
type shape struct{ prompt, completion int }

// shapes remembers the shapes of requests for a while, in two generations so that it stays small.
type shapes struct {
	now, before map[shape]struct{}
	since       time.Time
}

const (
	shapesFor = time.Minute
	shapesMax = 4096
)

// seen reports whether s was seen before, and remembers it.
func (m *shapes) seen(s shape, at time.Time) bool {
	if m.now == nil || at.Sub(m.since) > shapesFor || len(m.now) >= shapesMax {
		m.before, m.now, m.since = m.now, map[shape]struct{}{}, at
	}
	_, now := m.now[s]
	_, before := m.before[s]
	m.now[s] = struct{}{}
	return now || before
}

// candidates returns the windows that f may have finished in, at most so many.
func (l *Ledger) candidates(f *Finished, most int) []*window {
	var found []*window
	earliest, latest := f.earliest(), f.Seen.Add(maxLate)
	// Windows stand in the order of their ends.
	from := sort.Search(len(l.windows), func(i int) bool { return !l.windows[i].ended.Before(earliest) })
	for _, w := range l.windows[from:] {
		if len(found) == most {
			break
		}
		if f.fits(w) && !w.began.After(latest) {
			found = append(found, w)
		}
	}
	return found
}

// fits reports whether f may be one of the requests in w.
func (f *Finished) fits(w *window) bool {
	switch {
	case w.taken:
		return false
	case w.Requests > 1: // the others have a prompt token each at least
		return w.Prompt-f.Prompt >= w.Requests-1 && w.Generation >= f.Completion
	case w.Prompt != f.Prompt || w.Generation != f.Completion:
		return false
	}
	if w.Computed.Known && f.Cached.Known && w.Prompt-w.Computed.Value != f.Cached.Value {
		return false
	}
	// The engine's phases lie within the time that this process saw, and the time between the events that it saw within
	// the decode phase, give or take how late this process noted them.
	wall := f.Seen.Sub(f.Sent)
	if w.Prefill+w.Decode > wall+slack {
		return false
	}
	seen := f.Observed.Decode
	return !seen.Known || seen.Value-w.Decode <= max(slack, seen.Value/5)
}

// earliest returns the time before which f was not recorded by vLLM. However late things are noted, a reading that was there
// whole before f was sent does not have it.
func (f *Finished) earliest() time.Time {
	t := f.Seen.Add(-lookBack)
	if f.NotBefore.After(t) {
		t = f.NotBefore
	}
	if t = t.Add(-slack); f.Sent.After(t) {
		t = f.Sent
	}
	return t
}

// give attributes share of w to f.
func (l *Ledger) give(f *Finished, w *window, share Share) {
	l.complete(f, w, &share)
	f.share, f.resolved = share, true
	w.taken = true
	if f.notify != nil {
		f.notify()
	}
}

// complete adds to a share of w what does not come from it.
func (l *Ledger) complete(f *Finished, w *window, share *Share) {
	share.Requests = w.Requests
	if !share.Draft.Known {
		share.Draft = l.draft(f)
	}
	if !share.Cached.Known {
		share.Cached = l.cachedWhileAlone(f)
	}
}

func firstKnown[T any](a, b Opt[T]) Opt[T] {
	if a.Known {
		return a
	}
	return b
}

// whole is the share of the only request in w.
func whole(w *window) Share {
	s := Share{Phases: Phases{Some(w.Prefill), Some(w.Decode)}}
	if w.Computed.Known {
		s.Cached = Some(w.Prompt - w.Computed.Value)
	}
	return s
}

// guess is the share of f in w when who else finished in it is unknown. A stream's own observation is nearer to the truth
// than a window that may be another request's; what nobody observed is f's part of the window.
func (l *Ledger) guess(f *Finished, w *window) Share {
	if w.Requests == 1 && f.agrees(w.Decode) {
		s := whole(w)
		s.Estimated = true
		return s
	}
	s := Share{Phases: f.Observed, Estimated: true}
	if nothingCached(w) {
		s.Cached = Some(0)
	}
	if w.Requests > 1 {
		s.Prefill.Value = min(s.Prefill.Value, w.Prefill)
		s.Decode.Value = min(s.Decode.Value, w.Decode)
	}
	s.Phases = l.fill(f, w, s)
	return s
}

// fill returns the phases of share, and of those that are unknown f's part of w: its prefill takes its part of theirs, and
// each of its tokens as long as the others'. What was not observed is bounded by the time that f took.
func (l *Ledger) fill(f *Finished, w *window, share Share) Phases {
	p := share.Phases
	if f.Observed.Prefill.Known && f.Observed.Decode.Known {
		return p
	}
	if !p.Prefill.Known {
		p.Prefill = Some(l.prefillPart(f, w, share))
	}
	if tokens := w.Generation - w.Requests; !p.Decode.Known && tokens > 0 {
		p.Decode = Some(min(w.Decode, time.Duration(float64(w.Decode)*float64(max(0, f.Completion-1))/float64(tokens))))
	}
	took, both := f.Seen.Sub(f.Sent), p.Prefill.Value+p.Decode.Value
	switch {
	case both <= took:
	case f.Observed.Decode.Known:
		p.Prefill.Value -= both - took
	default:
		for _, d := range []*time.Duration{&p.Prefill.Value, &p.Decode.Value} {
			*d = time.Duration(float64(*d) * float64(took) / float64(both))
		}
	}
	return Plausible(f.Usage, p)
}

// prefillBase is how many tokens' time a prefill takes besides that of its own tokens, as long as it is not
// learnt how they grow.
const prefillBase = 100

// prefillPart divides the prefills of w between f and the others, of whom only the sum of their tokens is known.
func (l *Ledger) prefillPart(f *Finished, w *window, share Share) time.Duration {
	own, rest := f.computed(share), float64(w.Prompt-f.Prompt)
	if w.Computed.Known {
		all := float64(w.Computed.Value)
		if !f.Cached.Known && !share.Cached.Known {
			own = all * float64(f.Prompt) / float64(w.Prompt)
		}
		own = min(own, all)
		rest = all - own
	}
	others := float64(w.Requests - 1)
	if others == 0 {
		return w.Prefill
	}
	expect := func(tokens float64) float64 { return tokens + prefillBase }
	if _, known := l.pace.slope(); known {
		expect = l.pace.prefill
	}
	mine := expect(own)
	return time.Duration(float64(w.Prefill) * mine / (mine + others*expect(rest/others)))
}

// agrees reports whether a decode time is about what was observed, if anything was.
func (f *Finished) agrees(decode time.Duration) bool {
	seen := f.Observed.Decode
	return !seen.Known || (seen.Value-decode).Abs() <= 10*time.Millisecond+seen.Value/20
}

// nothingCached reports whether no request in w took prompt tokens from the cache.
func nothingCached(w *window) bool {
	return w.Computed.Known && w.Computed.Value == w.Prompt
}

// nearest returns the window that f most likely finished in: among those of one request the one whose decode time is
// nearest to what was observed, else the newest.
func (f *Finished) nearest(ws []*window) *window {
	var best *window
	bestOff := math.Inf(1)
	for _, w := range ws {
		off := math.MaxFloat64
		if w.Requests == 1 && f.Observed.Decode.Known {
			off = math.Abs((w.Decode - f.Observed.Decode.Value).Seconds())
		}
		if off <= bestOff {
			best, bestOff = w, off
		}
	}
	return best
}

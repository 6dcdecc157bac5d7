package timings

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// stepsKept is over how many engine steps a request may be prefilled for its beginning to be found.
	stepsKept = 128
	// shortestStep is less than an engine step takes: events of a stream that are nearer were held back and came together.
	shortestStep = 500 * time.Microsecond
	// lateFraction is which part of a step it may be over in the engine before its events come.
	lateFraction = 4
	// prefillsMost is how many beginnings of a prefill are considered.
	prefillsMost = 3
)

// Steps are the engine steps, as the events of all streams together show them: each step gives every running request its
// next token, so a step has begun to arrive when a stream gets an event that already had one of the step before. It is safe
// for concurrent use. The zero value is ready.
//
// A request waits for the end of the step that is being made before it is scheduled, a time that is in neither its queue
// nor its prefill time but in what is observed of it: as long as the prefill itself where that takes one step. The events
// that others get meanwhile tell it.
type Steps struct {
	n     atomic.Uint64 // of the step whose events are arriving; changes with mu held
	mu    sync.Mutex
	began [stepsKept]time.Time
}

// Tick notes an event with a stream's next token. last is what the stream's Tick before returned, 0 for its first.
func (s *Steps) Tick(now time.Time, last uint64) uint64 {
	if n := s.n.Load(); last != n {
		return n // as for all but the first of a step
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.n.Load()
	if last == n && now.Sub(s.began[last%stepsKept]) > shortestStep {
		n++
		s.began[n%stepsKept] = now
		s.n.Store(n)
	}
	return n
}

// Prefills returns how long the prefill of a stream may have taken, the most likely first: from the end of a step, most
// often the first that came after the headers, to the first token. It is best asked a step later. There is always one.
func (s *Steps) Prefills(headers, first time.Time) []time.Duration {
	s.mu.Lock()
	before, between, after := s.around(headers, first)
	s.mu.Unlock()
	end := first
	if n := len(between); n > 1 && after.IsZero() || n > 0 && first.Sub(between[n-1]) < after.Sub(first) {
		end = between[n-1] // others got their events of the same step a little earlier
		between = between[:n-1]
	}
	out := make([]time.Duration, 0, prefillsMost)
	for _, t := range between[:min(len(between), prefillsMost-1)] {
		out = append(out, end.Sub(t))
	}
	if len(out) > 1 && !before.IsZero() && between[0].Sub(headers) < between[0].Sub(before)/lateFraction {
		out[0], out[1] = out[1], out[0] // it was over in the engine before the request was there
	}
	return append(out, first.Sub(headers))
}

// around returns when the steps between two times began to arrive, the last one before and the first one after. It
// returns none where that is too long ago.
func (s *Steps) around(from, to time.Time) (before time.Time, between []time.Time, after time.Time) {
	n := s.n.Load()
	for i := n; i > 0; i-- {
		t := s.began[i%stepsKept]
		switch {
		case i+stepsKept <= n:
			return time.Time{}, nil, time.Time{}
		case t.After(to):
			after = t
		case t.After(from):
			between = append(between, t)
		default:
			slices.Reverse(between)
			return t, between, after
		}
	}
	slices.Reverse(between)
	return before, between, after
}

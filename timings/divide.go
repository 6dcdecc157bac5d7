package timings

import (
	"cmp"
	"time"
)

// divide shares out w among all the requests that finished in it.
//
// The sums are the engine's; how they divide is estimated. A stream's decode time is taken as it was observed, and the
// prefill sum is divided in proportion to the prefill times that the events let expect, or for answers that came whole
// those that others with as many tokens took. Where one request has no observation it gets the rest of the decode time.
// Where several have none, each gets what its prefill leaves of the time that it took, less the time outside of both
// phases: the wait for a step, the way to vLLM and back. That is about the same for all, and its sum is known. What
// stays unknown so is filled.
func (l *Ledger) divide(w *window, group []*Finished) {
	shares := make([]Share, len(group))
	for i := range shares {
		shares[i].Estimated = true
		if nothingCached(w) {
			shares[i].Cached = Some(0)
		}
	}
	l.cachedRest(w, group, shares)
	prefill := l.dividePrefill(w.Prefill, group, shares)
	decode := divideDecode(w.Decode, group, prefill)
	for i, f := range group {
		shares[i].Phases = Phases{Some(prefill[i]), decode[i]}
		shares[i].Phases = l.fill(f, w, shares[i])
		l.give(f, w, shares[i])
	}
}

// cachedRest gives the cached tokens of the one request whose usage does not tell them.
func (l *Ledger) cachedRest(w *window, group []*Finished, shares []Share) {
	if !w.Computed.Known {
		return
	}
	rest, unknown := w.Prompt-w.Computed.Value, -1
	for i, f := range group {
		switch {
		case f.Cached.Known:
			rest -= f.Cached.Value
		case unknown >= 0:
			return
		default:
			unknown = i
		}
	}
	if unknown >= 0 && rest >= 0 && rest <= group[unknown].Prompt {
		shares[unknown].Cached = Some(rest)
	}
}

// dividePrefill divides the sum in proportion to what each request's prefill is expected to be.
func (l *Ledger) dividePrefill(sum time.Duration, group []*Finished, shares []Share) []time.Duration {
	expected := make([]float64, len(group))
	total, whole := 0.0, 0.0
	for i, d := range choose(sum, group) {
		if expected[i] = d.Seconds(); d == 0 {
			whole += cmp.Or(l.pace.prefill(group[i].computed(shares[i])), 1)
		}
		total += expected[i]
	}
	// What the streams leave is for the answers that came whole, if that is about what is to be expected of them.
	scale := 1.0
	if rest := sum.Seconds() - total; whole > 0 && total > 0 {
		scale = rest / whole
		if l.pace.n > 0 {
			scale = min(max(scale, 0.5), 2)
		}
		scale = max(scale, 0.1*total/whole)
	}
	for i := range group {
		if expected[i] == 0 {
			expected[i] = scale * cmp.Or(l.pace.prefill(group[i].computed(shares[i])), 1)
			total += expected[i]
		}
	}
	out := make([]time.Duration, len(group))
	for i := range out {
		out[i] = time.Duration(float64(sum) * expected[i] / total)
	}
	return out
}

// choose returns for each stream one of the prefill times that it may have had: those that come nearest to the sum, if that
// is much nearer than the most likely ones. An answer that came whole has 0.
func choose(sum time.Duration, group []*Finished) []time.Duration {
	chosen := make([]time.Duration, len(group))
	var total time.Duration
	all := true
	for i, f := range group {
		if f.Observed.Prefill.Known {
			chosen[i] = f.Observed.Prefill.Value
		}
		all = all && chosen[i] > 0
		total += chosen[i]
	}
	if !all {
		return chosen // of the others nothing is known that well
	}
	// One after the other, as long as it helps: all combinations of many would be too many.
	for {
		best, who := (total-sum).Abs()-sum/10, -1
		var to time.Duration
		for i, f := range group {
			for _, d := range f.Prefills {
				if off := (total - chosen[i] + d - sum).Abs(); off < best {
					best, who, to = off, i, d
				}
			}
		}
		if who < 0 {
			return chosen
		}
		total += to - chosen[who]
		chosen[who] = to
	}
}

// divideDecode gives streams what was observed, corrected by the sum where there are only streams, and the others the
// rest: what each one's prefill leaves of the time that it took, less the time outside of both phases. Where that cannot be
// about the same for all, as one waited long, they get the rest in proportion to their tokens. What the rest leaves no
// plausible time for is unknown.
func divideDecode(sum time.Duration, group []*Finished, prefill []time.Duration) []Opt[time.Duration] {
	out := make([]Opt[time.Duration], len(group))
	rest, steps := sum, 0
	var whole []int          // who came whole
	var before time.Duration // all that was not decode, of those
	for i, f := range group {
		if f.Observed.Decode.Known {
			out[i] = f.Observed.Decode
			rest -= f.Observed.Decode.Value
			continue
		}
		whole = append(whole, i)
		steps += f.Completion - 1 // it has more than one token: see Plausible
		before += f.Seen.Sub(f.Sent) - prefill[i]
	}
	if len(whole) == 0 {
		spread(rest, group, out)
		return out
	}
	try := func(i int, d time.Duration) bool {
		f := group[i]
		if out[i] = (Opt[time.Duration]{}); d <= rest && d <= f.Seen.Sub(f.Sent) {
			out[i] = Plausible(f.Usage, Phases{Decode: Some(d)}).Decode
		}
		return out[i].Known
	}
	if n := time.Duration(len(whole)); n > 1 {
		outside := (before - rest) / n
		same := outside >= -slack/2 && outside <= slack/2+rest/(2*n)
		for _, i := range whole {
			same = same && try(i, group[i].Seen.Sub(group[i].Sent)-prefill[i]-outside)
		}
		if same {
			return out
		}
	}
	for _, i := range whole {
		try(i, time.Duration(float64(rest)*float64(group[i].Completion-1)/float64(steps)))
	}
	return out
}

// spread divides by how much the observed decode times of streams miss their sum. Their events come late by about as much,
// whether they decode long or not.
func spread(rest time.Duration, group []*Finished, decode []Opt[time.Duration]) {
	n := 0
	for _, f := range group {
		if f.Completion > 1 {
			n++
		}
	}
	for i, f := range group {
		if f.Completion > 1 {
			decode[i].Value = max(0, decode[i].Value+rest/time.Duration(n))
		}
	}
}

// progress returns what the counters of Progress moved while f, and nothing else of this process, was with vLLM. It is
// false where no reading was made since shortly before f, or a request of another client finished meanwhile.
func (l *Ledger) progress(f *Finished) (Progress, bool) {
	if !f.Alone || len(l.history) == 0 {
		return Progress{}, false
	}
	last := l.history[len(l.history)-1]
	for i := len(l.history) - 1; i >= 0; i-- {
		before := &l.history[i]
		if before.Ended.After(f.Sent) {
			continue
		}
		var moved []Progress
		requests := 0
		for _, s := range last.Series {
			b, ok := before.series(s.Key)
			if !ok {
				return Progress{}, false
			}
			requests += s.Requests - b.Requests
			if p := s.Progress.minus(b.Progress); p.any() {
				moved = append(moved, p)
			}
		}
		if requests != 1 || len(moved) != 1 {
			return Progress{}, false
		}
		return moved[0], true
	}
	return Progress{}, false
}

// cachedWhileAlone returns f's cached tokens from the prefix cache counters, for a vLLM that does not count computed
// tokens. Nobody else may have been scheduled meanwhile: the tokens looked up must be f's prompt.
func (l *Ledger) cachedWhileAlone(f *Finished) Opt[int] {
	p, ok := l.progress(f)
	if !ok || !p.CacheQueries.Known || p.CacheQueries.Value != f.Prompt {
		return Opt[int]{}
	}
	return p.CacheHits
}

// draft returns f's draft tokens, if nobody else generated tokens while it ran.
func (l *Ledger) draft(f *Finished) Opt[Draft] {
	p, ok := l.progress(f)
	if !ok || !p.Generated.Known || p.Generated.Value != f.Completion || !p.Drafted.Known || !p.Accepted.Known {
		return Opt[Draft]{}
	}
	return Some(Draft{Proposed: p.Drafted.Value, Accepted: p.Accepted.Value})
}

func (p Progress) minus(o Progress) Progress {
	sub := func(a, b Opt[int]) Opt[int] { return Opt[int]{a.Value - b.Value, a.Known && b.Known} }
	return Progress{
		CacheQueries: sub(p.CacheQueries, o.CacheQueries),
		CacheHits:    sub(p.CacheHits, o.CacheHits),
		Generated:    sub(p.Generated, o.Generated),
		Drafted:      sub(p.Drafted, o.Drafted),
		Accepted:     sub(p.Accepted, o.Accepted),
	}
}

func (p Progress) any() bool {
	return p.CacheQueries.Value != 0 || p.Generated.Value != 0 || p.Drafted.Value != 0
}

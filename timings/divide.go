package timings

import "time"

// divide shares out what is left in w among all the requests that finished in it.
//
// The sums are the engine's; how they divide is estimated. A stream's decode time is taken as it was observed, and the
// prefill sum is divided in proportion to the observed prefill times. Where one request has no observation it gets the
// rest. Where several have none (answers that came whole), their decode times are taken in proportion to their tokens,
// as requests that end in one engine step have been decoded in the same steps, and the prefill sum in proportion to what
// that leaves of the time each took, if that comes to about the sum.
func (l *Ledger) divide(w *window, group []*Finished) {
	shares := make([]Share, len(group))
	for i := range shares {
		shares[i].Estimated = true
		if nothingCached(w) {
			shares[i].Cached = Some(0)
		}
	}
	l.cachedRest(w, group, shares)
	if !w.unsure {
		decode := divideDecode(w.left.Decode, group)
		prefill := dividePrefill(w.left, group, decode)
		for i := range group {
			shares[i].Phases = Phases{prefill[i], decode[i]}
		}
	} else {
		for i, f := range group {
			shares[i].Phases = f.Observed
		}
	}
	for i, f := range group {
		l.give(f, w, shares[i])
	}
}

// cachedRest gives the cached tokens of the one request whose usage does not tell them.
func (l *Ledger) cachedRest(w *window, group []*Finished, shares []Share) {
	if !w.left.Computed.Known {
		return
	}
	rest, unknown := w.left.Prompt-w.left.Computed.Value, -1
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

func divideDecode(sum time.Duration, group []*Finished) []Opt[time.Duration] {
	out := make([]Opt[time.Duration], len(group))
	rest, steps, without := sum, 0, 0
	for i, f := range group {
		if f.Observed.Decode.Known {
			out[i] = f.Observed.Decode
			rest -= f.Observed.Decode.Value
			continue
		}
		without++
		steps += max(0, f.Completion-1)
	}
	if without == 0 || rest < 0 {
		return out
	}
	for i, f := range group {
		switch {
		case out[i].Known:
		case steps == 0:
			out[i] = Some(time.Duration(0))
		default:
			d := time.Duration(float64(rest) * float64(max(0, f.Completion-1)) / float64(steps))
			if d <= f.Seen.Sub(f.Sent) {
				out[i] = Some(d)
			}
		}
	}
	return out
}

func dividePrefill(left Totals, group []*Finished, decode []Opt[time.Duration]) []Opt[time.Duration] {
	weights := make([]time.Duration, len(group))
	var sum time.Duration
	observed := 0
	for i, f := range group {
		switch {
		case f.Observed.Prefill.Known:
			weights[i] = f.Observed.Prefill.Value
			observed++
		case decode[i].Known:
			weights[i] = max(0, f.Seen.Sub(f.Sent)-decode[i].Value)
		default:
			return make([]Opt[time.Duration], len(group)) // nothing bounds it
		}
		sum += weights[i]
	}
	out := make([]Opt[time.Duration], len(group))
	if sum <= 0 {
		return out
	}
	// Answers that came whole took time outside of the engine's phases too. Where that is much, or their decode times
	// are wrong, proportions say nothing.
	bounded := observed == len(group) || sum <= 2*left.Prefill+left.Queue+slack/2
	for i := range group {
		if bounded {
			out[i] = Some(time.Duration(float64(left.Prefill) * float64(weights[i]) / float64(sum)))
		} else if group[i].Observed.Prefill.Known {
			out[i] = group[i].Observed.Prefill
		}
	}
	return out
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

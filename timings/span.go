package timings

import "slices"

// Span returns the sums of all that finished since f was sent, if that was as many requests as f says it took, with just
// its tokens. It is for an answer that several engine requests made, or that came earlier, so that there is no moment
// at which it was recorded.
func (l *Ledger) Span(f *Finished, requests int) (Share, bool) {
	// The baseline is the last reading before f was sent, or the first after it, which is made beside sending it: unless f,
	// or a part of it, may have finished by then, and another request with as many tokens stand for it.
	first := slices.IndexFunc(l.history, func(r Reading) bool { return r.Ended.After(f.Sent) })
	if first < 1 {
		return Share{}, false
	}
	last := len(l.history) - 1
	for _, i := range []int{first - 1, first} {
		if between, ok := l.between(first-1, i); !ok || between.mayHold(f, requests) {
			continue
		}
		sum, ok := l.between(i, last)
		if !ok || sum.Requests != requests || sum.Prompt != f.Prompt || sum.Generation != f.Completion {
			continue
		}
		s := Share{Phases: Phases{Some(sum.Prefill), Some(sum.Decode)}, Requests: requests}
		if sum.Computed.Known {
			s.Cached = Some(sum.Prompt - sum.Computed.Value)
		}
		return s, true
	}
	return Share{}, false
}

// mayHold reports whether f may be among the requests that t is the sum of.
func (t Totals) mayHold(f *Finished, requests int) bool {
	others := t.Requests - requests
	switch {
	case requests > 1:
		return t.Requests > 0 // any may be one of f's
	case others == 0:
		return t.Prompt == f.Prompt && t.Generation == f.Completion
	}
	return others > 0 && t.Prompt-f.Prompt >= others && t.Generation >= f.Completion
}

// between returns what finished in all series between two readings of the history.
func (l *Ledger) between(from, to int) (sum Totals, ok bool) {
	before, last := &l.history[from], &l.history[to]
	for j, s := range last.Series {
		b, known := before.series(s.Key)
		if !known || s.Torn || b.Torn {
			return Totals{}, false
		}
		if d := s.Totals.minus(b.Totals); j == 0 {
			sum = d
		} else {
			sum = sum.plus(d)
		}
	}
	return sum, true
}

func (t Totals) plus(o Totals) Totals {
	t.Requests += o.Requests
	t.Prompt += o.Prompt
	t.Generation += o.Generation
	t.Computed = Opt[int]{t.Computed.Value + o.Computed.Value, t.Computed.Known && o.Computed.Known}
	t.Prefill += o.Prefill
	t.Decode += o.Decode
	t.Queue += o.Queue
	return t
}

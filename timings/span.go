package timings

import "slices"

// Span returns the sums of all that finished since f was sent, if that was as many requests as f says it took, with just
// its tokens. It is for an answer that several engine requests made, or that came earlier, so that there is no moment
// at which it was recorded.
func (l *Ledger) Span(f *Finished, requests int) (Share, bool) {
	// The baseline is the last reading before f was sent, or the first after it, which is made beside sending it.
	first := slices.IndexFunc(l.history, func(r Reading) bool { return r.Ended.After(f.Sent) })
	for _, i := range []int{first - 1, first} {
		if i < 0 {
			continue
		}
		sum, ok := l.since(i)
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

// since returns what finished in all series since reading i of the history.
func (l *Ledger) since(i int) (sum Totals, ok bool) {
	before, last := &l.history[i], &l.history[len(l.history)-1]
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

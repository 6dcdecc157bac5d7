package timings

import "time"

// pace is what the engine takes for a request, as it was for those that were alone in their windows, the later ones having
// more weight: for a prefill a line through its times by the number of tokens that were computed, and for an answer that
// came whole the time outside of both phases.
type pace struct {
	n, x, y, xx, xy float64
	whole, outside  float64
}

// paceKeeps is the weight that a request keeps when the next one comes.
const paceKeeps = 0.97

func (p *pace) learn(f *Finished, share Share) {
	x, y := f.computed(share), share.Prefill.Value.Seconds()
	for sum, add := range map[*float64]float64{&p.n: 1, &p.x: x, &p.y: y, &p.xx: x * x, &p.xy: x * y} {
		*sum = *sum*paceKeeps + add
	}
	if !f.Observed.Decode.Known {
		p.whole = p.whole*paceKeeps + 1
		p.outside = p.outside*paceKeeps + (f.Seen.Sub(f.Sent) - share.Prefill.Value - share.Decode.Value).Seconds()
	}
}

// computed returns how many prompt tokens of f were computed, as far as it or its share tells.
func (f *Finished) computed(share Share) float64 {
	u := Figures{Usage: f.Usage}
	u.Cached = firstKnown(f.Cached, share.Cached)
	return float64(u.Computed())
}

// prefill returns what is to be expected for so many tokens, in seconds, 0 before anything was learnt.
func (p *pace) prefill(tokens float64) float64 {
	if p.n == 0 {
		return 0
	}
	mean := p.y / p.n
	slope := 0.0
	if d := p.n*p.xx - p.x*p.x; d > 1e-9*p.n*p.xx {
		slope = max(0, (p.n*p.xy-p.x*p.y)/d)
	}
	// A line may come out below zero for few tokens.
	return max(mean/4, mean+slope*(tokens-p.x/p.n))
}

// phases returns what is to be expected of an answer that came whole, from the time that it took.
func (p *pace) phases(f *Finished, share Share) Phases {
	prefill := p.prefill(f.computed(share))
	if prefill == 0 || p.whole == 0 {
		return Phases{}
	}
	decode := f.Seen.Sub(f.Sent).Seconds() - prefill - p.outside/p.whole
	if decode <= 0 {
		return Phases{}
	}
	span := func(s float64) Opt[time.Duration] { return Some(time.Duration(s * float64(time.Second))) }
	return Phases{span(prefill), span(decode)}
}

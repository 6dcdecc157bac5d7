package timings

// pace is how long the engine's prefills take, as they did for requests that were alone in their windows, the later ones
// having more weight: a line through their times by the number of tokens that were computed.
type pace struct {
	n, x, y, xx, xy float64
}

const (
	// paceKeeps is the weight that a request keeps when the next one comes.
	paceKeeps = 0.97
	// minSpread is how much the numbers of tokens must differ for a slope to be told from noise: by 10 %.
	minSpread = 0.01
)

func (p *pace) learn(f *Finished, share Share) {
	x, y := f.computed(share), share.Prefill.Value.Seconds()
	for sum, add := range map[*float64]float64{&p.n: 1, &p.x: x, &p.y: y, &p.xx: x * x, &p.xy: x * y} {
		*sum = *sum*paceKeeps + add
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
	if d := p.n*p.xx - p.x*p.x; d > minSpread*p.n*p.xx {
		slope = max(0, (p.n*p.xy-p.x*p.y)/d)
	}
	middle := p.x / p.n
	// A line may come out below zero for few tokens.
	return max(mean/4*min(1, (tokens+1)/(middle+1)), mean+slope*(tokens-middle))
}

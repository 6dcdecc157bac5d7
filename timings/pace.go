package timings

// pace is how long the engine's prefills take, as they did for requests that were alone in their windows, the later ones
// having more weight: a line through their times by the number of tokens that were computed.
type pace struct {
	n, x, y, xx, xy float64
}

const (
	// paceKeeps is the weight that a request keeps when the next one comes.
	paceKeeps = 0.97
	// minSpread is the variance of the numbers of tokens, relative to the mean of their squares, from which on a slope is
	// more than noise: a standard deviation of 10 %.
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

// slope returns how many seconds a token more takes, if that is known.
func (p *pace) slope() (perToken float64, known bool) {
	spread := p.n*p.xx - p.x*p.x
	if p.y <= 0 || spread <= minSpread*p.n*p.xx {
		return 0, false
	}
	return max(0, (p.n*p.xy-p.x*p.y)/spread), true
}

// prefill returns what is to be expected for so many tokens, in seconds, 0 before anything was learnt.
func (p *pace) prefill(tokens float64) float64 {
	if p.n == 0 {
		return 0
	}
	mean, middle := p.y/p.n, p.x/p.n
	perToken, _ := p.slope()
	// A line may come out below zero for few tokens.
	return max(mean/4*min(1, (tokens+1)/(middle+1)), mean+perToken*(tokens-middle))
}

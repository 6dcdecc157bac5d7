package proxy

import (
	"context"
	"time"
)

// AwaitUpstream waits until it is known what vLLM is, or ctx ends: where its metrics can be read, from then on the first
// answer gets exact timings.
func (p *Proxy) AwaitUpstream(ctx context.Context) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for p.upstream.hurry(); !p.upstream.isKnown(); {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// isKnown reports whether it is known what vLLM is and the first reading of its metrics was made, or tried.
func (u *upstream) isKnown() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.based
}

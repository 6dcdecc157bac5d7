package proxy

import (
	"context"
	"strings"
	"time"
)

// AwaitUpstream waits until it is known what vLLM is, or ctx ends: from then on the first answer gets exact timings.
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

// isKnown reports whether it was said what vLLM is, which comes after the first reading of its metrics.
func (u *upstream) isKnown() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.known && strings.HasPrefix(u.said, "found ")
}

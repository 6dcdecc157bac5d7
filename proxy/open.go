package proxy

import (
	"context"
	"sync"
)

// open counts what has not come to its end. The zero value is ready. It is safe for concurrent use.
type open struct {
	mu   sync.Mutex
	n    int
	none chan struct{} // closed when n gets 0; nil while nobody waits
}

func (o *open) add(n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n += n; o.n == 0 && o.none != nil {
		close(o.none)
		o.none = nil
	}
}

func (o *open) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.n
}

// wait waits until there is none, or ctx ends.
func (o *open) wait(ctx context.Context) error {
	o.mu.Lock()
	if o.n == 0 {
		o.mu.Unlock()
		return nil
	}
	if o.none == nil {
		o.none = make(chan struct{})
	}
	none := o.none
	o.mu.Unlock()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

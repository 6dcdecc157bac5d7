package metrics

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// ErrClosed is what waiters get from a [Coalescer] that was closed.
var ErrClosed = errors.New("metrics: the reader was closed")

// Defaults of [CoalescerOptions].
const (
	DefaultReadTimeout = time.Second
	DefaultCostFactor  = 5
)

// costMemory is over how many readings the cheapest one is looked for.
const costMemory = 16

// CoalescerOptions are optional; the zero value is good.
type CoalescerOptions struct {
	// Timeout bounds each reading. It is longer than any waiter's patience: a
	// reading whose waiters have all given up still tells that vLLM's metrics
	// work again. 0 means DefaultReadTimeout.
	Timeout time.Duration
	// CostFactor is how many times the cost of a reading lies between the
	// starts of two, so that readings take at most 1/CostFactor of vLLM's
	// event loop. The cost is the shortest of the last 16 durations: the
	// longer ones are vLLM's other work, which a reading waited for. The way
	// to a distant vLLM counts as cost too, so there it is read less often than
	// it need be. 0 means DefaultCostFactor (20 %), below 0 no pause.
	CostFactor float64
	// OnReading is called once for every reading that was made, one at a time,
	// in their order, before the waiters of that reading are released. It must
	// not call Next or Close.
	OnReading func(Reading, error)
}

// Coalescer shares readings of vLLM's metrics between the requests that finish
// at about the same time. It has no goroutine but the one of a reading under
// way. It is safe for concurrent use.
type Coalescer struct {
	read func(context.Context) (Reading, error)
	opts CoalescerOptions
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	running bool
	next    *flight     // not begun yet, nil when nobody waits for one
	timer   *time.Timer // of next, while it waits for the pause to end
	started time.Time   // start of the last reading
	costs   [costMemory]time.Duration
	ncosts  int // readings measured; the newest is at (ncosts-1) % costMemory
}

// flight is one reading, from the first waiter on.
type flight struct {
	waiters int           // guarded by Coalescer.mu
	done    chan struct{} // closed after reading and err were set
	reading Reading
	err     error
}

// NewCoalescer makes one; read is most often [Reader.Read].
func NewCoalescer(read func(context.Context) (Reading, error), opts CoalescerOptions) *Coalescer {
	if opts.Timeout == 0 {
		opts.Timeout = DefaultReadTimeout
	}
	if opts.CostFactor == 0 {
		opts.CostFactor = DefaultCostFactor
	}
	c := &Coalescer{read: read, opts: opts}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// Next gives a reading that began after the call. Callers that come while one
// is under way share the next one. When ctx ends first, its error is returned,
// and nobody else's reading suffers; one that nobody waits for any more is not
// begun.
func (c *Coalescer) Next(ctx context.Context) (Reading, error) {
	if err := ctx.Err(); err != nil {
		return Reading{}, err
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return Reading{}, ErrClosed
	}
	f := c.next
	if f == nil {
		f = &flight{done: make(chan struct{})}
		c.next = f
	}
	f.waiters++
	if !c.running && c.timer == nil {
		c.schedule()
	}
	c.mu.Unlock()

	select {
	case <-f.done:
		return f.reading, f.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f.waiters--
	if f.waiters == 0 && c.next == f {
		c.next = nil
		c.stopTimer()
	}
	select {
	case <-f.done: // both at once: the reading was not for nothing
		return f.reading, f.err
	default:
		return Reading{}, ctx.Err()
	}
}

// Close ends the reading under way, releases all waiters with an error, and
// returns when the goroutine of the reading has ended. Later calls of Next
// give ErrClosed.
func (c *Coalescer) Close() {
	c.mu.Lock()
	c.closed = true
	c.stopTimer()
	if f := c.next; f != nil {
		c.next = nil
		f.err = ErrClosed
		close(f.done)
	}
	c.mu.Unlock()
	c.stop()
	c.wg.Wait()
}

// schedule starts next, now or when the pause is over. c.mu is held, no
// reading is under way and no timer is set.
func (c *Coalescer) schedule() {
	pause := time.Until(c.started.Add(c.pause()))
	if c.started.IsZero() || pause <= 0 {
		c.start()
		return
	}
	var t *time.Timer
	t = time.AfterFunc(pause, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.timer == t { // else it was stopped too late to notice
			c.timer = nil
			c.start()
		}
	})
	c.timer = t
}

func (c *Coalescer) stopTimer() {
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
}

// pause is the least time between the starts of two readings.
func (c *Coalescer) pause() time.Duration {
	return time.Duration(max(0, c.opts.CostFactor) * float64(c.cost()))
}

// Cost is what a reading costs, as described at CostFactor; 0 before it is
// known. OnReading may call it.
func (c *Coalescer) Cost() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cost()
}

func (c *Coalescer) cost() time.Duration {
	n := min(c.ncosts, costMemory)
	if n == 0 {
		return 0
	}
	return slices.Min(c.costs[:n])
}

// start begins the reading for those who wait. c.mu is held.
func (c *Coalescer) start() {
	f := c.next
	c.next = nil
	c.running = true
	started := time.Now()
	c.started = started
	c.wg.Go(func() { c.run(f, started) })
}

func (c *Coalescer) run(f *flight, started time.Time) {
	ctx, cancel := context.WithTimeout(c.ctx, c.opts.Timeout)
	f.reading, f.err = c.read(ctx)
	took := time.Since(started)
	cancel()
	if c.opts.OnReading != nil {
		c.opts.OnReading(f.reading, f.err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	close(f.done)
	c.running = false
	if f.err == nil {
		c.costs[c.ncosts%costMemory] = took
		c.ncosts++
	} else {
		// Most often vLLM restarted, and what was cheap may be so no longer:
		// a filtered page may have become a whole one.
		c.ncosts = 0
	}
	if c.next != nil {
		c.schedule()
	}
}

package metrics

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fakeReader takes as long as it is told and numbers its readings by Count.
type fakeReader struct {
	mu     sync.Mutex
	took   time.Duration // of the readings that follow
	err    error
	hangs  bool // until the reading's context ends
	begun  []time.Time
	active int
	most   int // readings at one time
}

func (f *fakeReader) read(ctx context.Context) (Reading, error) {
	f.mu.Lock()
	began := time.Now()
	f.begun = append(f.begun, began)
	n := len(f.begun)
	took, err, hangs := f.took, f.err, f.hangs
	f.active++
	f.most = max(f.most, f.active)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.active--
		f.mu.Unlock()
	}()
	if hangs {
		<-ctx.Done()
		return Reading{}, ctx.Err()
	}
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return Reading{}, ctx.Err()
	}
	if err != nil {
		return Reading{}, err
	}
	return Reading{Began: began, Ended: time.Now(), Series: []Series{{Count: float64(n)}}}, nil
}

func (f *fakeReader) set(edit func(*fakeReader)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit(f)
}

func (f *fakeReader) starts() []time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.begun)
}

// result is what a call of Next gave.
type result struct {
	n   float64
	err error
}

// ask calls Next in a goroutine, which is waiting when ask returns.
func ask(ctx context.Context, c *Coalescer) <-chan result {
	ch := make(chan result, 1)
	go func() {
		r, err := c.Next(ctx)
		ch <- result{finished(r), err}
	}()
	synctest.Wait()
	return ch
}

func wantResult(t *testing.T, ch <-chan result, n float64, err error) {
	t.Helper()
	if got := <-ch; got.n != n || !errors.Is(got.err, err) {
		t.Errorf("reading %v, error %v; want %v, %v", got.n, got.err, n, err)
	}
}

const ms = time.Millisecond

func TestNextShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 10 * ms}
		c := NewCoalescer(f.read, CoalescerOptions{CostFactor: -1})
		defer c.Close()
		a := ask(t.Context(), c)
		time.Sleep(ms)
		b := ask(t.Context(), c) // during the first: needs the second
		time.Sleep(ms)
		d := ask(t.Context(), c) // shares it
		wantResult(t, a, 1, nil)
		time.Sleep(ms)
		e := ask(t.Context(), c) // during the second: needs the third
		wantResult(t, b, 2, nil)
		wantResult(t, d, 2, nil)
		wantResult(t, e, 3, nil)
		if n := len(f.starts()); n != 3 || f.most != 1 {
			t.Errorf("%d readings, %d at one time", n, f.most)
		}
	})
}

func TestOnReadingComesFirstAndInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: ms}
		var mu sync.Mutex
		var seen []float64
		c := NewCoalescer(f.read, CoalescerOptions{CostFactor: -1, OnReading: func(r Reading, err error) {
			time.Sleep(ms) // a waiter released too early would show
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, finished(r))
		}})
		defer c.Close()
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * ms)
				r, err := c.Next(t.Context())
				mu.Lock()
				defer mu.Unlock()
				if err != nil || !slices.Contains(seen, finished(r)) {
					t.Errorf("reading %v, %v was released before the callback: %v", finished(r), err, seen)
				}
			})
		}
		wg.Wait()
		for i, n := range seen {
			if n != float64(i+1) {
				t.Fatalf("order %v", seen)
			}
		}
		if len(seen) != len(f.starts()) {
			t.Errorf("%d callbacks, %d readings", len(seen), len(f.starts()))
		}
	})
}

func TestLeavingCallerHarmsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 10 * ms}
		c := NewCoalescer(f.read, CoalescerOptions{CostFactor: -1})
		defer c.Close()
		ctx, leave := context.WithCancel(t.Context())
		a, b := ask(ctx, c), ask(ctx, c)
		d := ask(t.Context(), c)
		leave()
		wantResult(t, a, 0, context.Canceled) // its reading goes on
		wantResult(t, b, 0, context.Canceled) // it shared the second with d
		wantResult(t, d, 2, nil)
		wantResult(t, ask(ctx, c), 0, context.Canceled)
		if n := len(f.starts()); n != 2 {
			t.Errorf("%d readings", n)
		}
	})
}

func TestReadingNobodyWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 10 * ms}
		callbacks := 0
		c := NewCoalescer(f.read, CoalescerOptions{OnReading: func(r Reading, err error) {
			if err != nil {
				t.Error(err)
			}
			callbacks++
		}})
		defer c.Close()
		// All leave a reading under way: it is made, and tells what it saw.
		ctx, leave := context.WithCancel(t.Context())
		a := ask(ctx, c)
		b := ask(ctx, c)
		leave()
		wantResult(t, a, 0, context.Canceled)
		wantResult(t, b, 0, context.Canceled)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := len(f.starts()); n != 1 || callbacks != 1 {
			t.Errorf("%d readings, %d callbacks", n, callbacks)
		}
		// All leave during the pause: no reading.
		wantResult(t, ask(t.Context(), c), 2, nil)
		ctx, leave = context.WithTimeout(t.Context(), 5*ms)
		defer leave()
		wantResult(t, ask(ctx, c), 0, context.DeadlineExceeded)
		time.Sleep(time.Second)
		if n := len(f.starts()); n != 2 {
			t.Errorf("%d readings", n)
		}
		wantResult(t, ask(t.Context(), c), 3, nil)
	})
}

func TestReadingTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{hangs: true}
		var errs []error
		c := NewCoalescer(f.read, CoalescerOptions{Timeout: 300 * ms, OnReading: func(_ Reading, err error) { errs = append(errs, err) }})
		defer c.Close()
		began := time.Now()
		a := ask(t.Context(), c)
		b := ask(t.Context(), c)
		wantResult(t, a, 0, context.DeadlineExceeded)
		if d := time.Since(began); d != 300*ms {
			t.Errorf("after %v", d)
		}
		synctest.Wait()
		f.set(func(f *fakeReader) { f.hangs = false })
		// b's reading began before that, and hangs too.
		wantResult(t, b, 0, context.DeadlineExceeded)
		wantResult(t, ask(t.Context(), c), 3, nil)
		if len(errs) != 3 || Result(errs[0]) != "timeout" || Result(errs[2]) != "ok" {
			t.Errorf("callbacks %v", errs)
		}
	})
}

// offsets are the starts relative to the first.
func offsets(starts []time.Time) []time.Duration {
	var out []time.Duration
	for _, s := range starts {
		out = append(out, s.Sub(starts[0]))
	}
	return out
}

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 10 * ms}
		c := NewCoalescer(f.read, CoalescerOptions{})
		defer c.Close()
		next := func() {
			t.Helper()
			if _, err := c.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for range 4 {
			next()
		}
		want := []time.Duration{0, 50 * ms, 100 * ms, 150 * ms}
		if got := offsets(f.starts()); !slices.Equal(got, want) {
			t.Errorf("starts %v, want %v", got, want)
		}
		// After a quiet time it starts at once.
		time.Sleep(time.Second)
		began := time.Now()
		next()
		if d := time.Since(began); d != 10*ms {
			t.Errorf("after a quiet time: %v", d)
		}
		// The cheapest of the last 16 counts: one slow reading changes nothing.
		time.Sleep(time.Second)
		f.set(func(f *fakeReader) { f.took = 40 * ms })
		next()
		began = time.Now()
		next()
		if d := time.Since(began); d != 50*ms { // 10 ms of pause are left
			t.Errorf("after a slow reading: %v", d)
		}
		for range costMemory {
			next()
		}
		began = time.Now()
		next()
		if d := time.Since(began); d != 200*ms {
			t.Errorf("after slow readings only: %v", d)
		}
		// An error forgets the costs.
		f.set(func(f *fakeReader) { f.err = errors.New("restarted") })
		if _, err := c.Next(t.Context()); err == nil {
			t.Error("no error")
		}
		f.set(func(f *fakeReader) { f.err = nil })
		began = time.Now()
		next()
		if d := time.Since(began); d != 40*ms {
			t.Errorf("after an error: %v", d)
		}
	})
}

func TestPauseIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 10 * ms}
		c := NewCoalescer(f.read, CoalescerOptions{CostFactor: 3})
		defer c.Close()
		wantResult(t, ask(t.Context(), c), 1, nil)
		var all []<-chan result
		for range 10 { // over 10 of the 20 ms of pause that are left
			all = append(all, ask(t.Context(), c))
			time.Sleep(ms)
		}
		for _, ch := range all {
			wantResult(t, ch, 2, nil)
		}
		if got := offsets(f.starts()); !slices.Equal(got, []time.Duration{0, 30 * ms}) {
			t.Errorf("starts %v", got)
		}
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// During a reading, with others that wait for the next.
		f := &fakeReader{hangs: true}
		c := NewCoalescer(f.read, CoalescerOptions{})
		a := ask(t.Context(), c)
		b := ask(t.Context(), c)
		c.Close()
		if f.active != 0 {
			t.Error("Close came back before the reading had ended")
		}
		wantResult(t, a, 0, context.Canceled)
		wantResult(t, b, 0, ErrClosed)
		wantResult(t, ask(t.Context(), c), 0, ErrClosed)
		c.Close()

		// During a pause.
		f = &fakeReader{took: 10 * ms}
		c = NewCoalescer(f.read, CoalescerOptions{})
		wantResult(t, ask(t.Context(), c), 1, nil)
		b = ask(t.Context(), c)
		c.Close()
		wantResult(t, b, 0, ErrClosed)
		time.Sleep(time.Second)
		if n := len(f.starts()); n != 1 {
			t.Errorf("%d readings", n)
		}
	})
}

// TestManyCallers checks what must hold for everyone, with callers that come
// and leave at random.
func TestManyCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeReader{took: 7 * ms}
		inCallback := 0
		c := NewCoalescer(f.read, CoalescerOptions{CostFactor: 2, OnReading: func(Reading, error) {
			if inCallback++; inCallback != 1 {
				t.Error("two callbacks at one time")
			}
			time.Sleep(ms)
			inCallback--
		}})
		rnd := rand.New(rand.NewPCG(1, 2))
		var wg sync.WaitGroup
		for range 64 {
			arrive, patience := time.Duration(rnd.IntN(200))*ms, time.Duration(1+rnd.IntN(40))*ms
			wg.Go(func() {
				for range 20 {
					time.Sleep(arrive)
					called := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					r, err := c.Next(ctx)
					cancel()
					switch {
					case err == nil && r.Began.Before(called):
						t.Errorf("the reading began %v before the call", called.Sub(r.Began))
					case err != nil && !errors.Is(err, context.DeadlineExceeded):
						t.Error(err)
					case time.Since(called) > patience:
						t.Errorf("%v instead of %v", time.Since(called), patience)
					}
				}
			})
		}
		wg.Wait()
		c.Close()
		if f.most != 1 {
			t.Errorf("%d readings at one time", f.most)
		}
		starts := f.starts()
		for i := range starts[1:] {
			if d := starts[i+1].Sub(starts[i]); d < 14*ms {
				t.Errorf("only %v between two readings", d)
			}
		}
	})
}

// finished tells the readings of these tests apart.
func finished(r Reading) (n float64) {
	for _, s := range r.Series {
		n += s.Count
	}
	return n
}

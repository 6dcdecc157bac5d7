package proxy

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/timings"
)

const (
	// pokeEvery bounds how often a vLLM whose metrics do not answer in time is asked whether they do again.
	pokeEvery = time.Second
	// fresh is how old a reading may be to serve as the baseline of a request that is sent now.
	fresh = 50 * time.Millisecond
	// besideStrangers is how often readings are made where other clients' requests finish too, so that few of them get into
	// one window with one of ours.
	besideStrangers = 100 * time.Millisecond
	// costBound is which part of the time those readings may take of vLLM's.
	costBound = 50
	// idle is how long after the last request of ours they end.
	idle = 5 * time.Second
	// patienceLost is after how many requests in a row that no window held answers are no longer kept for a second reading.
	patienceLost = 3
)

// windows finds requests in the windows between readings of vLLM's metrics. It is safe for concurrent use.
type windows struct {
	reader     *metrics.Reader
	readings   *metrics.Coalescer
	collectors *metrics.Collectors
	log        *slog.Logger
	patience   time.Duration // how long an answer may be kept for readings
	steps      timings.Steps
	restarted  func() // called when another process answers than before

	mu      sync.Mutex
	ledger  timings.Ledger
	last    time.Time   // of the last good reading
	used    time.Time   // when a request of ours was last sent or settled
	beat    *time.Timer // until the next reading beside strangers
	late    bool        // readings do not come in time: answers do not wait for them
	missed  int         // requests in a row that no window held
	off     bool        // several vLLMs behind one address
	poked   time.Time
	warned  bool
	closing bool
	tasks   sync.WaitGroup
}

func newWindows(reader *metrics.Reader, c *metrics.Collectors, log *slog.Logger, patience time.Duration, restarted func()) *windows {
	w := &windows{reader: reader, collectors: c, log: log, patience: patience, restarted: restarted}
	w.readings = metrics.NewCoalescer(reader.Read, metrics.CoalescerOptions{Timeout: max(time.Second, 2*patience), OnReading: w.onReading})
	return w
}

func (w *windows) close() {
	w.mu.Lock()
	w.closing = true
	if w.beat != nil {
		w.beat.Stop()
	}
	w.mu.Unlock()
	w.readings.Close()
	w.tasks.Wait()
}

// baseline makes a reading beside a request that is sent while nothing else is with vLLM, so that what other clients did
// before does not get into its window. Nobody waits for it.
func (w *windows) baseline() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = time.Now()
	if !w.off && !w.late && w.reader.Mode().Readable() && time.Since(w.last) > fresh {
		w.poke()
	}
}

// before makes a reading before a request is sent, so that whatever others did is surely not in its window. That takes the
// request a millisecond or two: it is for answers that have no figures of their own, from a vLLM whose other answers
// have, so that no readings are made for those.
func (w *windows) before(ctx context.Context) {
	if !w.ready() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	_, err := w.readings.Next(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.judge(err, 0, err == nil)
}

// poke makes a reading in the background; w.mu is held.
func (w *windows) poke() {
	if w.closing {
		return
	}
	w.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, _ = w.readings.Next(ctx) // onReading takes it
	})
}

// ready reports whether an answer may wait for a reading.
func (w *windows) ready() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.off || !w.reader.Mode().Readable() {
		return false
	}
	if w.late && time.Since(w.poked) > pokeEvery {
		w.poked = time.Now()
		w.poke()
	}
	return !w.late
}

// settle returns the share of a request that has just finished. It waits for a reading that begins now, and for more
// where that one came before vLLM had recorded the request, but no longer than patience.
func (w *windows) settle(ctx context.Context, f *timings.Finished) (timings.Share, bool) {
	if !w.ready() {
		return timings.Share{}, false
	}
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	w.mu.Lock()
	w.used = time.Now()
	if !w.ledger.Based() { // nothing to compare a reading with
		w.poke()
		w.mu.Unlock()
		return timings.Share{}, false
	}
	w.ledger.Add(f, cancel)
	w.mu.Unlock()
	pause := time.Millisecond
	for made := 0; ; made++ {
		_, err := w.readings.Next(ctx)
		w.mu.Lock()
		_, verdict := w.ledger.Look(f)
		again := err == nil && !w.off && (verdict == timings.Missing && w.missed < patienceLost || verdict == timings.Unclear && made == 0)
		if !again {
			share, ok := w.ledger.Settle(f)
			w.judge(err, made, ok)
			w.mu.Unlock()
			if ok {
				w.collectors.ObserveWindow(float64(share.Requests))
			}
			return share, ok
		}
		w.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause *= 2
	}
}

// span returns what vLLM did since f was sent, if that was f's requests and nothing else.
func (w *windows) span(ctx context.Context, f *timings.Finished, requests int) (timings.Share, bool) {
	if !w.ready() {
		return timings.Share{}, false
	}
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	_, err := w.readings.Next(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.judge(err, 0, false)
		return timings.Share{}, false
	}
	return w.ledger.Span(f, requests)
}

// judge keeps in mind whether waiting for readings is worth it; w.mu is held.
func (w *windows) judge(err error, made int, ok bool) {
	switch {
	case ok:
		w.missed = 0
	case errors.Is(err, context.Canceled): // the client left
	case made == 0 && err != nil: // no reading in time
		w.late = true
		w.warn("vLLM's metrics do not answer in time: answers no longer wait for them, and timings are estimated from the streams until they do", "error", err)
	default:
		w.missed++
	}
}

// warn logs once until things are well again; w.mu is held.
func (w *windows) warn(msg string, args ...any) {
	if !w.warned {
		w.warned = true
		w.log.Warn(msg, args...)
	}
}

// onReading takes every reading that was made, in order.
func (w *windows) onReading(r metrics.Reading, err error) {
	w.collectors.ObserveReading(r, err)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing {
		return
	}
	if err != nil {
		w.late = true
		var e *metrics.Error
		if errors.As(err, &e) && e.Kind != metrics.KindTransport {
			w.restarted() // it answers, but not as it did
		}
		w.warn("cannot read vLLM's metrics: timings are estimated from the streams until they can be read again", "error", err)
		return
	}
	if r.Duration() <= w.patience {
		if w.late && w.warned {
			w.log.Info("vLLM's metrics can be read again")
		}
		w.late, w.warned = false, false
	}
	w.last = r.Ended
	switch w.ledger.Observe(ledgerReading(r)) {
	case timings.Restarted:
		w.missed = 0
		w.restarted()
	case timings.Alternates:
		if w.off {
			break // a reading that was under way when that was found out
		}
		w.off = true
		w.log.Warn("several vLLM processes answer at the upstream address, so their /metrics tell nothing about single requests and are not read any more. " +
			"Put one vllm-timings before each vLLM, or start vLLM (0.25 or newer) with --enable-per-request-metrics")
	}
	w.next(r.Ended)
}

// next has another reading made soon if other clients' requests may spoil windows; w.mu is held.
func (w *windows) next(now time.Time) {
	if w.beat != nil || w.off || w.late || !w.ledger.Strangers(now) || time.Since(w.used) > idle {
		return
	}
	w.beat = time.AfterFunc(max(besideStrangers, costBound*w.readings.Cost()), func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.beat = nil
		w.poke()
	})
}

// ledgerReading gives a reading in the terms of the model.
func ledgerReading(r metrics.Reading) timings.Reading {
	out := timings.Reading{Began: r.Began, Ended: r.Ended, ProcessStart: r.ProcessStart, Series: make([]timings.Series, len(r.Series))}
	for i := range r.Series {
		s := &r.Series[i]
		out.Series[i] = timings.Series{
			Key: s.Key,
			Totals: timings.Totals{
				Requests:   int(s.Count),
				Prompt:     int(s.PromptTokens),
				Generation: int(s.GenerationTokens),
				Computed:   count(s.ComputedTokens, s.HasComputed),
				Prefill:    seconds(s.Prefill),
				Decode:     seconds(s.Decode),
				Queue:      seconds(s.Queue),
			},
			Progress: timings.Progress{
				CacheQueries: count(s.PrefixQueries, s.HasPrefixCache),
				CacheHits:    count(s.PrefixHits, s.HasPrefixCache),
				Generated:    count(s.Generated, s.HasGenerated),
				Drafted:      count(s.DraftTokens, s.HasDraft),
				Accepted:     count(s.AcceptedTokens, s.HasDraft),
			},
			Running: count(s.Running, s.HasRunning),
			Torn:    !s.Consistent,
		}
	}
	return out
}

func count(v float64, known bool) timings.Opt[int] {
	return timings.Opt[int]{Value: int(v), Known: known}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

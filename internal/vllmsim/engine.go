package vllmsim

import (
	"sync"
	"sync/atomic"
	"time"
)

// maxLead is how many tokens a streamed answer may be ahead of what its
// handler has written when steps have no pause. It keeps the engine's decode
// time and the time that a client observes the same.
const maxLead = 64

// How an engine request stands, for its handler.
const (
	stateActive int32 = iota
	stateFinished
	stateBroken // aborted by its client, by Restart or by Close
)

// group is what the choices of one prompt share.
type group struct {
	n         int
	remaining int // not yet finished
	longest   int // completion tokens
}

// request is one choice of one prompt, as the engine sees it.
type request struct {
	id        string
	prompt    *prompt
	group     *group
	index     int    // of the choice in the answer
	first     int    // word that the text begins with
	target    int    // tokens to generate
	maxTokens int    // as the client asked
	reason    string // finish_reason when target is reached

	wake      chan<- struct{} // of capacity 1; shared by an answer's choices
	streaming bool            // wake at each token, not only at the end
	late      bool            // histograms move by recordLater, not at the end

	produced atomic.Int64 // tokens generated
	consumed atomic.Int64 // tokens written by the handler; kept only without pause
	state    atomic.Int32 // set after the fields below have their last value

	arrival, queued, scheduled, firstToken, lastToken time.Time

	cached     int       // prompt tokens from the prefix cache
	created    int       // prompt tokens that were new to it, in whole blocks
	prefillEnd time.Time // when prefill is done, at the earliest
}

func (r *request) signal() {
	select {
	case r.wake <- struct{}{}:
	default: // one is pending already, it covers this one too
	}
}

func (r *request) record(aborted bool) Record {
	rec := Record{
		ID: r.id, PromptTokens: r.prompt.tokens, CachedTokens: r.cached,
		CompletionTokens: int(r.produced.Load()), Aborted: aborted,
	}
	if !r.scheduled.IsZero() {
		rec.Queue = r.scheduled.Sub(r.queued)
	}
	if !r.firstToken.IsZero() {
		rec.Prefill = r.firstToken.Sub(r.scheduled)
		rec.Decode = r.lastToken.Sub(r.firstToken)
	}
	return rec
}

// lateRecord is a finished request whose histograms have not moved yet.
type lateRecord struct {
	due time.Time
	req *request
}

// engine schedules requests and generates their tokens. One goroutine runs
// its loop; it sleeps until the next token is due, and without a timer when
// nothing runs.
type engine struct {
	cfg  *Config
	kick chan struct{} // of capacity 1: look again
	quit chan struct{}
	done chan struct{}

	mu         sync.Mutex
	closed     bool
	waiting    []*request
	prefilling []*request
	decoding   []*request
	late       []lateRecord
	nextStep   time.Time // end of the step in progress; counts while decoding is not empty
	cache      *prefixCache
	c          counters

	finished, aborted, broken int64
}

func newEngine(cfg *Config) *engine {
	e := &engine{
		cfg:   cfg,
		kick:  make(chan struct{}, 1),
		quit:  make(chan struct{}),
		done:  make(chan struct{}),
		cache: newPrefixCache(),
	}
	e.c.startTime = processStart(0)
	e.c.created = unixSeconds(time.Now())
	go e.loop()
	return e
}

// processStart is a start time in steps of 10 ms, as Linux has them, later
// than the previous one.
func processStart(previous float64) float64 {
	now := float64(time.Now().UnixMilli()/10) / 100
	if now <= previous {
		return previous + 0.01
	}
	return now
}

func unixSeconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

func (e *engine) nudge() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// submit hands requests to the engine. It reports false when it is closed.
func (e *engine) submit(reqs []*request) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	now := time.Now()
	for _, r := range reqs {
		r.queued = now
		e.waiting = append(e.waiting, r)
	}
	e.nudge()
	return true
}

// abort ends those of reqs that have not finished. byClient tells a client
// that left from everything else that ends an answer.
func (e *engine) abort(reqs []*request, byClient bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range reqs {
		if r.state.Load() != stateActive {
			continue
		}
		e.waiting = without(e.waiting, r)
		e.prefilling = without(e.prefilling, r)
		e.decoding = without(e.decoding, r)
		e.end(r, byClient)
	}
	e.nudge() // a place may be free
}

func (e *engine) end(r *request, byClient bool) {
	if byClient {
		e.aborted++
	} else {
		e.broken++
	}
	r.state.Store(stateBroken)
	r.signal()
	if e.cfg.OnEnd != nil {
		e.cfg.OnEnd(r.record(true))
	}
}

func without(list []*request, r *request) []*request {
	for i, other := range list {
		if other == r {
			return append(list[:i], list[i+1:]...)
		}
	}
	return list
}

// breakAll ends every request. The caller holds the lock.
func (e *engine) breakAll() {
	for _, list := range [][]*request{e.waiting, e.prefilling, e.decoding} {
		for _, r := range list {
			e.end(r, false)
		}
	}
	e.waiting, e.prefilling, e.decoding, e.late = nil, nil, nil, nil
}

// restart is a new process: no request, no cache, all counters at zero.
func (e *engine) restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.breakAll()
	e.cache = newPrefixCache()
	e.c = counters{startTime: processStart(e.c.startTime), created: unixSeconds(time.Now())}
}

func (e *engine) close() {
	e.mu.Lock()
	if !e.closed {
		e.closed = true
		e.breakAll()
		close(e.quit)
	}
	e.mu.Unlock()
	<-e.done
}

// recordLater moves the histograms for reqs after d.
func (e *engine) recordLater(reqs []*request, d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	due := time.Now().Add(d)
	for _, r := range reqs {
		e.late = append(e.late, lateRecord{due, r})
	}
	e.nudge()
}

// snapshot copies all counters at one instant.
func (e *engine) snapshot() counters {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.c
	c.running = float64(len(e.prefilling) + len(e.decoding))
	c.waiting = float64(len(e.waiting))
	return c
}

func (e *engine) loop() {
	defer close(e.done)
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	for {
		e.mu.Lock()
		next := e.advance(time.Now())
		e.mu.Unlock()

		var due <-chan time.Time
		if !next.IsZero() {
			wait := time.Until(next)
			if wait <= 0 {
				select {
				case <-e.quit:
					return
				default:
					continue
				}
			}
			timer.Reset(wait)
			due = timer.C
		}
		select {
		case <-due:
		case <-e.kick:
		case <-e.quit:
			return
		}
	}
}

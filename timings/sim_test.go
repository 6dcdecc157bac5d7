package timings

import (
	"container/heap"
	"hash/fnv"
	"math/rand/v2"
	"time"
)

// This file is a simulation of an engine, its metrics and the proxy's way of reading them, in virtual time. It knows the
// truth about every request, which the ledger has to find out.

// load is what is simulated.
type load struct {
	name           string
	clients        int     // of ours, each with one request at a time
	direct         int     // clients that do not come through us
	requests       int     // of ours, to the end
	min, max       int     // completion tokens
	same           bool    // all requests have the same shape
	whole          float64 // share of answers that are not streamed
	late           float64 // share of records made up to 50 ms after the event, whatever the load
	lateAbove      int     // with so many outputs in a step all its records may be late, as in vLLM
	running        bool    // readings tell how many requests run
	noComputed     bool    // vLLM before 0.16
	usageHasCached bool
	calm           bool // no starvation, 0..2 ms of jitter
	readMax        time.Duration
}

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type agenda []event

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].seq < a[j].seq
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(event)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// job is a request, with the truth about it.
type job struct {
	Finished
	ours, stream, again      bool
	prompt, completion       int
	cached, generated        int
	arrived, started, first  time.Duration
	prefill, decode, queued  time.Duration
	headers, firstAt, before time.Duration // when these events came to us
	lastAt                   time.Duration
	step                     uint64
	recorded                 time.Duration
	done                     func()
}

type sim struct {
	load
	rng     *rand.Rand
	now     time.Duration
	seq     int
	agenda  agenda
	waiting []*job // in the engine
	active  []*job
	busy    bool // a step is being made
	totals  Totals
	moving  Progress

	ledger   Ledger
	reading  bool
	last     time.Duration // when a reading ended
	readers  []*job        // of ours, that need a reading
	inFlight map[*job]bool
	baseline bool
	beating  bool
	steps    Steps
	sent     int
	settled  func(*job, Share, bool)
}

// fresh is how old a reading may be to be the baseline of a request, as in the proxy.
const fresh = 50 * time.Millisecond

// epoch is the virtual zero.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newSim(l load, settled func(*job, Share, bool)) *sim {
	if l.readMax == 0 {
		l.readMax = 10 * time.Millisecond
	}
	s := &sim{load: l, rng: rand.New(rand.NewPCG(1, seed(l.name))), inFlight: map[*job]bool{}, settled: settled}
	s.totals.Computed = Opt[int]{Known: !l.noComputed}
	s.moving = Progress{CacheQueries: Some(0), CacheHits: Some(0), Generated: Some(0)}
	return s
}

func (s *sim) run() {
	for range s.clients {
		s.client(true)
	}
	for range s.direct {
		s.client(false)
	}
	for s.agenda.Len() > 0 {
		e := heap.Pop(&s.agenda).(event)
		s.now = e.at
		e.do()
	}
}

func (s *sim) after(d time.Duration, do func()) {
	s.seq++
	heap.Push(&s.agenda, event{s.now + d, s.seq, do})
}

func (s *sim) between(a, b time.Duration) time.Duration {
	return a + time.Duration(s.rng.Int64N(int64(b-a)+1))
}

// delay is how long an event is on its way to us.
func (s *sim) delay() time.Duration {
	switch {
	case s.calm:
		return s.between(0, 2*time.Millisecond)
	case s.rng.IntN(100) == 0:
		return s.between(100*time.Millisecond, 150*time.Millisecond)
	default:
		return s.between(0, 20*time.Millisecond)
	}
}

// client sends one request after the other.
func (s *sim) client(ours bool) {
	s.after(s.between(0, 50*time.Millisecond), func() {
		if s.sent >= s.requests {
			return
		}
		j := &job{ours: ours, stream: s.rng.Float64() >= s.whole, prompt: 50, completion: s.min}
		if !s.same {
			j.prompt = 20 + s.rng.IntN(400)
			j.completion = s.min + s.rng.IntN(s.max-s.min+1)
		}
		if s.rng.IntN(2) == 0 {
			j.cached = j.prompt / 16 * 16 * s.rng.IntN(2)
		}
		j.done = func() { s.client(ours) }
		if ours {
			s.sent++
			if len(s.inFlight) == 0 && (s.last == 0 || s.now-s.last > fresh) {
				s.baseline = true
				s.read()
			}
			j.Alone = len(s.inFlight) == 0
			for other := range s.inFlight {
				other.Alone = false
			}
			s.inFlight[j] = true
		}
		j.Sent = epoch.Add(s.now)
		s.after(s.between(0, 3*time.Millisecond), func() {
			j.arrived = s.now
			j.headers = s.now + s.delay()
			s.waiting = append(s.waiting, j)
			s.step()
		})
	})
}

// step makes an engine step if there is something to do: all that wait are admitted, everyone gets one token.
func (s *sim) step() {
	if s.busy || len(s.waiting)+len(s.active) == 0 {
		return
	}
	s.busy = true
	took := 10*time.Millisecond + s.between(0, time.Millisecond)
	for _, j := range s.waiting {
		j.started = s.now
		took += time.Duration(j.prompt-j.cached) * 20 * time.Microsecond
		s.moving.CacheQueries.Value += j.prompt
		s.moving.CacheHits.Value += j.cached
	}
	s.active = append(s.active, s.waiting...)
	s.waiting = nil
	s.after(took, s.outputs)
}

func (s *sim) outputs() {
	outputs := len(s.active)
	var running []*job
	for _, j := range s.active {
		j.generated++
		s.moving.Generated.Value++
		if j.generated == 1 {
			j.first = s.now
			j.firstAt = max(j.headers, s.now+s.delay())
			j.before = j.headers
		}
		if j.generated == j.completion {
			s.finish(j, outputs)
			continue
		}
		if j.ours && j.stream && j.generated > 1 {
			j.lastAt = max(j.lastAt, j.firstAt, s.now+s.delay())
			s.after(j.lastAt-s.now, func() { s.tick(j) })
		}
		if j.generated == j.completion-1 {
			j.before = max(j.firstAt, j.lastAt, s.now+s.delay())
		}
		running = append(running, j)
	}
	s.active = running
	s.busy = false
	s.after(0, s.step)
}

func (s *sim) finish(j *job, outputs int) {
	j.prefill, j.decode, j.queued = j.first-j.started, s.now-j.first, j.started-j.arrived
	var late time.Duration
	if s.rng.Float64() < s.late || s.lateAbove > 0 && outputs > s.lateAbove {
		late = s.between(0, 50*time.Millisecond)
	}
	s.after(late, func() {
		j.recorded = s.now
		s.totals = Totals{
			s.totals.Requests + 1, s.totals.Prompt + j.prompt, s.totals.Generation + j.completion,
			Opt[int]{s.totals.Computed.Value + j.prompt - j.cached, s.totals.Computed.Known},
			s.totals.Prefill + j.prefill, s.totals.Decode + j.decode, s.totals.Queue + j.queued,
		}
	})
	seen := max(j.before, j.firstAt, s.now+s.delay())
	s.after(seen-s.now, func() { s.seen(j) })
}

// tick is where a token's event has come.
func (s *sim) tick(j *job) {
	j.possible(s)
	j.step = s.steps.Tick(epoch.Add(s.now), j.step)
}

func (j *job) possible(s *sim) {
	if j.Prefills == nil {
		j.Prefills = s.steps.Prefills(epoch.Add(j.headers), epoch.Add(j.firstAt))
	}
}

// seen is where the proxy has an answer's final event.
func (s *sim) seen(j *job) {
	if !j.ours {
		j.done()
		return
	}
	delete(s.inFlight, j)
	j.Usage = Usage{Prompt: j.prompt, Completion: j.completion}
	if s.usageHasCached {
		j.Cached = Some(j.cached)
	}
	j.NotBefore, j.Seen = j.Sent, epoch.Add(s.now)
	j.Observed = Plausible(j.Usage, Phases{})
	if j.stream {
		j.NotBefore = epoch.Add(j.before)
		j.possible(s)
		j.Observed = Plausible(j.Usage, Phases{Some(j.Prefills[0]), Some(s.now - j.firstAt)})
	}
	s.ledger.Add(&j.Finished, nil)
	s.readers = append(s.readers, j)
	s.read()
}

// read makes a reading for all that need one; who comes while it is made needs the next.
func (s *sim) read() {
	if s.reading || len(s.readers) == 0 && !s.baseline {
		return
	}
	s.reading, s.baseline = true, false
	readers := s.readers
	s.readers = nil
	r := Reading{Began: epoch.Add(s.now), ProcessStart: 1}
	took := s.between(time.Millisecond, s.readMax)
	s.after(s.between(0, took), func() {
		r.Series = []Series{{Key: "0", Totals: s.totals, Progress: s.moving}}
		if s.running {
			r.Series[0].Running = Some(len(s.active) + len(s.waiting))
		}
	})
	s.after(took, func() {
		r.Ended, s.last = epoch.Add(s.now), s.now
		s.ledger.Observe(r)
		s.reading = false
		s.beat(r.Ended)
		for _, j := range readers {
			s.look(j)
		}
		s.read()
	})
}

// beat has another reading made soon where other clients are.
func (s *sim) beat(now time.Time) {
	if s.beating || !s.ledger.Strangers(now) || s.sent >= s.requests && len(s.inFlight) == 0 {
		return
	}
	s.beating = true
	s.after(100*time.Millisecond, func() {
		s.beating, s.baseline = false, true
		s.read()
	})
}

func (s *sim) look(j *job) {
	_, v := s.ledger.Look(&j.Finished)
	old := epoch.Add(s.now).Sub(j.Seen)
	if v == Missing && old < 250*time.Millisecond || v == Unclear && !j.again {
		j.again = v == Unclear
		s.readers = append(s.readers, j)
		return
	}
	share, ok := s.ledger.Settle(&j.Finished)
	s.settled(j, share, ok)
	j.done()
}

func seed(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

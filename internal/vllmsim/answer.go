package vllmsim

import (
	"context"
	"net/http"
	"strconv"
	"time"
)

// completion answers a completion request.
func (s *Sim) completion(w http.ResponseWriter, r *http.Request, k kind) {
	arrival := time.Now()
	faults := s.Faults()
	c, err := s.readCall(r, k)
	if err != nil {
		s.rejected.Add(1)
		s.writeError(w, err)
		return
	}
	if !s.pause(r.Context(), faults.HeaderDelay) {
		panic(http.ErrAbortHandler)
	}
	s.requests.Add(1)

	wake := make(chan struct{}, 1)
	a := &answer{
		sim: s, w: w, c: c, faults: faults, wake: wake,
		reqs: s.engineRequests(c, arrival, wake, faults.EarlyMetrics > 0),
	}
	if c.stream {
		// vLLM sends the headers just before it hands the request on.
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		a.flush()
		if faults.DieAfterEvents < 0 {
			panic(http.ErrAbortHandler)
		}
	}
	if !s.engine.submit(a.reqs) {
		panic(http.ErrAbortHandler)
	}
	// A handler that ends early, whatever the cause, takes its requests along.
	defer s.engine.abort(a.reqs, false)
	defer context.AfterFunc(r.Context(), func() { s.engine.abort(a.reqs, true) })()
	if c.stream {
		a.stream()
	} else {
		a.json()
	}
	if faults.EarlyMetrics > 0 {
		a.flush() // net/http holds a short body back until the handler ends
		s.engine.recordLater(a.reqs, faults.EarlyMetrics)
	}
}

// engineRequests makes a request for every choice of every prompt.
func (s *Sim) engineRequests(c *call, arrival time.Time, wake chan<- struct{}, late bool) []*request {
	var reqs []*request
	for i := range c.prompts {
		p := &c.prompts[i]
		g := &group{n: c.n, remaining: c.n}
		maxTokens := c.maxTokens
		if maxTokens == 0 {
			maxTokens = s.cfg.MaxModelLen - p.tokens
		}
		target, reason := maxTokens, "length"
		if natural := naturalLength(p.seed); !c.ignoreEOS && natural <= maxTokens {
			target, reason = natural, "stop"
		}
		for j := range c.n {
			reqs = append(reqs, &request{
				id: c.id, prompt: p, group: g, index: i*c.n + j,
				first: firstWord(p.seed, j), target: target, maxTokens: maxTokens, reason: reason,
				wake: wake, streaming: c.stream, late: late, arrival: arrival,
			})
		}
	}
	return reqs
}

// answer is one HTTP answer in the making. Its handler's goroutine owns it.
type answer struct {
	sim    *Sim
	w      http.ResponseWriter
	c      *call
	faults Faults
	reqs   []*request
	wake   <-chan struct{}

	events int    // sent so far
	held   []byte // what Faults.Burst holds back
}

func (a *answer) flush() { _ = http.NewResponseController(a.w).Flush() }

// usage counts the tokens of the finished answer.
func (a *answer) usage() usage {
	u := usage{cached: a.reqs[0].cached, created: a.reqs[0].created}
	for i := range a.c.prompts {
		u.prompt += a.c.prompts[i].tokens
	}
	for _, r := range a.reqs {
		u.completion += int(r.produced.Load())
	}
	return u
}

// stream sends the answer as events, each in its own write.
func (a *answer) stream() {
	created := time.Now().Unix()
	events := a.sim.newEventWriter(a.c, created, a.reqs)
	sent := make([]int, len(a.reqs))
	buf := make([]byte, 0, 512)
	opened := a.c.kind == kindText // no role events there
	for finished := false; !finished; {
		<-a.wake
		finished = true
		for i, r := range a.reqs {
			// The state first: once it is finished, no token comes after it.
			state := r.state.Load()
			if state == stateBroken {
				panic(http.ErrAbortHandler)
			}
			if state != stateFinished {
				finished = false
			}
			produced := int(r.produced.Load())
			if produced > 0 && !opened {
				opened = true
				for _, other := range a.reqs {
					a.send(events.role(buf[:0], other))
				}
			}
			for ; sent[i] < produced; sent[i]++ {
				buf = events.token(buf[:0], r, sent[i])
				a.send(buf)
			}
			if a.sim.cfg.DecodeStep < 0 {
				r.consumed.Store(int64(produced))
			}
		}
		if a.sim.cfg.DecodeStep < 0 && !finished {
			a.sim.engine.nudge()
		}
	}
	if a.c.includeUsage {
		a.send(events.final(buf[:0], a.reqs, a.usage()))
	}
	a.send([]byte(doneEvent))
	if len(a.held) > 0 {
		_, _ = a.w.Write(a.held)
	}
}

// send writes one event. A write error needs no care: the request's context
// ends with the connection, and that aborts the answer.
func (a *answer) send(event []byte) {
	a.events++
	if a.faults.Burst {
		a.held = append(a.held, event...)
	} else {
		_, _ = a.w.Write(event)
		a.flush()
	}
	if a.events == a.faults.DieAfterEvents {
		_, _ = a.w.Write(a.held)
		a.flush()
		panic(http.ErrAbortHandler)
	}
}

// json sends the answer as one JSON object.
func (a *answer) json() {
	for finished := false; !finished; {
		<-a.wake
		finished = true
		for _, r := range a.reqs {
			switch r.state.Load() {
			case stateBroken:
				panic(http.ErrAbortHandler)
			case stateActive:
				finished = false
			}
		}
	}
	texts := make([]string, len(a.reqs))
	for i, r := range a.reqs {
		var text []byte
		if a.c.echo && r.prompt.text != "" {
			text = append(append(text, r.prompt.text...), ' ')
		}
		for t := range r.target {
			text = r.appendText(text, t)
		}
		texts[i] = quote(string(text))
	}
	body := a.sim.jsonAnswer(a.c, time.Now().Unix(), a.reqs, texts, a.usage())
	h := a.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if a.faults.DieAfterEvents != 0 {
		if a.faults.DieAfterEvents > 0 {
			_, _ = a.w.Write(body[:len(body)/2])
		}
		a.flush()
		panic(http.ErrAbortHandler)
	}
	_, _ = a.w.Write(body)
}

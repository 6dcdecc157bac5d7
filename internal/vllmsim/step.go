package vllmsim

import "time"

// advance does all that is due at now and returns when the next thing is due;
// the zero time when nothing is. The caller holds the lock.
func (e *engine) advance(now time.Time) (next time.Time) {
	e.moveLate(now)
	e.schedule(now)
	if len(e.decoding) > 0 {
		if !now.Before(e.nextStep) {
			e.step(now)
		}
	} else if e.prefillDone(now) {
		e.step(now)
	}
	// A step that ended requests freed their places.
	e.schedule(now)

	for _, l := range e.late {
		next = earlier(next, l.due)
	}
	switch {
	case len(e.decoding) == 0:
		for _, r := range e.prefilling {
			next = earlier(next, r.prefillEnd)
		}
	case e.cfg.DecodeStep > 0:
		next = earlier(next, e.nextStep)
	case e.prefillDone(now) || e.anyBelowLead():
		next = earlier(next, now)
	default:
		// Without pause, and every handler has tokens to write: it nudges the
		// engine when it has written them.
		for _, r := range e.prefilling {
			next = earlier(next, r.prefillEnd)
		}
	}
	return next
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

func (e *engine) prefillDone(now time.Time) bool {
	for _, r := range e.prefilling {
		if !now.Before(r.prefillEnd) {
			return true
		}
	}
	return false
}

func (e *engine) anyBelowLead() bool {
	for _, r := range e.decoding {
		if e.mayGenerate(r) {
			return true
		}
	}
	return false
}

func (e *engine) mayGenerate(r *request) bool {
	return e.cfg.DecodeStep > 0 || !r.streaming || r.produced.Load()-r.consumed.Load() < maxLead
}

func (e *engine) moveLate(now time.Time) {
	kept := e.late[:0]
	for _, l := range e.late {
		if now.Before(l.due) {
			kept = append(kept, l)
			continue
		}
		e.observe(l.req)
	}
	e.late = kept
}

// schedule gives free places to waiting requests.
func (e *engine) schedule(now time.Time) {
	for len(e.waiting) > 0 && len(e.prefilling)+len(e.decoding) < e.cfg.MaxRunning {
		r := e.waiting[0]
		e.waiting[0] = nil
		e.waiting = e.waiting[1:]
		// A request can have come in after now was read.
		r.scheduled = now
		if now.Before(r.queued) {
			r.scheduled = r.queued
		}
		r.cached, r.created = e.cache.lookup(r.prompt, e.cfg.PrefixCacheBlock)
		r.prefillEnd = r.scheduled.Add(e.cfg.prefillTime(r.prompt.tokens - r.cached))
		e.c.prefixQueries += float64(r.prompt.tokens)
		e.c.prefixHits += float64(r.cached)
		e.prefilling = append(e.prefilling, r)
	}
}

// step ends an engine step: every decoding request gets a token, and those
// whose prefill is done get their first one. Histograms of the requests that
// finish move before any handler wakes.
func (e *engine) step(now time.Time) {
	rhythm := len(e.decoding) > 0
	tokens := 0
	running := e.decoding[:0]
	for _, r := range e.decoding {
		if !e.mayGenerate(r) {
			running = append(running, r)
			continue
		}
		e.c.interToken.observe(itlBounds, now.Sub(r.lastToken).Seconds())
		tokens++
		if !e.generate(r, now) {
			running = append(running, r)
		}
	}
	clear(e.decoding[len(running):])
	e.decoding = running

	pending := e.prefilling[:0]
	for _, r := range e.prefilling {
		if now.Before(r.prefillEnd) {
			pending = append(pending, r)
			continue
		}
		r.firstToken = now
		e.c.timeToFirstToken.observe(ttftBounds, now.Sub(r.arrival).Seconds())
		e.c.promptTokens += float64(r.prompt.tokens)
		e.c.promptCached += float64(r.cached)
		tokens += r.prompt.tokens - r.cached + 1
		if !e.generate(r, now) {
			e.decoding = append(e.decoding, r)
		}
	}
	clear(e.prefilling[len(pending):])
	e.prefilling = pending

	if tokens > 0 {
		e.c.iterationTokens.observe(stepBounds, float64(tokens))
	}
	e.nextStep = e.nextStep.Add(e.cfg.DecodeStep)
	if !rhythm || e.cfg.DecodeStep < 0 || e.nextStep.Before(now) {
		// The first step after a break, or the machine was too slow for the
		// old rhythm.
		e.nextStep = now.Add(max(0, e.cfg.DecodeStep))
	}
}

// generate gives r a token and reports whether it was the last.
func (e *engine) generate(r *request, now time.Time) (last bool) {
	r.lastToken = now
	e.c.generationTokens++
	// A handler can see this at once, and its client then reads /metrics: that
	// reading waits for the engine's lock, so it has the whole step in it.
	last = int(r.produced.Add(1)) == r.target
	if last {
		e.finished++
		if !r.late {
			e.observe(r)
		}
		r.state.Store(stateFinished)
		if e.cfg.OnEnd != nil {
			e.cfg.OnEnd(r.record(false))
		}
	}
	if last || r.streaming {
		r.signal()
	}
	return last
}

// observe moves the histograms of finished requests.
func (e *engine) observe(r *request) {
	c := &e.c
	out := int(r.produced.Load())
	queue := r.scheduled.Sub(r.queued).Seconds()
	prefill := r.firstToken.Sub(r.scheduled).Seconds()
	decode := r.lastToken.Sub(r.firstToken).Seconds()

	c.requestPromptTokens.observe(tokenBounds, float64(r.prompt.tokens))
	c.requestGenerationTokens.observe(tokenBounds, float64(out))
	c.requestParamsMax.observe(tokenBounds, float64(r.maxTokens))
	c.computed.observe(tokenBounds, float64(r.prompt.tokens-r.cached))
	c.queueTime.observe(latencyBounds, queue)
	c.prefillTime.observe(latencyBounds, prefill)
	c.decodeTime.observe(latencyBounds, decode)
	c.inferenceTime.observe(latencyBounds, r.lastToken.Sub(r.scheduled).Seconds())
	c.e2eLatency.observe(latencyBounds, r.lastToken.Sub(r.arrival).Seconds())
	c.preemptions.observe(preemptBounds, 0)
	perToken := 0.0
	if out > 1 {
		perToken = decode / float64(out-1)
	}
	c.requestTimePerOutputToken.observe(itlBounds, perToken)
	if r.reason == "stop" {
		c.successStop++
	} else {
		c.successLength++
	}

	// Once for all choices of a prompt.
	g := r.group
	g.longest = max(g.longest, out)
	if g.remaining--; g.remaining == 0 {
		c.requestParamsN.observe(nBounds, float64(g.n))
		c.requestMaxGenerationTokens.observe(tokenBounds, float64(g.longest))
	}
}

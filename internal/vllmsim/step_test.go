package vllmsim

import (
	"slices"
	"testing"
	"time"
)

// clockwork drives an engine without its loop, by a clock of the test's own.
type clockwork struct {
	*engine
	start time.Time
	t     *testing.T
}

func newClockwork(t *testing.T, cfg Config) *clockwork {
	cfg = cfg.withDefaults()
	return &clockwork{&engine{cfg: &cfg, kick: make(chan struct{}, 1), cache: newPrefixCache()}, time.Now(), t}
}

func (c *clockwork) at(ms int) time.Time { return c.start.Add(time.Duration(ms) * time.Millisecond) }

func (c *clockwork) add(ms, promptTokens, target int) *request {
	p := newPrompt(make([]byte, promptTokens*bytesPerToken), 16)
	r := &request{
		prompt: &p, group: &group{n: 1, remaining: 1}, target: target, reason: "length",
		wake: make(chan struct{}, 1), streaming: true, arrival: c.at(ms), queued: c.at(ms),
	}
	c.waiting = append(c.waiting, r)
	return r
}

// expect advances to a time and checks when the engine wants to look again
// (-1: never) and how many tokens each request has.
func (c *clockwork) expect(ms, next int, reqs []*request, tokens ...int64) {
	c.t.Helper()
	got := c.advance(c.at(ms))
	var want time.Time
	if next >= 0 {
		want = c.at(next)
	}
	if !got.Equal(want) {
		c.t.Errorf("at %d ms: next at %v, want %v", ms, got.Sub(c.start), want.Sub(c.start))
	}
	var produced []int64
	for _, r := range reqs {
		produced = append(produced, r.produced.Load())
	}
	if !slices.Equal(produced, tokens) {
		c.t.Errorf("at %d ms: tokens %v, want %v", ms, produced, tokens)
	}
}

func TestSteps(t *testing.T) {
	c := newClockwork(t, Config{PrefillTokensPerSecond: 1000, DecodeStep: 50 * time.Millisecond, MaxRunning: 2})
	c.expect(0, -1, nil)
	a := c.add(0, 10, 3)
	c.expect(0, 10, []*request{a}, 0)  // prefill takes 10 ms
	c.expect(10, 60, []*request{a}, 1) // nothing decodes: first token at its end
	b := c.add(15, 20, 2)
	d := c.add(15, 5, 1)
	all := []*request{a, b, d}
	c.expect(15, 60, all, 1, 0, 0)   // b's prefill ends at 35, its token waits for the step
	c.expect(60, 110, all, 2, 1, 0)  // lockstep; d waits for a place
	c.expect(62, 110, all, 2, 1, 0)  // woken for nothing
	c.expect(111, 116, all, 3, 2, 0) // late by 1 ms; a and b end, d is scheduled
	c.expect(116, -1, all, 3, 2, 1)  // 5 ms of prefill, one token, idle

	if a.lastToken != b.lastToken || b.firstToken != c.at(60) {
		t.Error("not in lockstep")
	}
	if q := d.scheduled.Sub(d.queued); q != 96*time.Millisecond {
		t.Errorf("d was queued for %v", q)
	}
	snap := c.snapshot()
	if !near(snap.prefillTime.sum, 0.010+0.045+0.005) || !near(snap.decodeTime.sum, 0.101+0.051) || !near(snap.queueTime.sum, 0.096) {
		t.Errorf("prefill %v, decode %v, queue %v", snap.prefillTime.sum, snap.decodeTime.sum, snap.queueTime.sum)
	}
	if snap.interToken.count != 3 || snap.generationTokens != 6 || snap.promptTokens != 35 {
		t.Errorf("%d gaps, %v generated, %v prompt tokens", snap.interToken.count, snap.generationTokens, snap.promptTokens)
	}
}

func TestRhythm(t *testing.T) {
	c := newClockwork(t, Config{PrefillTokensPerSecond: -1, DecodeStep: 50 * time.Millisecond})
	a := c.add(0, 1, 100)
	one := []*request{a}
	c.expect(0, 50, one, 1)
	c.expect(53, 100, one, 2)  // a late wake-up does not shift the steps
	c.expect(270, 320, one, 3) // unless steps were missed
}

func TestLead(t *testing.T) {
	c := newClockwork(t, Config{PrefillTokensPerSecond: -1, DecodeStep: -1})
	a := c.add(0, 1, 1000)
	one := []*request{a}
	for i := range maxLead - 1 {
		c.expect(0, 0, one, int64(i+1))
	}
	c.expect(0, -1, one, maxLead) // waits until the handler has written
	a.consumed.Store(1)
	c.expect(1, -1, one, maxLead+1)
}

func TestPrefixCache(t *testing.T) {
	text := func(s string, n int) *prompt {
		p := newPrompt(slices.Repeat([]byte(s), n), 16)
		return &p
	}
	cache := newPrefixCache()
	for _, c := range []struct {
		what            string
		p               *prompt
		cached, created int
	}{
		{"new", text("abcd", 64), 0, 64},
		{"the same: the last block is computed for its last token", text("abcd", 64), 48, 0},
		{"longer", text("abcd", 85), 64, 16},
		{"shorter than a block", text("abcd", 15), 0, 0},
		{"other", text("abce", 64), 0, 64},
	} {
		if cached, created := cache.lookup(c.p, 16); cached != c.cached || created != c.created {
			t.Errorf("%s: %d cached, %d created; want %d, %d", c.what, cached, created, c.cached, c.created)
		}
	}
}

func TestEras(t *testing.T) {
	for version, want := range map[string]era{
		"0.11.2": era011, "0.15.9": era011, "0.16.0": era019, "0.24.1": era019,
		"0.25.0": era032, "0.32.0": era032, "v0.19.1": era019, "1.0.0": era032, "dev": era032,
	} {
		if got := eraOf(version); got != want {
			t.Errorf("%s: %v, want %v", version, got, want)
		}
	}
}

func TestFloats(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.0", 45: "45.0", 19.069081573999483: "19.069081573999483", 1e-5: "1e-05",
		1795962629.59: "1.79596262959e+09", 985807040: "9.8580704e+08", 1e6: "1e+06", 999999: "999999.0",
	} {
		if got := sampleFloat(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

package timings

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// tally is what came out of one load.
type tally struct {
	all, exact, none, wrong int
	prefill, decode         []float64 // relative errors of estimates
}

func (c *tally) add(t *testing.T, j *job, share Share, ok bool) {
	c.all++
	if !ok {
		c.none++
		return
	}
	f := FromShare(j.Usage, share)
	off := func(d Opt[time.Duration], truth time.Duration) float64 {
		return math.Abs((d.Value - truth).Seconds())
	}
	if !f.Estimated {
		c.exact++
		if off(f.Prefill, j.prefill) > 1e-5 || off(f.Decode, j.decode) > 1e-5 || f.Cached.Value != j.cached {
			c.wrong++
			if c.wrong <= 5 {
				t.Errorf("called exact: got prefill %v decode %v cached %d, truth %v %v %d (recorded %v, seen %v, alone %v)", f.Prefill.Value, f.Decode.Value,
					f.Cached.Value, j.prefill, j.decode, j.cached, j.recorded, j.Seen.Sub(epoch), j.Alone)
			}
		}
		return
	}
	if err := absurd(j, share); err != nil {
		t.Error(err)
	}
	relative := func(d Opt[time.Duration], truth time.Duration) float64 {
		switch {
		case !d.Known:
			return math.Inf(1)
		case truth == 0:
			return off(d, truth)
		}
		return off(d, truth) / truth.Seconds()
	}
	c.prefill = append(c.prefill, relative(f.Prefill, j.prefill))
	c.decode = append(c.decode, relative(f.Decode, j.decode))
}

// absurd says what nobody would believe of an estimate. Answers that were alone in a window have vLLM's own figures, which
// may be longer than what we saw of them.
func absurd(j *job, s Share) error {
	took := j.Seen.Sub(j.Sent)
	switch {
	case s.Prefill.Value < 0 || s.Decode.Value < 0:
	case s.Decode.Known && !Plausible(j.Usage, Phases{Decode: s.Decode}).Decode.Known:
	case !j.stream && s.Requests > 1 && s.Prefill.Value+s.Decode.Value > took:
	default:
		return nil
	}
	return fmt.Errorf("stream %v of %d tokens in %v: prefill %v, decode %v, truth %v and %v", j.stream, j.completion, took, s.Prefill, s.Decode, j.prefill, j.decode)
}

func percent(n, of int) float64 { return 100 * float64(n) / float64(max(1, of)) }

func quantile(xs []float64, q float64) string {
	if len(xs) == 0 {
		return "-"
	}
	slices.Sort(xs)
	return fmt.Sprintf("%.2f%%", 100*xs[int(q*float64(len(xs)-1))])
}

func within(xs []float64, limit float64) float64 {
	n := 0
	for _, x := range xs {
		if x <= limit {
			n++
		}
	}
	return percent(n, len(xs))
}

// long makes the simulation longer, to look for rare cases and for a table with less noise.
var long = flag.Int("timings.long", 1, "simulate so many times more requests")

func loads() []load {
	var out []load
	for _, clients := range []int{1, 4, 16, 64} {
		for direct := range 3 {
			for _, same := range []bool{false, true} {
				for _, late := range []float64{0, 0.03} {
					if late == 0 && direct == 2 {
						continue
					}
					l := load{clients: clients, direct: direct, same: same, late: late, requests: 40 + 2*clients, min: 200, max: 600}
					if same {
						l.min, l.max = 40, 40
						l.requests *= 2
					}
					l.name = fmt.Sprintf("%d+%d same=%v late=%v", clients, direct, same, late)
					out = append(out, l)
				}
			}
		}
	}
	for _, clients := range []int{4, 16, 64} {
		for direct := range 3 {
			out = append(out,
				load{name: fmt.Sprintf("%d+%d short", clients, direct), clients: clients, direct: direct, requests: 200, min: 4, max: 120},
				load{name: fmt.Sprintf("%d+%d short calm", clients, direct), clients: clients, direct: direct, requests: 200, min: 4, max: 120, calm: true, running: true, readMax: 3 * time.Millisecond},
				load{name: fmt.Sprintf("%d+%d long calm", clients, direct), clients: clients, direct: direct, requests: 150, min: 200, max: 600, calm: true, running: true, readMax: 3 * time.Millisecond},
				load{name: fmt.Sprintf("%d+%d half whole calm", clients, direct), clients: clients, direct: direct, requests: 200, min: 4, max: 120, whole: 0.5, calm: true, running: true, readMax: 3 * time.Millisecond},
				load{name: fmt.Sprintf("%d+%d whole calm", clients, direct), clients: clients, direct: direct, requests: 200, min: 4, max: 120, whole: 1, calm: true, running: true, readMax: 3 * time.Millisecond},
				load{name: fmt.Sprintf("%d+%d half whole same", clients, direct), clients: clients, direct: direct, requests: 200, min: 30, max: 30, same: true, whole: 0.5, late: 0.03},
				load{name: fmt.Sprintf("%d+%d half whole", clients, direct), clients: clients, direct: direct, requests: 200, min: 4, max: 120, whole: 0.5, late: 0.03, usageHasCached: true},
				load{name: fmt.Sprintf("%d+%d same, running known", clients, direct), clients: clients, direct: direct, requests: 200, min: 30, max: 30, same: true, running: true},
				load{name: fmt.Sprintf("%d+%d tiny same", clients, direct), clients: clients, direct: direct, requests: 300, min: 3, max: 3, same: true, late: 0.03},
				load{name: fmt.Sprintf("%d+%d no computed", clients, direct), clients: clients, direct: direct, requests: 150, min: 4, max: 60, noComputed: true},
				load{name: fmt.Sprintf("%d+%d whole, no computed", clients, direct), clients: clients, direct: direct, requests: 150, min: 1, max: 60, whole: 1, noComputed: true, usageHasCached: true},
				load{name: fmt.Sprintf("%d+%d whole, few tokens", clients, direct), clients: clients, direct: direct, requests: 200, min: 1, max: 3, whole: 1, late: 0.03, running: true},
			)
		}
	}
	out = append(out,
		load{name: "160+1 same, late above 128", clients: 160, direct: 1, requests: 400, min: 40, max: 40, same: true, running: true, lateAbove: 128},
		load{name: "160+1 late above 128", clients: 160, direct: 1, requests: 200, min: 40, max: 200, running: true, lateAbove: 128},
		load{name: "1+1 no computed", clients: 1, direct: 1, requests: 150, min: 4, max: 20, noComputed: true},
	)
	return out
}

// TestNoExactAnswerIsWrong is what must hold: figures that are not marked as estimated are the engine's own.
func TestNoExactAnswerIsWrong(t *testing.T) {
	var table strings.Builder
	fmt.Fprintf(&table, "\n%-30s %6s %6s %6s %6s | prefill %8s %8s %7s | decode %8s %8s %7s\n",
		"load (ours+direct)", "answers", "exact", "none", "wrong", "p50", "p95", "<=10%", "p50", "p95", "<=1%")
	for _, l := range loads() {
		t.Run(l.name, func(t *testing.T) {
			var c tally
			l.requests *= *long
			newSim(l, func(j *job, share Share, ok bool) { c.add(t, j, share, ok) }).run()
			fmt.Fprintf(&table, "%-30s %6d %5.1f%% %5.1f%% %6d | prefill %8s %8s %6.1f%% | decode %8s %8s %6.1f%%\n", l.name,
				c.all, percent(c.exact, c.all), percent(c.none, c.all), c.wrong,
				quantile(c.prefill, .5), quantile(c.prefill, .95), within(c.prefill, .1),
				quantile(c.decode, .5), quantile(c.decode, .95), within(c.decode, .01))
			if l.clients == 1 && l.direct == 0 && c.exact != c.all {
				t.Errorf("%d of %d exact of a client that is alone", c.exact, c.all)
			}
		})
	}
	t.Log(table.String())
}

// TestAloneInItsStep: where vLLM records in time and nobody else is there, only requests that end in one engine step share a
// window. Of their sums nothing tells how they divide, so that is all that can be exact.
func TestAloneInItsStep(t *testing.T) {
	for _, l := range loads() {
		if !l.calm || l.direct > 0 {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			steps := map[time.Duration][]bool{} // whether each request that ended in it is an estimate
			newSim(l, func(j *job, share Share, ok bool) {
				steps[j.recorded] = append(steps[j.recorded], !ok || share.Estimated)
			}).run()
			for at, estimated := range steps {
				if len(estimated) == 1 && estimated[0] {
					t.Errorf("the one that ended at %v is an estimate", at)
				}
			}
		})
	}
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// workload is a kind of load.
type workload struct {
	name  string
	title string
	job   job
	// slices is how many times a repetition gives a contender the job. More and shorter ones meet the same neighbours
	// on a shared machine.
	slices  int
	slow    int // what part of its tokens or answers a slow contender gets: one of so many
	figures []figure
}

// figure is one line of the table.
type figure struct {
	title  string
	unit   string
	of     func(r *result) float64
	added  bool    // what it is without a proxy is taken off before the ratio is made
	more   bool    // more is better: the target is the least
	target float64 // of the ratio sidecar to plain, 0 if it is not judged
	limit  float64 // of the sidecar's own value, 0 if it is not judged
}

func cpuOf(r *result) float64    { return r.CPU }
func steadyOf(r *result) float64 { return r.SteadyCPU }
func p50Of(r *result) float64    { return r.P50 }
func p99Of(r *result) float64    { return r.P99 }
func maxOf(r *result) float64    { return r.Max }
func ttftOf(r *result) float64   { return r.TTFT }
func allocsOf(r *result) float64 { return r.Allocs }
func memoryOf(r *result) float64 { return r.PerStream / 1024 }
func rateOf(r *result) float64 {
	if r.Seconds == 0 {
		return 0
	}
	return float64(r.Events) / r.Seconds
}

// Targets, of the ratio sidecar to plain but for memory. That no answer is lost is judged everywhere.
const (
	streamsTarget = 1.05 // CPU per event of many streams
	memoryLimit   = 30   // KiB per open stream
	burstTarget   = 1.25 // CPU per event without pause
	delayTarget   = 1.1  // what is added to the median delay
	rateTarget    = 1    // answers of 4 KB per second
)

// workloads returns what is measured.
func workloads(short bool) []workload {
	tokens, step, burst, paced, larger := 240, 50*time.Millisecond, 300_000, 600, 20_000
	if short {
		tokens, burst, paced, larger = 40, 100_000, 200, 4_000
	}
	const answers = 20_000
	const streams = 1000
	return []workload{
		{
			name:   "lockstep",
			title:  fmt.Sprintf("%d streams, %d tokens each, 20 tokens/s, all at the same instants", streams, tokens),
			job:    job{Streams: streams, Shape: shape{Together: streams, Events: tokens, Interval: step}},
			slices: 1,
			figures: []figure{
				{title: "CPU per event, beginnings and ends included", unit: "µs", of: cpuOf, target: streamsTarget},
				{title: "CPU per event, between those", unit: "µs", of: steadyOf},
				{title: "memory per open stream", unit: "KiB", of: memoryOf, limit: memoryLimit},
				{title: "allocations per event", of: allocsOf},
				{title: "delay p50", unit: "µs", of: p50Of, added: true},
			},
		},
		{
			name:   "spread",
			title:  fmt.Sprintf("%d streams, %d tokens each, 20 tokens/s, spread out", streams, tokens/2),
			job:    job{Streams: streams, Shape: shape{Together: streams, Events: tokens / 2, Interval: step, Spread: true}},
			slices: 1,
			figures: []figure{
				{title: "CPU per event, beginnings and ends included", unit: "µs", of: cpuOf, target: streamsTarget},
				{title: "CPU per event, between those", unit: "µs", of: steadyOf},
				{title: "delay p50", unit: "µs", of: p50Of, added: true},
			},
		},
		{
			name:   "burst",
			title:  fmt.Sprintf("1 stream, %d tokens without pause", burst),
			job:    job{Streams: 1, Shape: shape{Together: 1, Events: burst}},
			slices: 2,
			figures: []figure{
				{title: "CPU per event", unit: "µs", of: cpuOf, target: burstTarget},
				{title: "events per second", unit: "/s", of: rateOf, more: true},
				{title: "allocations per event", of: allocsOf},
			},
		},
		{
			name:   "paced",
			title:  fmt.Sprintf("1 stream, %d tokens, one every 5 ms", paced),
			job:    job{Streams: 1, Shape: shape{Together: 1, Events: paced, Interval: 5 * time.Millisecond}},
			slices: 2,
			figures: []figure{
				{title: "delay p50", unit: "µs", of: p50Of, added: true, target: delayTarget},
				{title: "delay p99", unit: "µs", of: p99Of, added: true},
				{title: "CPU per event", unit: "µs", of: cpuOf},
			},
		},
		{
			name:   "short-answers",
			title:  fmt.Sprintf("%d answers of 1 KB, sent before the request's body was read, 32 at a time", answers),
			job:    job{Requests: answers, Conns: 32, Shape: shape{Bytes: 1 << 10, Early: true}},
			slices: 1,
			figures: []figure{
				{title: "answers per second", unit: "/s", of: rateOf, more: true},
				{title: "CPU per answer", unit: "µs", of: cpuOf},
			},
		},
		{
			name:   "answers",
			title:  fmt.Sprintf("%d answers of 4 KB, 32 at a time", larger),
			job:    job{Requests: larger, Conns: 32, Shape: shape{Bytes: 4 << 10}},
			slices: 1,
			figures: []figure{
				{title: "answers per second", unit: "/s", of: rateOf, more: true, target: rateTarget},
				{title: "CPU per answer", unit: "µs", of: cpuOf},
			},
		},
	}
}

// lighter returns the job for a slow contender. Its streams are not in step: LiteLLM sends no header before the first event,
// and it may not have all of them open at the same time.
func (w *workload) lighter() job {
	j := w.job
	j.Slow = true
	j.Shape.Together = min(1, j.Shape.Together)
	if j.Requests > 0 {
		j.Requests = max(1, j.Requests/w.slow)
	} else {
		j.Shape.Events = max(1, j.Shape.Events/w.slow)
	}
	return j
}

// measurement is what a workload gave: results by contender, of each repetition all slices in one.
type measurement struct {
	workload
	results   map[string][]result
	onlyQuiet bool // disturbed samples are left out where there are others
}

// repeat gives a workload to all contenders, as often as there are repetitions.
func (b *bench) repeat(ctx context.Context, w workload, list []contender) (measurement, error) {
	m := measurement{workload: w, results: map[string][]result{}, onlyQuiet: b.peers}
	for rep := range b.repetitions {
		got := map[string][]result{}
		for slice := range w.slices {
			order := slices.Clone(list)
			if (rep+slice)%2 == 1 {
				slices.Reverse(order)
			}
			if rep+slice > 0 {
				order = slices.DeleteFunc(order, func(c contender) bool { return c.slow })
			}
			results, err := b.each(ctx, w, rep, order)
			if err != nil {
				return m, err
			}
			for i, c := range order {
				got[c.name] = append(got[c.name], results[i])
			}
		}
		for name, all := range got {
			m.results[name] = append(m.results[name], mean(all))
		}
	}
	return m, nil
}

// each gives a workload to each of some contenders, one after another or all at once.
func (b *bench) each(ctx context.Context, w workload, rep int, order []contender) ([]result, error) {
	results, errs := make([]result, len(order)), make([]error, len(order))
	var wg sync.WaitGroup
	for i, c := range order {
		j := w.job
		if c.slow {
			j = w.lighter()
		}
		one := func() {
			if results[i], errs[i] = b.measureQuiet(ctx, c, j); errs[i] == nil {
				b.say(w.name, rep, c.name, &results[i])
			}
		}
		if b.together {
			wg.Go(one)
		} else if one(); errs[i] != nil {
			break
		}
	}
	wg.Wait()
	return results, errors.Join(errs...)
}

// measureQuiet measures again where something else used the machine, and keeps the quietest sample. All that was lost
// is counted. A slow contender takes long to start, and is far enough from the others.
func (b *bench) measureQuiet(ctx context.Context, c contender, j job) (best result, err error) {
	asked, failed, timings, why := 0, 0, 0, ""
	for try := 0; ; try++ {
		r, err := b.measureWhole(ctx, c, j)
		if err != nil && b.peers && ctx.Err() == nil { // no reason to lose what the others gave
			r, err = result{Asked: max(j.Streams, j.Requests), Failed: max(j.Streams, j.Requests), Error: err.Error()}, nil
		}
		if err != nil {
			return r, err
		}
		asked, failed, timings, why = asked+r.Asked, failed+r.Failed, timings+r.Timings, cmp.Or(r.Error, why)
		if try == 0 || r.Events > 0 && (r.Others < best.Others || best.Events == 0) {
			best = r
		}
		if !b.disturbed(&best) || c.slow || try == 2 || b.again == 0 {
			break
		}
		b.again--
		b.repeated++
		b.say("  again:", try, c.name, &r)
	}
	best.Asked, best.Failed, best.Timings, best.Error = asked, failed, timings, why
	return best, nil
}

// disturbed reports whether something else had so much of the machine that a sample tells little. Only --peers cares:
// the ordinary bench has enough repetitions, and judges ratios.
func (b *bench) disturbed(r *result) bool { return b.peers && r.Others > mostOthers }

// mostOthers is a fifth of a core where there are two.
const mostOthers = 0.1

// measureWhole measures again where the only stream of a job was lost, as the plain proxy does with some: what is left
// of it tells nothing. The losses are counted.
func (b *bench) measureWhole(ctx context.Context, c contender, j job) (r result, err error) {
	asked, failed := 0, 0
	for range 5 {
		if r, err = b.measure(ctx, c, j); err != nil {
			return r, err
		}
		asked, failed = asked+r.Asked, failed+r.Failed
		if j.Streams != 1 || r.Failed == 0 {
			break
		}
	}
	r.Asked, r.Failed = asked, failed
	return r, nil
}

func (b *bench) say(workload string, rep int, name string, r *result) {
	fmt.Fprintf(b.progress, "%-13s %d %-20s %7d events %6.2f s  cpu %7.2f %7.2f us  ttft %7.0f p50 %7.0f p99 %8.0f us  %5.1f KiB  %6.3f allocs  %d failed, %d timings, others %.0f %%  %s\n",
		workload, rep+1, name, r.Events, r.Seconds, r.CPU, r.SteadyCPU, r.TTFT, r.P50, r.P99, r.PerStream/1024, r.Allocs, r.Failed, r.Timings, 100*r.Others, r.Error)
}

package main

import (
	"context"
	"fmt"
	"slices"
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
	figures []figure
}

// figure is one line of the table.
type figure struct {
	title  string
	unit   string
	of     func(r *result) float64
	added  bool    // what it is without a proxy is taken off before the ratio is made
	more   bool    // more is better
	target float64 // of the ratio sidecar to plain, 0 if it is not judged
	limit  float64 // of the sidecar's own value, 0 if it is not judged
}

func cpuOf(r *result) float64    { return r.CPU }
func steadyOf(r *result) float64 { return r.SteadyCPU }
func p50Of(r *result) float64    { return r.P50 }
func p99Of(r *result) float64    { return r.P99 }
func allocsOf(r *result) float64 { return r.Allocs }
func memoryOf(r *result) float64 { return r.PerStream / 1024 }
func rateOf(r *result) float64 {
	if r.Seconds == 0 {
		return 0
	}
	return float64(r.Events) / r.Seconds
}

// workloads returns what is measured. Targets are those of issue 3.
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
				{title: "CPU per event, beginnings and ends included", unit: "µs", of: cpuOf, target: 1.1},
				{title: "CPU per event, between those", unit: "µs", of: steadyOf},
				{title: "memory per open stream", unit: "KiB", of: memoryOf, limit: 40},
				{title: "allocations per event", of: allocsOf},
				{title: "delay p50", unit: "µs", of: p50Of, added: true},
			},
		},
		{
			name:   "burst",
			title:  fmt.Sprintf("1 stream, %d tokens without pause", burst),
			job:    job{Streams: 1, Shape: shape{Together: 1, Events: burst}},
			slices: 2,
			figures: []figure{
				{title: "CPU per event", unit: "µs", of: cpuOf, target: 1.3},
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
				{title: "delay p50", unit: "µs", of: p50Of, added: true, target: 1.2},
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
				{title: "answers per second", unit: "/s", of: rateOf, more: true},
				{title: "CPU per answer", unit: "µs", of: cpuOf},
			},
		},
	}
}

// measurement is what a workload gave: results by contender, of each repetition all slices in one.
type measurement struct {
	workload
	results map[string][]result
}

// repeat gives a workload to all contenders, as often as there are repetitions.
func (b *bench) repeat(ctx context.Context, w workload, list []contender) (measurement, error) {
	m := measurement{workload: w, results: map[string][]result{}}
	for rep := range b.repetitions {
		got := map[string][]result{}
		for slice := range w.slices {
			order := slices.Clone(list)
			if (rep+slice)%2 == 1 {
				slices.Reverse(order)
			}
			for _, c := range order {
				r, err := b.measureWhole(ctx, c, w.job)
				if err != nil {
					return m, err
				}
				b.say(w.name, rep, c.name, &r)
				got[c.name] = append(got[c.name], r)
			}
		}
		for name, all := range got {
			m.results[name] = append(m.results[name], mean(all))
		}
	}
	return m, nil
}

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
	fmt.Fprintf(b.progress, "%-13s %d %-8s %7d events %6.2f s  cpu %7.2f %7.2f us  p50 %7.0f p99 %8.0f us  %5.1f KiB  %6.3f allocs  %d failed, %d timings, others %.0f %%  %s\n",
		workload, rep+1, name, r.Events, r.Seconds, r.CPU, r.SteadyCPU, r.P50, r.P99, r.PerStream/1024, r.Allocs, r.Failed, r.Timings, 100*r.Others, r.Error)
}

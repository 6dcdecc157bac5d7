package main

import (
	"fmt"
	"time"
)

// peerWorkloads returns what is measured with --peers: more kinds of load than [workloads] has, each shorter.
func peerWorkloads(short bool) []workload {
	firsts, paced, some, tokens, burst, small, big := 200, 200, 150, 100, 300_000, 10_000, 400
	streams := 1000
	if short {
		firsts, paced, some, tokens, burst, small, big, streams = 20, 40, 20, 5, 20_000, 500, 20, 200
	}
	const step = 50 * time.Millisecond
	first := func(of string) figure {
		return figure{title: "time to first " + of + ", median", unit: "µs", of: ttftOf, added: true}
	}
	delays := func(target float64) []figure {
		return []figure{
			{title: "delay p50", unit: "µs", of: p50Of, added: true, target: target},
			{title: "delay p99", unit: "µs", of: p99Of, added: true},
			{title: "delay max", unit: "µs", of: maxOf, added: true},
			first("event"),
		}
	}
	many := append([]figure{
		{title: "CPU per event, beginnings and ends included", unit: "µs", of: cpuOf, target: streamsTarget},
		{title: "CPU per event, between those", unit: "µs", of: steadyOf},
		{title: "memory per open stream", unit: "KiB", of: memoryOf, limit: memoryLimit},
	}, delays(0)...)
	whole := func(target float64) []figure {
		return []figure{
			{title: "answers per second", unit: "/s", of: rateOf, more: true, target: target},
			{title: "CPU per answer", unit: "µs", of: cpuOf},
			first("byte"),
		}
	}
	return []workload{
		{
			name:   "first",
			title:  fmt.Sprintf("%d streams of 1 token, one after another", firsts),
			job:    job{Requests: firsts, Shape: shape{Together: 1, Events: 1, Interval: time.Millisecond}},
			slices: 1, slow: 4,
			figures: []figure{
				first("event"),
				{title: "CPU per stream", unit: "µs", of: cpuOf},
			},
		},
		{
			name:    "paced",
			title:   fmt.Sprintf("1 stream, %d tokens, one every 5 ms", paced),
			job:     job{Streams: 1, Shape: shape{Together: 1, Events: paced, Interval: 5 * time.Millisecond}},
			slices:  8, // one process differs from the next by more than the proxies do
			slow:    1,
			figures: append(delays(delayTarget), figure{title: "CPU per event", unit: "µs", of: cpuOf}),
		},
		{
			name:   "some",
			title:  fmt.Sprintf("64 streams, %d tokens each, one every 20 ms", some),
			job:    job{Streams: 64, Shape: shape{Together: 1, Events: some, Interval: 20 * time.Millisecond}},
			slices: 1, slow: 5,
			figures: append(delays(0),
				figure{title: "CPU per event", unit: "µs", of: cpuOf},
				figure{title: "memory per open stream", unit: "KiB", of: memoryOf}),
		},
		{
			name:   "lockstep",
			title:  fmt.Sprintf("%d streams, %d tokens each, one every 50 ms, all at the same instants", streams, tokens),
			job:    job{Streams: streams, Shape: shape{Together: streams, Events: tokens, Interval: step}},
			slices: 1, slow: 5,
			figures: many,
		},
		{
			name:   "spread",
			title:  fmt.Sprintf("%d streams, %d tokens each, one every 50 ms, spread out", streams, tokens),
			job:    job{Streams: streams, Shape: shape{Together: streams, Events: tokens, Interval: step, Spread: true}},
			slices: 1, slow: 5,
			figures: many,
		},
		{
			name:   "burst",
			title:  fmt.Sprintf("1 stream, %d tokens without pause", burst),
			job:    job{Streams: 1, Shape: shape{Together: 1, Events: burst}},
			slices: 1, slow: 100,
			figures: append([]figure{
				{title: "CPU per event", unit: "µs", of: cpuOf, target: burstTarget},
				{title: "events per second", unit: "/s", of: rateOf, more: true},
			}, delays(0)...),
		},
		{
			name:   "answers",
			title:  fmt.Sprintf("%d answers of 4 KB, 32 at a time", small),
			job:    job{Requests: small, Conns: 32, Shape: shape{Bytes: 4 << 10}},
			slices: 1, slow: 20,
			figures: whole(rateTarget),
		},
		{
			name:   "large",
			title:  fmt.Sprintf("%d answers of 1 MB, 8 at a time", big),
			job:    job{Requests: big, Conns: 8, Shape: shape{Bytes: 1 << 20}},
			slices: 1, slow: 10,
			figures: whole(0),
		},
	}
}

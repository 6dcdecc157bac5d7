package main

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// The upstream and the load generator agree on what an answer is, with a proxy between them and without.
func TestJobs(t *testing.T) {
	l := listen(t)
	go func() { _ = (&upstream{groups: map[string]*group{}}).serve(l) }()
	proxy := httptest.NewServer(plainHandler(&url.URL{Scheme: "http", Host: l.Addr().String()}))
	defer proxy.Close()
	for addr, lossless := range map[string]bool{l.Addr().String(): true, proxy.Listener.Addr().String(): false} {
		for name, j := range map[string]job{
			"lockstep": {Streams: 20, Shape: shape{Together: 20, Events: 10, Interval: time.Millisecond}},
			"spread":   {Streams: 20, Shape: shape{Together: 20, Events: 10, Interval: 10 * time.Millisecond, Spread: true}},
			"sequence": {Requests: 10, Shape: shape{Together: 1, Events: 1, Interval: time.Millisecond}},
			"burst":    {Streams: 1, Shape: shape{Together: 1, Events: 5000}},
			"answers":  {Requests: 200, Conns: 4, Shape: shape{Bytes: 4 << 10}},
			"at once":  {Requests: 200, Conns: 4, Shape: shape{Bytes: 1 << 10, Early: true}},
		} {
			j.Addr, j.Shape.Run = addr, "1"
			var r result
			switch {
			case j.Streams > 0:
				var err error
				if r, _, _, err = j.streams(); err != nil {
					t.Fatal(err)
				}
			case j.Shape.Bytes > 0:
				r = j.answers()
			default:
				r = j.sequence()
			}
			want := max(j.Streams*j.Shape.Events, j.Requests)
			if lossless && (r.Failed > 0 || r.Events != want) {
				t.Errorf("%s at %s: %d of %d events, %d failed: %s", name, addr, r.Events, want, r.Failed, r.Error)
			}
			if r.Failed == 0 && r.Events != want {
				t.Errorf("%s at %s: %d of %d events and none failed", name, addr, r.Events, want)
			}
			if j.Streams > 0 && r.Events > 0 && (r.P50 <= 0 || r.Max < r.P50 || r.P50 > 60e6) {
				t.Errorf("%s at %s: p50 %v, max %v", name, addr, r.P50, r.Max)
			}
		}
	}
}

func TestEventsAreValid(t *testing.T) {
	tok := newToken()
	for _, e := range [][]byte{roleEvent, tok.stamped(), finishEvent, usageEvent(7, false), usageEvent(7, true)} {
		_, data, _ := bytes.Cut(e, []byte("data: "))
		data, _, _ = bytes.Cut(data, []byte("\n\n"))
		if !json.Valid(data) {
			t.Errorf("no JSON: %s", data)
		}
	}
	sent, ok := stampOf(tok.stamped())
	if took := time.Since(time.Unix(0, sent)); !ok || took < 0 || took > time.Minute {
		t.Errorf("sent %v ago, %v", took, ok)
	}
	for _, size := range []int{0, 1 << 10, 4 << 10} {
		for _, bare := range []bool{false, true} {
			answer, text := jsonAnswer(size, bare)
			_, body, _ := bytes.Cut(answer, []byte("\r\n\r\n"))
			if !json.Valid(body) || len(body) < size || size > 0 && text < 50 {
				t.Errorf("%d bytes, %d of them text: %s", len(body), text, body)
			}
			if got := bytes.Contains(body, []byte(`"metrics":`)); got == bare {
				t.Errorf("bare %t, metrics %t", bare, got)
			}
		}
	}
}

func TestShape(t *testing.T) {
	want := shape{Run: "3", Together: 2, Events: 4, Interval: 5 * time.Millisecond, Bytes: 6, Early: true, Spread: true, Bare: true}
	if got, err := parseShape(want.String()); got != want || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
}

// What is judged is the median of ratios within repetitions, not the ratio of medians.
func TestJudging(t *testing.T) {
	m := measurement{
		workload: workload{name: "w", slices: 1, figures: []figure{{title: "CPU", of: cpuOf, target: 1.1}, {title: "delay", of: p50Of, added: true, target: 1.2}, {title: "memory", unit: "KiB", of: memoryOf, limit: 40}}},
		results: map[string][]result{
			direct:  {{Events: 1, P50: 100}, {Events: 1, P50: 200}, {Events: 1, P50: 300}},
			plain:   {{Events: 1, CPU: 10, P50: 150}, {Events: 1, CPU: 20, P50: 250}, {Events: 1, CPU: 40, P50: 400}},
			sidecar: {{Events: 1, CPU: 12, P50: 160}, {Events: 1, CPU: 21, P50: 255}, {Events: 1, CPU: 60, P50: 415}},
		},
	}
	ours := &contender{name: sidecar, beside: plain, timings: true}
	if got := median(m.ratios(&m.figures[0], ours)); got != 1.2 {
		t.Errorf("CPU ratio %v", got)
	}
	if got := median(m.ratios(&m.figures[1], ours)); got != 1.15 {
		t.Errorf("delay ratio %v", got)
	}
	list := []contender{{name: direct}, {name: plain, foreign: true}, *ours}
	if got := newTable([]measurement{m}, list, true); len(got.missed) != 1 {
		t.Errorf("missed: %q", got.missed)
	}
	if got := newTable([]measurement{m}, list, false); !got.ok() {
		t.Errorf("missed: %q", got.missed)
	}
	m.results[sidecar][1].Failed = 1
	if got := newTable([]measurement{m}, list, false); got.ok() {
		t.Error("an answer was lost, and nothing is missed")
	}
}

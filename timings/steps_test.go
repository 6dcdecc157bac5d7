package timings

import (
	"slices"
	"testing"
	"time"
)

// tickers makes events of other streams: each inner list is when the streams 0, 1, ... got one, in ms, 0 for not at all.
func tickers(s *Steps, events ...[]float64) {
	type event struct {
		at     float64
		stream int
	}
	var all []event
	last := map[int]uint64{}
	for _, step := range events {
		for stream, at := range step {
			if at != 0 {
				all = append(all, event{at, stream})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b event) int { return int(1000 * (a.at - b.at)) })
	for _, e := range all {
		last[e.stream] = s.Tick(moment(e.at), last[e.stream])
	}
}

func moment(ms float64) time.Time { return epoch.Add(time.Duration(ms * float64(time.Millisecond))) }

func TestPrefills(t *testing.T) {
	tests := []struct {
		name           string
		events         [][]float64
		headers, first float64
		want           []float64
	}{
		{"nobody else", nil, 100, 120, []float64{20}},
		{"others before and after only", [][]float64{{80, 81}, {90, 91}, {140, 141}}, 100, 120, []float64{20}},
		{"waits for the end of a step", [][]float64{{90}, {98}, {106}, {120}}, 100, 120.5, []float64{14, 20.5}},
		{"its own event comes first", [][]float64{{90, 90.1}, {98, 98.1}, {106, 106.1}, {120, 120.1}}, 100, 119.8, []float64{13.8, 19.8}},
		{"others' events in another order", [][]float64{{98, 98.2, 98.4}, {106.6, 106, 106.3}, {120.2, 120.1, 120}}, 100, 120.5, []float64{14, 20.5}},
		{"a step that was over before", [][]float64{{91}, {101}, {111}, {131}, {141}}, 100, 131.5, []float64{20, 30, 31.5}},
		{"a long prefill in several steps", [][]float64{{90}, {105}, {125}, {145}, {165}, {175}}, 100, 165.5, []float64{60, 40, 65.5}},
		{"events that were held back are no steps", [][]float64{{90}, {98}, {106}, {106.1}, {106.2}, {120}}, 100, 120.5, []float64{14, 20.5}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var s Steps
			tickers(&s, test.events...)
			var got []float64
			for _, d := range s.Prefills(moment(test.headers), moment(test.first)) {
				got = append(got, d.Seconds()*1000)
			}
			if !slices.EqualFunc(got, test.want, func(a, b float64) bool { return a-b < 1e-6 && b-a < 1e-6 }) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// What is no longer known is not guessed.
func TestPrefillsLongAgo(t *testing.T) {
	var s Steps
	var step uint64
	for i := range 2 * stepsKept {
		step = s.Tick(moment(float64(10*i)), step)
	}
	for name, headers := range map[string]float64{
		"all of it":     5,
		"its beginning": 10*stepsKept - 15,
	} {
		if got := s.Prefills(moment(headers), moment(10*stepsKept+52)); len(got) != 1 {
			t.Errorf("%s is long ago: got %v", name, got)
		}
	}
	if got := s.Prefills(moment(10*stepsKept+15), moment(10*stepsKept+52)); len(got) < 2 {
		t.Errorf("just known: got %v", got)
	}
}

func TestPace(t *testing.T) {
	var p pace
	learn := func(tokens int, prefill time.Duration) {
		p.learn(&Finished{Usage: Usage{Prompt: tokens + 50, Cached: Some(50)}}, Share{Phases: phases(prefill, time.Second)})
	}
	want := func(what string, got, want float64) {
		t.Helper()
		if got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%s: %v s, want %v", what, got, want)
		}
	}
	want("before anything was learnt", p.prefill(10), 0)
	for _, n := range []int{100, 300, 200, 400} {
		learn(n, time.Duration(5+n/10)*ms)
	}
	want("few tokens", p.prefill(50), 0.010)
	want("many tokens", p.prefill(1000), 0.105)
	for range 400 { // another model
		learn(100, 200*ms)
		learn(200, 100*ms)
	}
	if got := p.prefill(10_000); got < 0.149 || got > 0.151 {
		t.Errorf("more tokens took less time: %v s for many, want the mean", got)
	}
	p = pace{}
	learn(1000, 10*ms)
	learn(2000, 50*ms)
	if p.prefill(0) <= 0 {
		t.Error("a prefill that takes no time")
	}
}

func TestChoose(t *testing.T) {
	stream := func(prefills ...int) *Finished {
		f := &Finished{}
		for _, p := range prefills {
			f.Prefills = append(f.Prefills, time.Duration(p)*ms)
		}
		f.Observed.Prefill = Some(f.Prefills[0])
		return f
	}
	tests := []struct {
		name  string
		sum   int
		group []*Finished
		want  []int
	}{
		{"the most likely fit", 30, []*Finished{stream(10, 20, 25), stream(20, 10, 40)}, []int{10, 20}},
		{"about", 32, []*Finished{stream(10, 12), stream(20, 21)}, []int{10, 20}},
		{"one does not", 40, []*Finished{stream(10, 20, 35), stream(20, 60)}, []int{20, 20}},
		{"both do not", 80, []*Finished{stream(10, 20), stream(20, 60)}, []int{20, 60}},
		{"an answer that came whole is with them", 80, []*Finished{stream(10, 20), {}}, []int{10, 0}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for i, got := range choose(time.Duration(test.sum)*ms, test.group) {
				if got != time.Duration(test.want[i])*ms {
					t.Errorf("the prefill of %d: %v, want %d ms", i, got, test.want[i])
				}
			}
		})
	}
}

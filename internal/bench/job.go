package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"time"
)

// job is what a load generator is to do. It runs in a process of its own, which reads its job from stdin and writes
// its result to stdout.
type job struct {
	Addr     string // of the contender
	Shape    shape
	Streams  int  // open at the same time; 0: Requests
	Slow     bool // all streams may wait for their headers at the same time, and nothing is given up for long
	Requests int  // answers that are no streams, over Conns connections; or streams, one after another
	Conns    int
	PIDs     []int  // of the contender's programs, none if nothing is there
	Mallocs  string // URL of a page with the number of its allocations, "" if it has none
	Ours     int    // process of the bench, below which is all that works for this job

	counting time.Duration // CPU time of the contender that reading Mallocs took
}

// result is what was seen. Durations are in microseconds, as floating point.
type result struct {
	Events  int // tokens, or answers that are no streams
	Asked   int // streams or answers
	Failed  int // of them did not arrive whole
	Error   string
	Timings int // of them had `timings`

	Seconds float64
	P50     float64 // from sending a token to having it
	P99     float64
	Max     float64
	TTFT    float64 // from the request to the first event, median

	CPU       float64 // of the contender for all of it, a token
	SteadyCPU float64 // the same between the marks: no beginnings and ends of streams
	Allocs    float64 // allocations between the marks, a token
	PerStream float64 // bytes of memory per open stream
	Others    float64 // share of the machine that something else had
}

// mark is what is known of the contender at one moment.
type mark struct {
	events  int64
	cpu     time.Duration
	mallocs float64
	memory  int64
}

// look takes a mark. The allocation count costs allocations and CPU time of its own, so it is read before or after the
// rest, outside of what lies between two marks.
func (j *job) look(events int64, opens bool) (m mark, err error) {
	m.events = events
	if len(j.PIDs) == 0 {
		return m, nil
	}
	if opens {
		if m.mallocs, err = j.mallocs(); err != nil {
			return m, err
		}
	}
	if m.cpu, err = j.cpu(); err != nil {
		return m, err
	}
	if !opens {
		if m.mallocs, err = j.mallocs(); err != nil {
			return m, err
		}
	}
	for _, pid := range j.PIDs {
		own, err := ownMemory(pid)
		if err != nil {
			return m, err
		}
		m.memory += own
	}
	return m, nil
}

// mallocs reads go_memstats_mallocs_total, with whatever prefix. A page of metrics is dear beside a few thousand events, so what
// it costs is kept apart.
func (j *job) mallocs() (n float64, err error) {
	if j.Mallocs == "" {
		return 0, nil
	}
	before, err := j.cpu()
	if err != nil {
		return 0, err
	}
	defer func() {
		if after, e := j.cpu(); e == nil {
			j.counting += after - before
		}
	}()
	resp, err := http.Get(j.Mallocs)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if strings.HasSuffix(name, "go_memstats_mallocs_total") {
			_, err = fmt.Sscan(value, &n)
			return n, err
		}
	}
	return 0, fmt.Errorf("%s has no go_memstats_mallocs_total", j.Mallocs)
}

// request returns the bytes of a request for s.
func (j *job) request(s shape) []byte {
	stream := ""
	if s.Bytes == 0 {
		stream = `,"stream":true`
	}
	body := `{"model":"` + model + `","messages":[{"role":"user","content":"` + strings.Repeat("word ", 200) + `"}],"max_tokens":100` + stream + `}`
	return fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nUser-Agent: bench\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s",
		j.Addr, shapeHeader, s, len(body), body)
}

// patience bounds how long nothing may arrive.
func (j *job) patience() time.Duration {
	if j.Slow {
		return 5 * time.Minute
	}
	return 30 * time.Second
}

// dial connects to the contender.
func (j *job) dial() (net.Conn, error) { return net.DialTimeout("tcp", j.Addr, j.patience()) }

// loadMain is the load generator's process.
func loadMain(in io.Reader, out io.Writer) error {
	var j job
	if err := json.NewDecoder(in).Decode(&j); err != nil {
		return err
	}
	r, err := j.run()
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(r)
}

// run warms the contender up, then does the job and accounts for it.
func (j *job) run() (result, error) {
	if err := j.warmUp(); err != nil {
		return result{}, fmt.Errorf("warming up: %w", err)
	}
	var err error
	if j.PIDs, err = family(j.PIDs...); err != nil { // as warm as it gets, it has all its workers
		return result{}, err
	}
	before, err := j.look(0, true)
	if err != nil {
		return result{}, err
	}
	scrapeCost := 0.0
	if j.Mallocs != "" { // what one reading of the count adds to it
		again, err := j.mallocs()
		if err != nil {
			return result{}, err
		}
		scrapeCost = again - before.mallocs
	}
	if before.cpu, err = j.cpu(); err != nil {
		return result{}, err
	}
	j.counting = 0
	others, err := j.others()
	if err != nil {
		return result{}, err
	}
	var r result
	var a, b mark
	began := time.Now()
	switch {
	case j.Streams > 0:
		r, a, b, err = j.streams()
	case j.Shape.Bytes > 0:
		r = j.answers()
	default:
		r = j.sequence()
	}
	if err != nil {
		return r, err
	}
	r.Seconds = time.Since(began).Seconds()
	r.Asked = max(j.Streams, j.Requests)
	if after, err := j.others(); err == nil {
		r.Others = max(0, (after-others).Seconds()/r.Seconds/float64(runtime.NumCPU()))
	}
	if len(j.PIDs) == 0 || r.Events == 0 {
		return r, nil
	}
	time.Sleep(50 * time.Millisecond) // the last connections are put away
	cpu, err := j.cpu()
	r.CPU = micros(cpu-before.cpu-j.counting) / float64(r.Events)
	if n := float64(b.events - a.events); n > 0 {
		r.SteadyCPU = micros(b.cpu-a.cpu) / n
		r.Allocs = (b.mallocs - a.mallocs - scrapeCost) / n
		r.PerStream = float64(b.memory-before.memory) / float64(j.Streams)
	}
	return r, err
}

// others returns the CPU time that everything but the bench has used.
func (j *job) others() (time.Duration, error) {
	busy, err := busyTime()
	if err != nil {
		return 0, err
	}
	ours, err := family(j.Ours)
	for _, pid := range ours {
		if t, e := cpuTime(pid); e == nil { // else it has just ended
			busy -= t
		}
	}
	return busy, err
}

// cpu returns what all processes of the contender have used.
func (j *job) cpu() (sum time.Duration, err error) {
	for _, pid := range j.PIDs {
		t, err := cpuTime(pid)
		if err != nil {
			return 0, err
		}
		sum += t
	}
	return sum, nil
}

// warmUp lets the contender make its first connections and learn what it wants to know of the upstream. The plain proxy
// loses some answers, so one that works is enough.
func (j *job) warmUp() error {
	one := *j
	one.Shape = shape{Run: j.Shape.Run + "-warm", Together: 1, Events: 50, Interval: time.Millisecond, Bare: j.Shape.Bare}
	var errs []error
	for range 5 {
		s := newStream(&one, one.Shape.Events)
		err := s.open()
		if err == nil {
			err = s.read(nil)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	time.Sleep(100 * time.Millisecond)
	if len(errs) == 5 {
		return errors.Join(errs...)
	}
	return nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func runLoad() int {
	if err := loadMain(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench load:", err)
		return 1
	}
	return 0
}

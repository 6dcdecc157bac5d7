package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// stream is one streamed answer on a connection of its own.
type stream struct {
	job     *job
	conn    net.Conn
	resp    *http.Response
	delays  []int64 // nanoseconds from sending a token to having it
	asked   time.Time
	ttft    int64  // nanoseconds from the request to the first event
	rest    []byte // of an event that is not whole yet
	tokens  int
	done    bool
	timings bool
}

func newStream(j *job, events int) *stream {
	return &stream{job: j, delays: make([]int64, 0, events), rest: make([]byte, 0, 1<<10)}
}

// open sends the request and reads the answer's header, which the upstream sends at once.
func (s *stream) open() error {
	conn, err := s.job.dial()
	if err != nil {
		return err
	}
	s.conn = conn
	_ = conn.SetDeadline(time.Now().Add(s.job.patience()))
	s.asked = time.Now()
	if _, err := conn.Write(s.job.request(s.job.Shape)); err != nil {
		return err
	}
	size := 4 << 10
	if s.job.Streams == 1 {
		size = 64 << 10 // without pause there is more
	}
	if s.resp, err = http.ReadResponse(bufio.NewReaderSize(conn, size), nil); err != nil {
		return err
	}
	if s.resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", s.resp.StatusCode)
	}
	return nil
}

// read takes the whole answer. Tokens are counted in total too, if it is not nil.
func (s *stream) read(total *atomic.Int64) error {
	defer s.conn.Close()
	limit := time.Duration(s.job.Shape.Events)*s.job.Shape.Interval + 2*s.job.patience()
	_ = s.conn.SetDeadline(time.Now().Add(limit))
	buf := make([]byte, 16<<10)
	for {
		n, err := s.resp.Body.Read(buf)
		if n > 0 {
			tokens, now := s.tokens, time.Now()
			if s.ttft == 0 {
				s.ttft = now.Sub(s.asked).Nanoseconds()
			}
			s.take(buf[:n], now.UnixNano())
			if total != nil {
				total.Add(int64(s.tokens - tokens))
			}
		}
		switch {
		case errors.Is(err, io.EOF) && s.done && s.tokens == s.job.Shape.Events && len(s.rest) == 0:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("an answer ended after %d of %d tokens", s.tokens, s.job.Shape.Events)
		case err != nil:
			return err
		}
	}
}

var eventEnd = []byte("\n\n")

// take takes the events that end in b, which arrived now.
func (s *stream) take(b []byte, now int64) {
	for len(b) > 0 {
		// The two bytes of an event's end may come apart.
		if len(s.rest) > 0 {
			s.rest = append(s.rest, b...)
			b, s.rest = s.rest, s.rest[:0]
		}
		end := bytes.Index(b, eventEnd)
		if end < 0 {
			s.rest = append(s.rest, b...)
			return
		}
		s.event(b[:end], now)
		b = b[end+len(eventEnd):]
	}
}

func (s *stream) event(ev []byte, now int64) {
	if sent, ok := stampOf(ev); ok {
		s.tokens++
		s.delays = append(s.delays, now-sent)
		return
	}
	s.done = s.done || bytes.HasSuffix(ev, []byte("[DONE]"))
	s.timings = s.timings || bytes.Contains(ev, []byte(`"timings":{`))
}

// streams opens all streams, then reads them, and takes a mark when a tenth and when nine tenths of all tokens are there.
func (j *job) streams() (r result, a, b mark, err error) {
	all := make([]*stream, j.Streams)
	for i := range all {
		all[i] = newStream(j, j.Shape.Events)
	}
	var total atomic.Int64
	errs := make(chan error, len(all))
	var wg sync.WaitGroup
	opening := 32
	if j.Slow {
		opening = j.Streams
	}
	slots := make(chan struct{}, opening)
	for _, s := range all {
		wg.Go(func() {
			slots <- struct{}{}
			err := s.open()
			<-slots
			if err == nil {
				err = s.read(&total)
			}
			errs <- err
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	want := int64(j.Streams * j.Shape.Events)
	var markErr error
	for _, m := range []struct {
		at    int64
		to    *mark
		opens bool
	}{{want / 10, &a, true}, {want * 9 / 10, &b, false}} {
		for total.Load() < m.at {
			select {
			case <-ended:
				m.at = 0
			case <-time.After(5 * time.Millisecond):
			}
			if m.at == 0 {
				break
			}
		}
		*m.to, err = j.look(total.Load(), m.opens)
		markErr = errors.Join(markErr, err)
	}
	<-ended
	for _, s := range all {
		if err := <-errs; err != nil {
			r.Failed++
			r.Error = err.Error()
		}
		r.Events += s.tokens
		if s.timings {
			r.Timings++
		}
	}
	r.took(all)
	return r, a, b, markErr
}

// took fills in how long it took for tokens to come.
func (r *result) took(all []*stream) {
	var delays, firsts []int64
	for _, s := range all {
		delays = append(delays, s.delays...)
		if s.ttft > 0 {
			firsts = append(firsts, s.ttft)
		}
	}
	slices.Sort(delays)
	if n := len(delays); n > 0 {
		r.P50, r.P99, r.Max = float64(delays[n/2])/1e3, float64(delays[n*99/100])/1e3, float64(delays[n-1])/1e3
	}
	r.began(firsts)
}

// began fills in how many nanoseconds it took for answers to begin.
func (r *result) began(firsts []int64) {
	slices.Sort(firsts)
	if n := len(firsts); n > 0 {
		r.TTFT = float64(firsts[n/2]) / 1e3
	}
}

// sequence opens streams one after another. An event is then a stream.
func (j *job) sequence() (r result) {
	var all []*stream
	for range j.Requests {
		s := newStream(j, j.Shape.Events)
		err := s.open()
		if err == nil {
			err = s.read(nil)
		}
		if err != nil {
			r.Failed++
			r.Error = err.Error()
			continue
		}
		r.Events++
		if s.timings {
			r.Timings++
		}
		all = append(all, s)
	}
	r.took(all)
	return r
}

// answers sends requests for whole answers one after another on each connection.
func (j *job) answers() (r result) {
	var next, good, timings atomic.Int64
	var mu sync.Mutex
	var firsts []int64
	var wg sync.WaitGroup
	_, text := jsonAnswer(j.Shape.Bytes, j.Shape.Bare)
	for range j.Conns {
		wg.Go(func() {
			c := client{job: j, request: j.request(j.Shape), text: text}
			defer func() {
				c.close()
				mu.Lock()
				defer mu.Unlock()
				firsts = append(firsts, c.firsts...)
			}()
			for next.Add(1) <= int64(j.Requests) {
				body, err := c.do()
				if err != nil {
					c.close()
					mu.Lock()
					r.Failed++
					r.Error = err.Error()
					mu.Unlock()
					continue
				}
				good.Add(1)
				if bytes.Contains(body, []byte(`"timings":{`)) {
					timings.Add(1)
				}
			}
		})
	}
	wg.Wait()
	r.Events, r.Timings = int(good.Load()), int(timings.Load())
	r.began(firsts)
	return r
}

// client is a connection that is kept for many requests.
type client struct {
	job     *job
	request []byte
	conn    net.Conn
	r       *bufio.Reader
	buf     bytes.Buffer
	text    int     // that a body must at least have
	firsts  []int64 // nanoseconds from each request to the head of its answer
}

func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// do returns the body of an answer, valid until the next one.
func (c *client) do() ([]byte, error) {
	if c.conn == nil {
		conn, err := c.job.dial()
		if err != nil {
			return nil, err
		}
		c.conn, c.r = conn, bufio.NewReaderSize(conn, 8<<10)
	}
	asked := time.Now()
	_ = c.conn.SetDeadline(asked.Add(c.job.patience()))
	if _, err := c.conn.Write(c.request); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return nil, err
	}
	c.firsts = append(c.firsts, time.Since(asked).Nanoseconds())
	c.buf.Reset()
	if _, err := c.buf.ReadFrom(resp.Body); err != nil {
		return nil, err
	}
	body := c.buf.Bytes()
	switch {
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	case len(body) < c.text || body[len(body)-1] != '}':
		return nil, fmt.Errorf("an answer of %d bytes", len(body))
	case resp.Close:
		c.close()
	}
	return body, nil
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// patience is how long an answer may take. It bounds how long a lost one is waited for, and judges nothing else: the
// longest takes four seconds.
const patience = 2 * time.Minute

var errLeft = errors.New("the client has seen enough")

// load is all clients of one server.
type load struct {
	url    string
	bare   bool // the server is vLLM itself: no timings come, and no 502 when it is dead
	client *http.Client
	tally
}

func newLoad(addr string, bare bool) *load {
	return &load{url: "http://" + addr, bare: bare, client: &http.Client{Transport: &http.Transport{
		DisableCompression: true, MaxIdleConnsPerHost: 1 << 12, IdleConnTimeout: time.Second,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &noted{Conn: conn}, nil
		},
	}}}
}

// noted is a connection that knows how often something was sent on it: httptrace's WroteRequest comes before the request is out.
type noted struct {
	net.Conn
	writes atomic.Int64
}

func (n *noted) Write(p []byte) (int, error) {
	count, err := n.Conn.Write(p)
	n.writes.Add(1)
	return count, err
}

// leaveLater has leave called when the request is out, and then d later: of one that never went out the server would not know.
func leaveLater(ctx context.Context, d time.Duration, leave func()) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		conn, began := info.Conn.(*noted), time.Now()
		before := conn.writes.Load()
		var look func()
		look = func() {
			switch {
			case ctx.Err() != nil:
			case conn.writes.Load() > before && time.Since(began) >= d:
				leave()
			default:
				time.AfterFunc(5*time.Millisecond, look)
			}
		}
		look()
	}})
}

// tally is what the clients counted.
type tally struct {
	mu sync.Mutex

	sent    int
	whole   int
	aborted int
	refused int // answered with 502
	broken  int // answered in part
	wrong   int
	errors  []string // some of the wrong ones

	died      int // of the refused and broken: those that were meant to
	streams   int // of the whole
	timed     int // answers that had timings, those that broke off behind them too
	estimated int // of them
	predicted int // tokens, as those timings say
	computed  int
	reused    int

	left []departure
}

// departure is a request whose client left before it had the answer.
type departure struct {
	gap         // from sending to leaving
	late   bool // the answer may have been complete by then, in the buffers of the connection
	tokens int
}

// run keeps n requests open until ctx ends, and returns when the last is over.
func (l *load) run(ctx context.Context, n int, seed uint64) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			for pause := time.Duration(r.IntN(2000)) * time.Millisecond; ; {
				select {
				case <-ctx.Done():
					return
				case <-time.After(pause):
				}
				pause = 0
				if !l.one(newCall(r)) {
					pause = time.Duration(100+r.IntN(200)) * time.Millisecond // as a client does that was turned away
				}
			}
		})
	}
	wg.Wait()
	l.client.CloseIdleConnections()
}

// one sends a request, reads its answer and counts it. It reports whether vLLM was there.
func (l *load) one(c *call) bool {
	began := time.Now()
	status, raw, err := l.send(c)
	ended := time.Now()
	var a seen
	var wrong error
	if status == http.StatusOK {
		wrong = c.read(raw, err == nil, &a)
	}
	if l.bare && a.timings > 0 {
		wrong = errors.New("vLLM itself sent timings")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	if a.timings > 0 {
		l.timed++
		l.predicted, l.computed, l.reused = l.predicted+a.predicted, l.computed+a.computed, l.reused+a.reused
		if a.estimated {
			l.estimated++
		}
	}
	count := &l.wrong
	switch {
	case wrong != nil:
	case errors.Is(err, errLeft):
		count = &l.aborted
		l.left = append(l.left, departure{gap{began, ended}, ended.Sub(began) >= c.shortest(), c.tokens})
	case status == http.StatusBadGateway && err == nil, l.bare && isGone(err) && status == 0:
		count = &l.refused
	case status == http.StatusOK && (errors.Is(err, io.ErrUnexpectedEOF) || l.bare && isGone(err)):
		count = &l.broken
	case status == http.StatusOK && err == nil && c.fate != dies:
		count = &l.whole
		if c.stream {
			l.streams++
		}
	case status == http.StatusOK && err == nil:
		wrong = errors.New("an answer that broke off came to a clean end")
	default:
		wrong = fmt.Errorf("status %d, error %w", status, err)
	}
	*count++
	if c.fate == dies && (count == &l.refused || count == &l.broken) {
		l.died++
	}
	if wrong != nil && len(l.errors) < 20 {
		l.errors = append(l.errors, fmt.Sprintf("%s, stream %v: %v: %.2000q", c.path, c.stream, wrong, raw))
	}
	return count != &l.refused
}

// isGone reports whether err is that of a connection whose server is dead.
func isGone(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF)
}

// send returns what came of an answer, and the error that it ended in: errLeft where the client left.
func (l *load) send(c *call) (status int, raw []byte, err error) {
	limit, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	ctx, cancel := context.WithCancelCause(limit)
	defer cancel(nil)
	traced := context.Context(ctx)
	if c.fate == leaves && !c.stream {
		traced = leaveLater(ctx, time.Duration(c.after)*step, func() { cancel(errLeft) })
	}
	req, err := http.NewRequestWithContext(traced, http.MethodPost, l.url+c.path, strings.NewReader(c.request()))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.fate == dies {
		req.Header.Set(dieHeader, fmt.Sprint(c.after))
	}
	resp, err := l.client.Do(req)
	if err != nil {
		return 0, nil, cause(ctx, err)
	}
	defer resp.Body.Close()
	buf := make([]byte, 8<<10)
	for {
		if c.fate == leaves && c.stream && resp.StatusCode == http.StatusOK && bytes.Count(raw, []byte("\n\n")) >= c.after {
			return resp.StatusCode, raw, errLeft
		}
		n, err := resp.Body.Read(buf)
		raw = append(raw, buf[:n]...)
		switch {
		case errors.Is(err, io.EOF):
			return resp.StatusCode, raw, nil
		case err != nil:
			return resp.StatusCode, raw, cause(ctx, err)
		}
	}
}

// cause returns why a request ended: the client's own reason if it had one.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil {
		return why
	}
	return err
}

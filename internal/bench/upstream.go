package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// shapeHeader tells the upstream how to answer: the run, then what [shape] has.
const shapeHeader = "X-Bench"

// shape is how the upstream is to answer a request.
type shape struct {
	Run      string        // answers of one run are sent in step
	Together int           // tokens are sent once so many streams are open, and for all at the same instants
	Events   int           // tokens of a stream
	Interval time.Duration // between tokens; 0: no pause, many to a write
	Bytes    int           // of an answer that is no stream
	Early    bool          // answer before the body was read
	Spread   bool          // tokens of the streams that are together spread out over the interval
	Bare     bool          // as a vLLM without flags: no metrics in the answer
}

func (s shape) String() string {
	return fmt.Sprintf("%s %d %d %d %d %t %t %t", s.Run, s.Together, s.Events, s.Interval.Microseconds(), s.Bytes, s.Early, s.Spread, s.Bare)
}

func parseShape(v string) (s shape, err error) {
	var micros int64
	_, err = fmt.Sscan(v, &s.Run, &s.Together, &s.Events, &micros, &s.Bytes, &s.Early, &s.Spread, &s.Bare)
	s.Interval = time.Duration(micros) * time.Microsecond
	return s, err
}

// upstream imitates vLLM as cheaply as it can.
type upstream struct {
	finished histograms

	mu     sync.Mutex
	groups map[string]*group
}

// group are the streams that get their tokens at the same instants, or spread out between those.
type group struct {
	shape   shape
	counts  *histograms
	members []*member
}

type member struct {
	conn  net.Conn
	usage bool
	err   error
	done  chan struct{}
}

func (u *upstream) serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			r := bufio.NewReaderSize(c, 16<<10)
			for u.answer(c, r) == nil {
			}
		}()
	}
}

// head is what matters of a request's header.
type head struct {
	path   string
	length int64
	shape  string
}

func readHead(r *bufio.Reader) (head, error) {
	var h head
	for first := true; ; first = false {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return h, err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case first:
			if f := strings.Fields(string(line)); len(f) == 3 {
				h.path = f[1]
			}
		case len(line) == 0:
			return h, nil
		default:
			name, value, _ := bytes.Cut(line, []byte(":"))
			value = bytes.TrimSpace(value)
			switch {
			case bytes.EqualFold(name, []byte("content-length")):
				h.length, err = strconv.ParseInt(string(value), 10, 64)
			case bytes.EqualFold(name, []byte(shapeHeader)):
				h.shape = string(value)
			case bytes.EqualFold(name, []byte("transfer-encoding")):
				err = io.ErrUnexpectedEOF // no contender makes a known length unknown
			}
			if err != nil {
				return h, err
			}
		}
	}
}

func (u *upstream) answer(c net.Conn, r *bufio.Reader) error {
	h, err := readHead(r)
	if err != nil {
		return err
	}
	s, err := parseShape(h.shape)
	if err == nil && s.Bytes > 0 && s.Early {
		if err := u.whole(c, s); err != nil {
			return err
		}
		_, err := io.CopyN(io.Discard, r, h.length)
		return err
	}
	body := make([]byte, h.length)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	switch {
	case h.path == "/version":
		_, err = io.WriteString(c, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{\"version\":\"0.32.0\"}")
	case strings.HasPrefix(h.path, "/metrics/?name"):
		_, err = c.Write(u.finished.page())
	case err != nil:
		_, err = io.WriteString(c, "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n{\"detail\":\"Not Found\"}")
	case s.Bytes > 0:
		err = u.whole(c, s)
	default:
		u.finished.begin()
		m := &member{conn: c, usage: bytes.Contains(body, []byte(`"include_usage":true`)), done: make(chan struct{})}
		u.join(s, m)
		<-m.done
		err = m.err
	}
	return err
}

// atOnce is how long prefill and decode of an answer that comes at once are said to have taken.
const atOnce = 20 * time.Microsecond

// whole sends an answer that is no stream.
func (u *upstream) whole(c net.Conn, s shape) error {
	u.finished.begin()
	u.finished.end(1, wholeTokens, atOnce, atOnce)
	_, err := c.Write(answerOf(s))
	return err
}

// answers are kept by what makes them.
var answers sync.Map

func answerOf(s shape) []byte {
	key := shape{Bytes: s.Bytes, Bare: s.Bare}
	if a, ok := answers.Load(key); ok {
		return a.([]byte)
	}
	made, _ := jsonAnswer(s.Bytes, s.Bare)
	a, _ := answers.LoadOrStore(key, made)
	return a.([]byte)
}

// join adds a stream to its group, which begins when it is complete. The header goes out at once, as vLLM's does.
func (u *upstream) join(s shape, m *member) {
	_, m.err = io.WriteString(m.conn, streamHead)
	u.mu.Lock()
	defer u.mu.Unlock()
	key := s.String()
	g := u.groups[key]
	if g == nil {
		g = &group{shape: s, counts: &u.finished}
		u.groups[key] = g
	}
	if g.members = append(g.members, m); len(g.members) == s.Together {
		delete(u.groups, key)
		go g.send()
	}
}

// send sends all that follows the header, from one goroutine as vLLM's event loop does.
func (g *group) send() {
	began := time.Now()
	g.each(func(*member) []byte { return roleEvent })
	t := newToken()
	if g.shape.Interval == 0 {
		g.block(&t)
	} else {
		for k := range g.shape.Events {
			g.round(&t, began, k)
		}
	}
	ended := time.Now()
	prefill := min(g.shape.Interval, ended.Sub(began))
	g.counts.end(len(g.members), g.shape.Events, prefill, ended.Sub(began)-prefill)
	usage := usageEvent(g.shape.Events, g.shape.Bare)
	g.each(func(*member) []byte { return finishEvent })
	g.each(func(m *member) []byte {
		if m.usage {
			return usage
		}
		return nil
	})
	g.each(func(*member) []byte { return doneEvent })
	g.each(func(*member) []byte { return lastChunk })
	for _, m := range g.members {
		close(m.done)
	}
}

// round sends each stream its k-th token.
func (g *group) round(t *token, began time.Time, k int) {
	due := began.Add(time.Duration(k+1) * g.shape.Interval)
	n := 0
	g.each(func(*member) []byte {
		if n == 0 || g.shape.Spread {
			time.Sleep(time.Until(due.Add(g.shape.Interval * time.Duration(n) / time.Duration(len(g.members)))))
		}
		n++
		return t.stamped()
	})
}

// block sends the tokens in writes that fill a socket, for all that a stream can carry.
func (g *group) block(t *token) {
	const many = 64 << 10
	for left := g.shape.Events; left > 0; {
		n := min(left, many/len(t.bytes))
		b := bytes.Repeat(t.stamped(), n)
		g.each(func(*member) []byte { return b })
		left -= n
	}
}

func (g *group) each(bytes func(*member) []byte) {
	for _, m := range g.members {
		if b := bytes(m); m.err == nil && b != nil {
			_, m.err = m.conn.Write(b)
		}
	}
}

//go:build unix

package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// tcpPair returns both ends of a connection.
func tcpPair(t *testing.T) (near, far net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if near, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

// A connection has a buffer only while there is something in it.
func TestConnBuffer(t *testing.T) {
	near, far := tcpPair(t)
	c := newConn(near)
	for _, said := range []string{"hello", strings.Repeat("x", 3000)} {
		waited := make(chan struct{})
		go func() { c.wait(); close(waited) }()
		if _, err := io.WriteString(far, said); err != nil {
			t.Fatal(err)
		}
		<-waited
		if c.buf == nil || !c.more() || !c.answered {
			t.Fatalf("after %d bytes: buffer %v, answered %v", len(said), c.buf != nil, c.answered)
		}
		p := make([]byte, len(said)-1)
		if _, err := io.ReadFull(c, p); err != nil || string(p) != said[1:] && string(p) != said[:len(said)-1] {
			t.Fatalf("%q, %v", p, err)
		}
		if c.buf == nil {
			t.Error("no buffer though one byte is left")
		}
		if n, err := c.Read(p); n != 1 || err != nil || c.buf != nil {
			t.Errorf("the last byte: %d, %v, buffer %v", n, err, c.buf != nil)
		}
		c.unread([]byte("back"))
		if n, err := c.Read(p[:2]); n != 2 || err != nil || string(p[:2]) != "ba" {
			t.Errorf("%q, %v", p[:2], err)
		}
		c.unread(p[:2])
		if n, err := c.Read(p); err != nil || string(p[:n]) != "back" || c.buf != nil {
			t.Errorf("%q, %v, buffer %v", p[:n], err, c.buf != nil)
		}
	}
	far.Close()
	for range 2 {
		if n, err := c.Read(make([]byte, 9)); n != 0 || err != io.EOF || c.buf != nil {
			t.Errorf("at the end: %d, %v, buffer %v", n, err, c.buf != nil)
		}
	}
}

// A connection at which something came that nobody asked for, or that was closed, is not used again.
func TestIdleIsQuiet(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(far net.Conn)
		kept bool
	}{
		"quiet":  {func(net.Conn) {}, true},
		"talks":  {func(far net.Conn) { _, _ = io.WriteString(far, "HTTP/1.1 408 Request Timeout\r\n\r\n") }, false},
		"closed": {func(far net.Conn) { far.Close() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			near, far := tcpPair(t)
			var i idleConns
			defer i.close()
			c := newConn(near)
			i.put(c)
			tt.do(far)
			if !tt.kept {
				c.wait() // until it is here; what was read then does not count
				c.from, c.to, c.err = 0, 0, nil
				_, _ = io.WriteString(far, "more")
				within(t, 5*time.Second, "it is not quiet any more", func() bool { return !c.quiet() })
			}
			if got := i.get(); (got == c) != tt.kept {
				t.Errorf("got %v", got)
			}
		})
	}
}

// Those that were idle for long are closed, the others stay.
func TestIdleSweep(t *testing.T) {
	var i idleConns
	defer i.close()
	old, far := tcpPair(t)
	young, _ := tcpPair(t)
	i.put(newConn(old))
	i.put(newConn(young))
	i.mu.Lock()
	i.conns[0].since = time.Now().Add(-idleFor)
	i.mu.Unlock()
	i.sweep()
	_ = far.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := far.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the old one: %v", err)
	}
	if c := i.get(); c == nil || c.Conn != young {
		t.Errorf("the young one: %v", c)
	}
	if c := i.get(); c != nil {
		t.Errorf("and another: %v", c)
	}
}

// repeater is an upstream that gives the same bytes to each request, and notes on which connection each came.
type repeater struct {
	url    string
	answer string
	conns  atomic.Int64
	early  bool // answers before it reads the body

	mu  sync.Mutex
	got []int64 // lengths of bodies
	on  []int64 // numbers of connections
}

func startRepeater(t *testing.T, answer string, early bool) *repeater {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &repeater{url: "http://" + l.Addr().String(), answer: answer, early: early}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer context.AfterFunc(ctx, func() { c.Close() })()
				defer c.Close()
				s.serve(c, s.conns.Add(1))
			})
		}
	})
	t.Cleanup(func() { cancel(); l.Close(); wg.Wait() })
	return s
}

func (s *repeater) serve(c net.Conn, number int64) {
	from := bufio.NewReader(c)
	for {
		r, err := http.ReadRequest(from)
		if err != nil {
			return
		}
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			return
		}
		if s.early {
			_, _ = io.WriteString(c, s.answer)
		}
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.got, s.on = append(s.got, n), append(s.on, number)
		s.mu.Unlock()
		if !s.early {
			if _, err := io.WriteString(c, s.answer); err != nil {
				return
			}
		}
		if strings.Contains(s.answer, "Connection: close") {
			return
		}
	}
}

// TestConnectionsToVLLM: which answers let the connection be used again. All arrive whole, whatever the length of the request.
func TestConnectionsToVLLM(t *testing.T) {
	const chunkedEvents = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	for name, tt := range map[string]struct {
		answer string
		body   string // as the client gets it
		again  bool
	}{
		"its length":            {"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "{}", true},
		"an error":              {"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}", "{}", true},
		"nothing":               {"HTTP/1.1 204 No Content\r\n\r\n", "", true},
		"no bytes":              {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", true},
		"chunks":                {chunkedEvents + "9\r\ndata: a\n\n\r\n0\r\n\r\n", "data: a\n\n", true},
		"chunks with trailers":  {chunkedEvents + "9\r\ndata: a\n\n\r\n0\r\nX: y\r\n\r\n", "data: a\n\n", true},
		"an interim one before": {"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", "a", true},
		"it says it closes":     {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", "a", false},
		"to the end of it":      {"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc", "abc", false},
		"HTTP/1.0":              {"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", "a", false},
		"another answer behind": {"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb", "a", false},
	} {
		for _, early := range []bool{false, true} {
			for _, length := range []int{10, 3 * maxAtOnce} {
				for _, stream := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/early=%v/%d/stream=%v", name, early, length, stream), func(t *testing.T) {
						up := startRepeater(t, tt.answer, early)
						r := newRig(t, up.url)
						r.learned()
						body := fmt.Sprintf(`{"stream":%v,"messages":[%s]}`, stream, strings.Repeat(" ", length))
						before := up.conns.Load()
						for range 3 {
							a := r.send(http.MethodPost, string(chat), body)
							if a.err != nil || a.body != tt.body {
								t.Fatalf("%d %q, %v", a.status, a.body, a.err)
							}
							r.quiet()
							if tt.again && (!early || length < maxAtOnce) {
								eventually(t, "the connection is there for the next", func() bool {
									r.direct.idle.mu.Lock()
									defer r.direct.idle.mu.Unlock()
									return len(r.direct.idle.conns) == 1
								})
							}
						}
						up.mu.Lock()
						defer up.mu.Unlock()
						// A long request may still be on its way when its answer is whole: its connection cannot be used then.
						if used := up.conns.Load() - before; tt.again && !(early && length > maxAtOnce) && used != 1 || !tt.again && used != 3 {
							t.Errorf("%d connections", used)
						}
					})
				}
			}
		}
	}
}

// The head of an answer is bounded.
func TestHeadTooLong(t *testing.T) {
	for name, answer := range map[string]string{
		"one line":   "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", maxAnswerHeader) + "\r\n\r\n",
		"many lines": "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", maxAnswerHeader/6) + "\r\n",
	} {
		for _, stream := range []bool{false, true} {
			up := startRepeater(t, answer, false)
			r := newRig(t, up.url)
			a := r.send(http.MethodPost, string(chat), fmt.Sprintf(`{"stream":%v,"messages":[]}`, stream))
			if a.status != http.StatusBadGateway {
				t.Errorf("%s, stream %v: %d %.200s", name, stream, a.status, a.body)
			}
		}
	}
}

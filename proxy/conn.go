package proxy

import (
	"net"
	"sync"
	"syscall"
	"time"
)

// bigBuffer is the size of the buffers that answers go through, in bytes. None is held while vLLM is waited for.
const bigBuffer = 32 << 10

var bigBuffers = sync.Pool{New: func() any { return new([bigBuffer]byte) }}

// conn is a connection to vLLM that is read by the goroutine of its request. It has a buffer only while there is something
// in it: an open stream waits most of its time, and its buffers would be most of what it costs. It is not safe for
// concurrent use, but for writing and Close beside reading.
type conn struct {
	net.Conn
	raw      syscall.RawConn // nil where it cannot be waited without a buffer
	buf      *[bigBuffer]byte
	from, to int   // of buf, not read yet
	err      error // of the last read: there will be no more
	answered bool  // something came since the last request

	attempt func(fd uintptr) bool // fills the buffer if it can without waiting
	since   time.Time             // when it became idle
	peeked  [1]byte
}

func newConn(c net.Conn) *conn {
	n := &conn{Conn: c}
	if s, ok := c.(syscall.Conn); ok && canAttempt {
		n.raw, _ = s.SyscallConn()
	}
	n.attempt = n.tryFill
	return n
}

// more reports whether something has come that was not read yet.
func (c *conn) more() bool { return c.from < c.to }

// wait waits until something has come, or never will.
func (c *conn) wait() {
	if c.more() || c.err != nil {
		return
	}
	if c.raw != nil {
		if err := c.raw.Read(c.attempt); err != nil {
			c.err = err
		}
	} else {
		c.acquire()
		c.to, c.err = c.Conn.Read(c.buf[:])
	}
	c.answered = c.answered || c.more()
	c.letGo()
}

// Read waits until something has come.
func (c *conn) Read(p []byte) (int, error) {
	c.wait()
	if !c.more() {
		return 0, c.err
	}
	n := copy(p, c.buf[c.from:c.to])
	c.from += n
	c.letGo()
	return n, nil
}

// unread puts back the end of what was read last.
func (c *conn) unread(b []byte) {
	switch {
	case len(b) == 0:
	case c.buf != nil:
		c.from -= len(b)
	default:
		c.acquire()
		c.to = copy(c.buf[:], b)
	}
}

func (c *conn) acquire() {
	c.buf = bigBuffers.Get().(*[bigBuffer]byte)
	c.from, c.to = 0, 0
}

// letGo gives the buffer back if there is nothing in it.
func (c *conn) letGo() {
	if c.buf != nil && !c.more() {
		bigBuffers.Put(c.buf)
		c.buf = nil
	}
}

const (
	// idleFor is how long a connection may be idle: uvicorn closes one after 5 s, and it must never be used at that moment.
	idleFor = 2 * time.Second
	// maxIdle is how many are kept: all connections go to one host.
	maxIdle = 1 << 12
)

// idleConns keeps connections between two requests. The zero value is ready. It is safe for concurrent use.
type idleConns struct {
	mu     sync.Mutex
	conns  []*conn // the oldest first
	timer  *time.Timer
	closed bool
}

// get returns the newest connection that is as it was left, nil if there is none.
func (i *idleConns) get() *conn {
	for {
		i.mu.Lock()
		last := len(i.conns) - 1
		if last < 0 {
			i.mu.Unlock()
			return nil
		}
		c := i.conns[last]
		i.conns[last] = nil
		i.conns = i.conns[:last]
		i.mu.Unlock()
		if c.quiet() {
			c.answered = false
			return c
		}
		_ = c.Close()
	}
}

// put keeps a connection that has been used.
func (i *idleConns) put(c *conn) {
	c.since = time.Now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || c.raw == nil || len(i.conns) >= maxIdle {
		_ = c.Close()
		return
	}
	i.conns = append(i.conns, c)
	if i.timer == nil {
		i.timer = time.AfterFunc(idleFor, i.sweep)
	} else if len(i.conns) == 1 {
		i.timer.Reset(idleFor)
	}
}

// sweep closes those that have been idle for too long.
func (i *idleConns) sweep() {
	i.mu.Lock()
	defer i.mu.Unlock()
	old := 0
	for old < len(i.conns) && time.Since(i.conns[old].since) >= idleFor {
		_ = i.conns[old].Close()
		old++
	}
	i.conns = append(i.conns[:0:0], i.conns[old:]...)
	if len(i.conns) > 0 {
		i.timer.Reset(idleFor - time.Since(i.conns[0].since))
	}
}

// drop closes all.
func (i *idleConns) drop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, c := range i.conns {
		_ = c.Close()
	}
	i.conns = nil
}

// close closes all, and those that come later.
func (i *idleConns) close() {
	i.mu.Lock()
	i.closed = true
	if i.timer != nil {
		i.timer.Stop()
	}
	i.mu.Unlock()
	i.drop()
}

package proxy

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// A stream is open for long, and while it is, net/http's server keeps for it what only the beginning of a request needs:
// three buffers, a goroutine with the deep stack of a whole request, the request itself. So a streamed answer takes its
// connection from the server and goes on in a goroutine of its own, with a ResponseWriter that has no buffer at all: what
// is written is what is to be sent. docs/performance.md has what that saves. The client is told that the connection ends
// with the answer.

// detach lets the answer to r go on without net/http's server, if it can. The handler must return then.
func (p *Proxy) detach(ex *exchange, w http.ResponseWriter, r *http.Request) bool {
	if !ex.stream || r.ProtoMajor != 1 || r.ProtoMinor != 1 || r.Header.Get("Upgrade") != "" {
		return false
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return false // a test's, or HTTP/2
	}
	if c, ok := conn.(*client); ok {
		conn = c.Conn
	}
	_ = conn.SetDeadline(time.Time{})
	ctx, leave := context.WithCancel(context.WithoutCancel(r.Context()))
	stop := context.AfterFunc(p.running, func() {
		leave()
		_ = conn.SetDeadline(time.Unix(1, 0)) // so that a client that does not read holds nothing up
	})
	ex.ctx = ctx
	p.open.add(1)
	p.detached.add(1)
	go func() {
		defer p.detached.add(-1)
		defer stop()
		clientGone := make(chan struct{})
		go watch(conn, leave, clientGone)
		defer p.closeGently(conn, clientGone)
		defer p.open.add(-1)
		defer leave()
		out := &detached{conn: conn, ctx: ctx, gone: leave, header: http.Header{}}
		ex.out = out
		defer p.report(ex) // before the connection is closed, which would look like a client that left
		defer p.caught()
		p.forward(ex, http.HandlerFunc(p.relay), out, r.WithContext(ctx))
		out.end() // a client's next request is to find this one gone
	}()
	return true
}

// watch calls leave when the client has left, and closes gone then. As to net/http's server, a client that sends no more has.
// What it sends is its next request, which it will have to send again. It is read all the same: a connection that is closed
// with something in it that was not read is reset, and what the client has not got of its answer yet is lost.
func watch(conn net.Conn, leave func(), gone chan<- struct{}) {
	defer close(gone)
	defer leave()
	b := make([]byte, 1) // for nearly all there will be nothing
	for {
		if _, err := conn.Read(b); err != nil {
			return
		}
		if len(b) == 1 {
			b = make([]byte, 4<<10)
		}
	}
}

// lingerTime is how long a client may take to close the connection when its answer has ended. net/http's server has the same.
const lingerTime = 500 * time.Millisecond

// closeGently closes a connection when the client has, for what it still sends to a closed one resets that.
func (p *Proxy) closeGently(conn net.Conn, gone <-chan struct{}) {
	defer conn.Close()
	if c, ok := conn.(interface{ CloseWrite() error }); !ok || c.CloseWrite() != nil {
		return
	}
	wait := time.NewTimer(p.linger)
	defer wait.Stop()
	select {
	case <-gone:
	case <-wait.C:
	}
}

// caught keeps a panic from ending the process, as net/http's server does. An answer that broke off has no end, which is
// told by a panic too.
func (p *Proxy) caught() {
	if err := recover(); err != nil && err != http.ErrAbortHandler {
		p.log.Error("panic while an answer was passed on", "panic", fmt.Sprint(err), "stack", string(debug.Stack()))
	}
}

// detached is an http.ResponseWriter on a connection of its own. The lock is for interim answers, which another goroutine
// may pass on.
type detached struct {
	mu      sync.Mutex
	conn    net.Conn
	ctx     context.Context // ends when the client leaves
	gone    func()          // called when a write fails: the client has left
	header  http.Header
	trailer http.Header
	head    []byte // to be sent
	began   bool
	chunked bool
	left    int64 // of the body, where its length is known
	whole   bool  // the client has all of the answer
	err     error
}

func (d *detached) Header() http.Header { return d.header }

// WriteHeader makes the head of the answer, and sends that of an interim one.
func (d *detached) WriteHeader(status int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writeHeader(status)
}

func (d *detached) writeHeader(status int) {
	if d.began {
		return
	}
	interim := status >= 100 && status <= 199 && status != http.StatusSwitchingProtocols
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %03d %s\r\n", status, http.StatusText(status))
	without := map[string]bool{"Connection": true, "Transfer-Encoding": true}
	if interim || status == http.StatusNoContent {
		without["Content-Length"] = true // RFC 9110, section 8.6
	}
	if !interim {
		d.began = true
		if d.header.Get("Date") == "" {
			d.header.Set("Date", time.Now().UTC().Format(http.TimeFormat))
		}
		if status != http.StatusNoContent && status != http.StatusNotModified {
			length := d.header.Get("Content-Length")
			d.left, _ = strconv.ParseInt(length, 10, 64)
			d.chunked = length == ""
		}
	}
	_ = d.header.WriteSubset(&b, without)
	if d.chunked {
		b.WriteString("Transfer-Encoding: chunked\r\n")
	}
	if !interim {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString("\r\n")
	d.head = append(d.head, b.Bytes()...)
	if interim {
		d.send(nil)
	}
}

// Write sends p, and the head if it has not been sent.
func (d *detached) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.began {
		d.writeHeader(http.StatusOK)
	}
	if len(p) == 0 {
		return 0, d.err
	}
	if d.send(p); d.err != nil {
		return 0, d.err
	}
	return len(p), nil
}

// Flush sends the head if it has not been sent.
func (d *detached) Flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.began {
		d.writeHeader(http.StatusOK)
	}
	if len(d.head) > 0 {
		d.send(nil)
	}
}

var crlf = []byte("\r\n")

// maxChunkFrame is what the coding of a chunk of up to bigBuffer bytes adds to it, in bytes.
const maxChunkFrame = len("7fff\r\n") + len("\r\n")

// send sends the head, and p as a piece of the body, in one system call. They are copied together for that: a token is short.
func (d *detached) send(p []byte) {
	if d.err != nil {
		return
	}
	buf := bigBuffers.Get().(*[bigBuffer]byte)
	defer bigBuffers.Put(buf)
	b := append(buf[:0], d.head...)
	switch {
	case len(p) > 0 && d.chunked:
		b = append(strconv.AppendInt(b, int64(len(p)), 16), crlf...)
		b = append(append(b, p...), crlf...)
	case len(p) > 0:
		b = append(b, p...)
	}
	d.left -= int64(len(p))
	d.write(b, d.began && !d.chunked && d.left <= 0)
	d.head = nil
}

// write sends what may be the last of the answer. A client that had that may close the connection at once, and has not left
// early then.
func (d *detached) write(b []byte, last bool) {
	whole := last && d.ctx.Err() == nil
	if _, d.err = d.conn.Write(b); d.err != nil {
		d.gone()
	}
	d.whole = whole && d.err == nil
}

// given reports whether the client has got the whole answer.
func (d *detached) given() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.whole
}

// end sends the end of the body, with trailers.
func (d *detached) end() {
	d.Flush()
	if !d.chunked || d.err != nil {
		return
	}
	var b bytes.Buffer
	b.WriteString("0\r\n")
	_ = d.trailer.Write(&b)
	b.WriteString("\r\n")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.write(b.Bytes(), true)
}

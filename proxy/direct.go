package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// maxAtOnce is the size, in bytes, of a request body that the socket buffers surely take, so that writing it cannot wait
	// for vLLM to read while vLLM waits for its answer to be read.
	maxAtOnce = 32 << 10
	// maxAnswerHeader bounds the header of an answer, with those of interim answers before it, in bytes. It is as much as a
	// client may send by default.
	maxAnswerHeader = 1 << 20
)

var errSwitch = errors.New("vLLM switches protocols, which nobody asked for")

var errStatus = errors.New("malformed HTTP status code") // as net/http says of others

var errAnswerHeader = errors.New("response headers exceeded 1 MiB") // as net/http's Transport says it

// direct is the RoundTripper for requests whose body is there. It writes and reads in the goroutine of the request.
// net/http's Transport has two more goroutines for each connection, whose stacks and buffers are a good part of what an
// open stream costs, and the changes between them of what an answer costs. What it is not for goes to next.
type direct struct {
	transport *http.Transport // dials as this does
	next      http.RoundTripper
	idle      idleConns
}

func (d *direct) RoundTrip(r *http.Request) (*http.Response, error) {
	ex := exchangeOf(r.Context())
	upgrade := r.Header.Get("Upgrade")
	if ex == nil || ex.body == nil || r.URL.Scheme != "http" || upgrade != "" {
		resp, err := d.next.RoundTrip(r)
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode < 100: // net/http's server panics at those, and the client gets 200
			err = errStatus
		case resp.StatusCode == http.StatusSwitchingProtocols && (!listed(resp.Header, "Upgrade") || !strings.EqualFold(resp.Header.Get("Upgrade"), upgrade)):
			err = errSwitch // httputil.ReverseProxy would leave the connection open
		default:
			return resp, nil
		}
		_ = resp.Body.Close()
		return nil, err
	}
	body, err := ex.body.all()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	// A connection that vLLM is closing just then, because it was idle, fails with no byte of an answer: the request goes
	// out again on another. One that is new fails for good.
	for c := d.idle.get(); c != nil; c = d.idle.get() {
		resp, err := d.ask(c, r, body)
		if err == nil || c.answered || r.Context().Err() != nil || time.Since(began) > retryWithin {
			return resp, err
		}
	}
	address := r.URL.Host
	if r.URL.Port() == "" {
		address = net.JoinHostPort(r.URL.Hostname(), "80")
	}
	c, err := d.transport.DialContext(r.Context(), "tcp", address)
	if err != nil {
		return nil, err
	}
	return d.ask(newConn(c), r, body)
}

// ask sends a request with that body and reads the head of its answer.
func (d *direct) ask(c *conn, r *http.Request, body []byte) (*http.Response, error) {
	// A client that leaves is seen by vLLM at once.
	a := &directAnswer{conn: c, idle: &d.idle, ctx: r.Context(), release: context.AfterFunc(r.Context(), func() { _ = c.Close() })}
	err := a.send(r, body)
	if err == nil {
		a.resp, err = readHead(c, r)
	}
	if err != nil {
		_ = a.Close()
		return nil, a.cause(err)
	}
	resp := a.resp
	switch {
	case resp.StatusCode == http.StatusSwitchingProtocols:
		_ = a.Close()
		return nil, errSwitch
	case resp.Body == http.NoBody:
		a.ended(io.EOF)
	case len(resp.TransferEncoding) > 0: // ReadResponse takes none but chunked
		a.chunked = &chunked{}
	default:
		a.left = resp.ContentLength // -1: to the end of the connection
	}
	resp.Body = a
	return resp, nil
}

// writers are for the heads and bodies of requests.
var writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, 8<<10) }}

// send writes a request, in the background where its body is so long that vLLM may have to read first.
func (a *directAnswer) send(r *http.Request, body []byte) error {
	write := func() error {
		out := *r
		out.Body = http.NoBody // an empty one that is there would be sent in chunks
		if len(body) > 0 {
			// net/http knows that it need not wait for this reader, and sends the head along with the body.
			out.Body = io.NopCloser(bytes.NewReader(body))
		}
		w := writers.Get().(*bufio.Writer)
		defer writers.Put(w)
		to := &noting{Writer: a.conn}
		w.Reset(to)
		defer w.Reset(nil)
		err := out.Write(w)
		if err == nil {
			err = w.Flush()
		}
		if to.err != nil { // which net/http hides in one of its own
			return to.err
		}
		return err
	}
	// Where it fails, vLLM has closed the connection, perhaps with an answer before that: who reads finds out.
	if len(body) <= maxAtOnce {
		err := write()
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			return err
		}
		a.sent, a.broken = make(chan struct{}), err
		close(a.sent)
		return nil
	}
	a.sent = make(chan struct{})
	go func() {
		a.broken = write()
		close(a.sent)
	}()
	return nil
}

// noting is a writer that keeps the error it failed with.
type noting struct {
	io.Writer
	err error
}

func (n *noting) Write(p []byte) (int, error) {
	done, err := n.Writer.Write(p)
	if err != nil {
		n.err = err
	}
	return done, err
}

// heads are for the heads of answers.
var heads = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

// readHead reads the head of an answer. Interim ones go to the trace, as Transport does it.
func readHead(c *conn, r *http.Request) (*http.Response, error) {
	from := &io.LimitedReader{R: c, N: maxAnswerHeader}
	b := heads.Get().(*bufio.Reader)
	defer heads.Put(b)
	b.Reset(from)
	defer b.Reset(nil)
	for {
		resp, err := http.ReadResponse(b, r)
		switch {
		case err != nil && from.N <= 0:
			return nil, errAnswerHeader
		case err != nil:
			return nil, err
		case resp.StatusCode < 100:
			return nil, errStatus
		case resp.StatusCode > 199 || resp.StatusCode == http.StatusSwitchingProtocols:
			rest, _ := b.Peek(b.Buffered())
			c.unread(rest)
			return resp, nil
		}
		trace := httptrace.ContextClientTrace(r.Context())
		if trace == nil || trace.Got1xxResponse == nil || resp.StatusCode == http.StatusContinue {
			continue
		}
		if err := trace.Got1xxResponse(resp.StatusCode, textproto.MIMEHeader(resp.Header)); err != nil {
			return nil, err
		}
	}
}

// directAnswer is the body of an answer of vLLM's. When it is whole, its connection can be used again.
type directAnswer struct {
	conn    *conn
	idle    *idleConns
	ctx     context.Context // of the request
	release func() bool     // ends that the connection is closed with ctx
	resp    *http.Response
	closed  bool
	sent    chan struct{} // closed when the request is written, if that is in the background or has failed
	broken  error         // what that failed with

	chunked *chunked // nil if the length is known, or there is none
	left    int64    // of the body then, -1 to the end of the connection
	end     error    // that reading came to
	usable  bool     // the connection, after that
}

// wait waits until there is something to read, and holds no buffer until then.
func (a *directAnswer) wait() {
	if a.end == nil {
		a.conn.wait()
	}
}

func (a *directAnswer) Read(p []byte) (n int, err error) {
	for n == 0 && a.end == nil && len(p) > 0 {
		if n, err = a.read(p); err != nil {
			a.ended(err)
		}
	}
	if n > 0 {
		return n, nil
	}
	return 0, a.end
}

func (a *directAnswer) read(p []byte) (n int, err error) {
	switch {
	case a.chunked != nil:
		var used int
		if a.conn.wait(); a.conn.more() {
			n, used, err = a.chunked.decode(p, a.conn.buf[a.conn.from:a.conn.to])
			a.conn.from += used
			a.conn.letGo()
		} else {
			err = a.early()
		}
		if err == io.EOF {
			err = a.trailer()
		}
		return n, err
	case a.left > 0:
		if n, err = a.conn.Read(p[:min(int64(len(p)), a.left)]); err != nil {
			return n, a.early()
		}
		if a.left -= int64(n); a.left == 0 {
			err = io.EOF
		}
		return n, err
	default:
		n, err = a.conn.Read(p)
		if err != nil && err != io.EOF {
			err = a.cause(err)
		}
		return n, err
	}
}

// early is the error of a connection that ended before the answer.
func (a *directAnswer) early() error {
	if a.conn.err == io.EOF {
		return a.cause(io.ErrUnexpectedEOF)
	}
	return a.cause(a.conn.err)
}

// cause returns why a connection failed: err, or that the client left, for which it was closed.
func (a *directAnswer) cause(err error) error {
	if cause := a.ctx.Err(); cause != nil {
		return cause
	}
	return err
}

// trailer takes the trailer of an answer that is whole.
func (a *directAnswer) trailer() error {
	h, err := a.chunked.header()
	if err != nil {
		return err
	}
	if len(h) > 0 && a.resp.Trailer == nil {
		a.resp.Trailer = http.Header{}
	}
	for name, values := range h {
		a.resp.Trailer[name] = values
	}
	return io.EOF
}

// ended notes that there is nothing more to read. A client that leaves now does not matter to the connection any more.
func (a *directAnswer) ended(err error) {
	a.end = err
	a.usable = a.release() && err == io.EOF && a.left >= 0 && !a.resp.Close && !a.conn.more()
}

// lastWrites is how long what is left of a request may take when its answer is whole, as in net/http's Transport.
const lastWrites = 50 * time.Millisecond

// Close keeps the connection for the next request if both sides are done with this one. It may be called again, as that of
// net/http's bodies: the connection may be another request's by then.
func (a *directAnswer) Close() error {
	if a.closed {
		return nil
	}
	a.closed = true
	a.release()
	switch {
	case !a.usable:
		return a.conn.Close()
	case a.sent == nil:
		a.idle.put(a.conn)
		return nil
	}
	_ = a.conn.SetWriteDeadline(time.Now().Add(lastWrites))
	go func() {
		if <-a.sent; a.broken != nil || a.conn.SetWriteDeadline(time.Time{}) != nil {
			_ = a.conn.Close()
			return
		}
		a.idle.put(a.conn)
	}()
	return nil
}

package proxy

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"
)

const (
	// maxDirect is the size, in bytes, of a request body that the socket buffers surely take, so that writing it cannot wait
	// for vLLM to read while vLLM waits for its answer to be read.
	maxDirect = 32 << 10
	// readBuffer is the size of the buffer from which the chunks of an answer are read.
	readBuffer = 4 << 10
)

// direct is the RoundTripper for streamed answers: each has a connection to vLLM of its own, which is written and read in
// the goroutine of its request. net/http's Transport has two more goroutines for a connection, whose stacks are a good
// part of what an open stream costs. A connection that is not used again cannot be one that vLLM is closing just then.
// What it is not for goes to next.
type direct struct {
	transport *http.Transport // dials as this does
	next      http.RoundTripper
}

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	ex := exchangeOf(r.Context())
	if ex == nil || ex.body == nil || !ex.stream || r.URL.Scheme != "http" || r.ContentLength > maxDirect {
		return d.next.RoundTrip(r)
	}
	address := r.URL.Host
	if r.URL.Port() == "" {
		address = net.JoinHostPort(r.URL.Hostname(), "80")
	}
	conn, err := d.transport.DialContext(r.Context(), "tcp", address)
	if err != nil {
		return nil, err
	}
	// A client that leaves is seen by vLLM at once.
	release := context.AfterFunc(r.Context(), func() { _ = conn.Close() })
	from := &reader{conn: conn}
	if ex.out != nil {
		from.out, ex.out.more = ex.out, from.more
	}
	resp, err := ask(from, r)
	if err != nil {
		release()
		_ = conn.Close()
		if cause := r.Context().Err(); cause != nil {
			err = cause
		}
		return nil, err
	}
	resp.Body = &directBody{resp.Body, conn, release, r.Context()}
	return resp, nil
}

// ask sends a request and reads the head of its answer. Interim answers go to the trace, as Transport does it.
func ask(from *reader, r *http.Request) (*http.Response, error) {
	if err := r.Write(from.conn); err != nil {
		return nil, err
	}
	reader := bufio.NewReaderSize(from, readBuffer)
	for {
		resp, err := http.ReadResponse(reader, r)
		if err != nil || resp.StatusCode > 199 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, err
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

// reader reads what vLLM sends. Where that is more than fits into the buffer of who reads, as in a stream without pauses, it
// reads ahead, into a big buffer that it has only then.
type reader struct {
	conn     net.Conn
	out      *detached // gets what waits for more before a read that may wait itself; nil if there is none
	full     bool      // the last read filled its buffer
	ahead    *[bigBuffer]byte
	from, to int // of ahead, not read yet
}

func (r *reader) more() bool { return r.from < r.to }

func (r *reader) Read(p []byte) (int, error) {
	if r.more() {
		return r.take(p), nil
	}
	if r.out != nil {
		r.out.sendWaiting()
	}
	if !r.full {
		n, err := r.conn.Read(p)
		r.full = n == len(p)
		return n, err
	}
	r.ahead = bigBuffers.Get().(*[bigBuffer]byte)
	n, err := r.conn.Read(r.ahead[:])
	r.from, r.to, r.full = 0, n, n > len(p)
	return r.take(p), err
}

// take gives out what was read ahead, and the buffer back when it is empty.
func (r *reader) take(p []byte) int {
	n := copy(p, r.ahead[r.from:r.to])
	if r.from += n; !r.more() {
		bigBuffers.Put(r.ahead)
		r.ahead = nil
	}
	return n
}

// bigBuffer is the size of the buffers that streams without pauses use, in bytes.
const bigBuffer = 32 << 10

var bigBuffers = sync.Pool{New: func() any { return new([bigBuffer]byte) }}

// directBody closes the connection with the answer.
type directBody struct {
	io.ReadCloser
	conn    net.Conn
	release func() bool
	ctx     context.Context
}

func (b *directBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF && b.ctx.Err() != nil {
		err = b.ctx.Err() // it was closed for that
	}
	return n, err
}

func (b *directBody) Close() error {
	b.release()
	return b.conn.Close() // to close the body itself would be to read what is left of it
}

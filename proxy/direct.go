package proxy

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
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
	resp, err := ask(conn, r)
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
func ask(conn net.Conn, r *http.Request) (*http.Response, error) {
	if err := r.Write(conn); err != nil {
		return nil, err
	}
	reader := bufio.NewReaderSize(conn, readBuffer)
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

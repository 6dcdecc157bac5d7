package proxy

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// This file is about request bodies on their way to vLLM.

// retryWithin bounds how long after it was sent a request is sent again: a connection that was being closed fails at
// once, and a vLLM that dies of a request is not to get it twice.
const retryWithin = time.Second

// retrying sends a request again that went out on a connection which vLLM was closing just then, because it had been
// idle. Transport does so itself only where nothing was written at all, or where the method is idempotent, and the write
// of the header succeeds on a connection that the other end has closed.
type retrying struct{ next http.RoundTripper }

func (t retrying) RoundTrip(r *http.Request) (*http.Response, error) {
	ex := exchangeOf(r.Context())
	if ex == nil || ex.body == nil {
		return t.next.RoundTrip(r)
	}
	for out := r; ; {
		var reused, answered atomic.Bool
		trace := &httptrace.ClientTrace{
			GotConn:              func(c httptrace.GotConnInfo) { reused.Store(c.Reused) },
			GotFirstResponseByte: func() { answered.Store(true) },
		}
		began := time.Now()
		resp, err := t.next.RoundTrip(out.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
		if err == nil || !reused.Load() || answered.Load() || r.Context().Err() != nil || time.Since(began) > retryWithin {
			return resp, err
		}
		body, gone := ex.body.open()
		if gone != nil {
			return nil, err
		}
		again := *r
		if again.ContentLength != 0 { // an empty body that is there would be sent in chunks
			again.Body = body
		}
		out = &again
	}
}

// replayable is a request body that can be sent again, for a connection that vLLM closed before it took anything. Its
// bytes are let go of as soon as nobody needs them, which for a stream is long before the request ends.
type replayable struct{ bytes atomic.Pointer[[]byte] }

func newReplayable(b []byte) *replayable {
	r := &replayable{}
	r.bytes.Store(&b)
	return r
}

// drop ends that the body can be sent again. One that is being sent goes on.
func (r *replayable) drop() { r.bytes.Store(nil) }

// all returns the whole body.
func (r *replayable) all() ([]byte, error) {
	b := r.bytes.Load()
	if b == nil {
		return nil, http.ErrBodyReadAfterClose
	}
	return *b, nil
}

// open returns a reader of the whole body.
func (r *replayable) open() (io.ReadCloser, error) {
	if _, err := r.all(); err != nil {
		return nil, err
	}
	return &replay{from: r}, nil
}

// replay reads a body once. It holds the bytes from the first read to the last: one that is never read holds none.
type replay struct {
	from *replayable // nil after the first read
	left []byte
}

func (r *replay) Read(p []byte) (n int, err error) {
	if r.from != nil {
		if r.left, err = r.from.all(); err != nil {
			return 0, err
		}
		r.from = nil
	}
	if n = copy(p, r.left); n == 0 && len(p) > 0 {
		err = io.EOF
	}
	if r.left = r.left[n:]; len(r.left) == 0 {
		r.left = nil
	}
	return n, err
}

func (r *replay) Close() error { return nil }

// upload is a request body that streams through, and tells whether it has been read to its end. Where vLLM answers
// before that, the server may have to close the client's connection behind the answer, and with EnableFullDuplex it does
// not say so by itself: the client would send its next request on a connection that is being closed.
type upload struct {
	io.ReadCloser
	left   int64 // below 0: unknown
	ended  atomic.Bool
	broken atomic.Pointer[error] // that it ended in, which is the client's
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if u.left -= int64(n); err != nil || u.left == 0 {
		u.ended.Store(true)
	}
	if err != nil && err != io.EOF && err != http.ErrBodyReadAfterClose {
		u.broken.Store(&err)
	}
	return n, err
}

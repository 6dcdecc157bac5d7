package proxy

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"strings"
	"sync"
)

// relay forwards a request whose answer is streamed to a client of its own, as httputil.ReverseProxy does with all others.
// That one holds a buffer for as long as the answer lasts, and its loop stands on a deep stack.
func (p *Proxy) relay(w http.ResponseWriter, r *http.Request) {
	// A Transport, which is behind direct for TLS, reads in a goroutine of its own, even when RoundTrip is over.
	var mu sync.Mutex
	over := false
	trace := &httptrace.ClientTrace{Got1xxResponse: func(status int, header textproto.MIMEHeader) error {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			interim(w, status, http.Header(header))
		}
		return nil
	}}
	out := r.Clone(httptrace.WithClientTrace(r.Context(), trace))
	out.Close = false
	removeHopByHop(out.Header)
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header.Set("User-Agent", "") // or it would get Go's
	}
	p.rewrite(&httputil.ProxyRequest{In: r, Out: out})
	resp, err := p.direct.RoundTrip(out)
	mu.Lock()
	over = true
	mu.Unlock()
	if err != nil {
		p.failed(w, r, err)
		return
	}
	defer resp.Body.Close()
	delete(resp.Header, "Te") // which means nothing in an answer
	removeHopByHop(resp.Header)
	exchangeOf(r.Context()).answerBegan(resp)
	header := w.Header()
	for name, values := range resp.Header {
		header[name] = values
	}
	for name := range resp.Trailer {
		header.Add("Trailer", name)
	}
	w.WriteHeader(resp.StatusCode)
	client := w.(*detached)
	client.Flush()
	if pass(client, resp.Body) != nil {
		panic(http.ErrAbortHandler)
	}
	cleanTrailer(resp.Trailer)
	client.trailer = resp.Trailer
}

// interim passes on an answer that comes before the answer.
func interim(w http.ResponseWriter, status int, header http.Header) {
	h := w.Header()
	for name, values := range header {
		h[name] = values
	}
	w.WriteHeader(status)
	clear(h)
}

// waiter is a reader that can wait for what it will read.
type waiter interface{ wait() }

// pass passes a body on as it comes. A buffer is in use only while there is something in it.
func pass(to io.Writer, body io.Reader) error {
	waits, _ := body.(waiter)
	for {
		if waits != nil {
			waits.wait()
		}
		switch err := passOnce(to, body); err {
		case nil:
		case io.EOF:
			return nil
		default:
			return err
		}
	}
}

func passOnce(to io.Writer, body io.Reader) error {
	buf := bigBuffers.Get().(*[bigBuffer]byte)
	defer bigBuffers.Put(buf)
	n, err := body.Read(buf[:bigBuffer-maxChunkFrame])
	if n > 0 {
		if _, failed := to.Write(buf[:n]); failed != nil {
			return failed
		}
	}
	return err
}

// hopByHop are the headers that are between two neighbours only, besides those that Connection names (RFC 9110, section
// 7.6.1).
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te",
	"Trailer", "Transfer-Encoding", "Upgrade"}

func removeHopByHop(h http.Header) {
	trailers := false
	for _, te := range h["Te"] {
		for token := range strings.SplitSeq(te, ",") {
			trailers = trailers || strings.EqualFold(textproto.TrimString(token), "trailers")
		}
	}
	for _, names := range h["Connection"] {
		for name := range strings.SplitSeq(names, ",") {
			h.Del(textproto.TrimString(name))
		}
	}
	for _, name := range hopByHop {
		h.Del(name)
	}
	if trailers {
		h.Set("Te", "trailers")
	}
}

// cleanTrailer removes from a trailer what says where a message ends, or is between two neighbours only: a client that puts
// trailers among the headers must not be misled (RFC 9110, section 6.5.1).
func cleanTrailer(h http.Header) {
	delete(h, "Te") // which would come back
	removeHopByHop(h)
	h.Del("Content-Length")
}

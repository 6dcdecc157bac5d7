package proxy

import (
	"net/http"
	"time"
)

// This file is about requests that do not get as far as vLLM, and about connections on which nothing may follow.

// takes reports whether a request is for a path of vLLM's, and answers it if it is not. What net/http reads as a request
// may have no path: "CONNECT host:443" wants a connection to elsewhere, and of "GET http:x" or "GET *" nobody could say what
// to ask vLLM for.
func (p *Proxy) takes(w http.ResponseWriter, r *http.Request) bool {
	path := r.URL.Path
	switch {
	case r.Method == http.MethodConnect:
		p.refuse(w, r, http.StatusMethodNotAllowed, "CONNECT is for proxies that lead elsewhere: this one leads to vLLM only")
	case r.URL.Opaque != "", path != "" && path[0] != '/', path == "" && r.URL.Host == "":
		p.refuse(w, r, http.StatusBadRequest, "the request has no path that begins with /")
	default:
		return true
	}
	return false
}

// refuse answers a request that is not for vLLM.
func (p *Proxy) refuse(w http.ResponseWriter, r *http.Request, status int, message string) {
	ex := p.begin(other, r)
	defer p.report(ex)
	ex.status = status
	w.Header().Set("Connection", "close") // what follows may be meant as a part of it
	writeError(w, status, message, "invalid_request_error")
}

// EndsConnection reports whether nothing that comes behind the request in its connection may be taken for another one. A
// Content-Length beside Transfer-Encoding, and Transfer-Encoding in HTTP/1.0, are not there any more when net/http gives the
// request: it decides for one of the two, and a proxy before this one may have decided for the other.
func EndsConnection(r *http.Request) bool { return r.ContentLength < 0 || !r.ProtoAtLeast(1, 1) }

const (
	// placeWait is how long a request waits for a place. A client that sends its next one as soon as it has the answer
	// to the last may be quicker than this process is done with that.
	placeWait = 100 * time.Millisecond
	// retryAfter is what Retry-After says where there is none, in seconds.
	retryAfter = "1"
)

// enter takes a place for ex, one of those that may be answered at a time, and answers it if there is none. report gives it
// back. Without a body and an upgrade, a request costs vLLM little, as health checks and scrapes do: those need no place.
func (p *Proxy) enter(ex *exchange, w http.ResponseWriter, r *http.Request) bool {
	if p.places == nil || r.Header.Get("Upgrade") == "" && (r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions) {
		return true
	}
	wait := time.NewTimer(placeWait)
	defer wait.Stop()
	select {
	case p.places <- struct{}{}:
		ex.placed = true
		return true
	case <-r.Context().Done():
		ex.status = statusClientLeft
	case <-wait.C:
		ex.status = http.StatusTooManyRequests
		w.Header().Set("Retry-After", retryAfter)
		writeError(w, ex.status, "as many requests as --max-concurrent-requests allows are being answered: try again later", "rate_limit_error")
	}
	return false
}

//go:build unix

package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
)

// Most vLLMs run without --enable-prompt-tokens-details, so that their usage does not tell cached tokens. This one has to
// tell them, or there would be nothing to compare with: the relay gives the member another name, one that the sidecar does
// not know, of the same length.
var (
	detailsKey = []byte(`"prompt_tokens_details"`)
	hiddenKey  = []byte(`"hidden_tokens_details"`)
)

// startRelay puts a relay that hides cached tokens before a vLLM.
func startRelay(upstream string) (*httptest.Server, error) {
	to, err := url.Parse(upstream)
	if err != nil {
		return nil, err
	}
	return httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ModifyResponse: func(resp *http.Response) error {
			resp.Body = &hider{ReadCloser: resp.Body}
			return nil
		},
		Transport: &http.Transport{MaxIdleConnsPerHost: 128, DisableCompression: true},
	}), nil
}

// hider renames the member in what is read. The length stays, so Content-Length does too.
type hider struct {
	io.ReadCloser
	tail []byte // may be the beginning of the member's name
	err  error
}

func (h *hider) Read(p []byte) (int, error) {
	for h.err == nil {
		n := copy(p, h.tail)
		if n == len(p) {
			break // less room than a name: without renaming, rather than not at all
		}
		read, err := h.ReadCloser.Read(p[n:])
		h.err = err
		b := p[:n+read]
		for i := bytes.Index(b, detailsKey); i >= 0; i = bytes.Index(b, detailsKey) {
			copy(b[i:], hiddenKey)
		}
		h.tail = h.tail[:0]
		if err == nil {
			keep := partial(b)
			h.tail = append(h.tail, b[len(b)-keep:]...)
			b = b[:len(b)-keep]
		}
		if len(b) > 0 {
			return len(b), nil
		}
	}
	n := copy(p, h.tail)
	h.tail = h.tail[n:]
	if n == 0 && len(p) > 0 {
		return 0, h.err
	}
	return n, nil
}

// partial returns how many bytes at the end of b are a beginning of the member's name.
func partial(b []byte) int {
	for n := min(len(b), len(detailsKey)-1); n > 0; n-- {
		if bytes.HasSuffix(b, detailsKey[:n]) {
			return n
		}
	}
	return 0
}

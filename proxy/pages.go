package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const (
	// pageTimeout bounds how long vLLM may take for its metrics page when somebody scrapes it here.
	pageTimeout = 10 * time.Second
	maxPage     = 16 << 20
)

// healthy says that this process serves.
func (p *Proxy) healthy(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "ok\n")
}

// ready says that new requests are welcome. Whether vLLM is ready is for its own /health to say.
func (p *Proxy) ready(w http.ResponseWriter, r *http.Request) {
	if p.draining.Load() {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, "draining\n")
		return
	}
	p.healthy(w, r)
}

// metricsPage is vLLM's page with this process's families behind it, or those alone when vLLM has none to give.
func (p *Proxy) metricsPage(w http.ResponseWriter, r *http.Request) {
	page, err := p.upstreamPage(r)
	if err != nil {
		p.log.Debug("no metrics page of vLLM's to add to", "error", said(err))
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(page)
	if err := p.collectors.WriteText(w); err != nil {
		p.log.Warn("metrics page", "error", err)
	}
}

// upstreamPage returns vLLM's page as text 0.0.4, with a line end at its end.
func (p *Proxy) upstreamPage(r *http.Request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
	defer cancel()
	u := p.base.JoinPath("metrics")
	u.RawQuery = r.URL.RawQuery
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if auth := r.Header.Get("Authorization"); auth != "" {
		req.Header.Set("Authorization", auth)
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := p.transport.RoundTrip(req)
	if err != nil {
		if r.Context().Err() == nil { // the one who scrapes is still there, vLLM is not
			p.collectors.SetUpstreamUp(false)
			p.upstream.forget()
		}
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
		return nil, fmt.Errorf("status %s, content type %q", resp.Status, resp.Header.Get("Content-Type"))
	}
	page, err := io.ReadAll(io.LimitReader(resp.Body, maxPage))
	if err != nil {
		return nil, err
	}
	if len(page) > 0 && !bytes.HasSuffix(page, []byte("\n")) {
		page = append(page, '\n')
	}
	return page, nil
}

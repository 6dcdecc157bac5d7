package main

import (
	"bufio"
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
)

func TestHistograms(t *testing.T) {
	var h histograms
	for range 5 {
		h.begin()
	}
	h.end(3, 7, 20*time.Millisecond, 300*time.Millisecond)
	h.end(1, 9, time.Millisecond, 0)
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(h.page())), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := metrics.Parse(text)
	if err != nil || len(r.Series) != 1 {
		t.Fatalf("%v, %d series in\n%s", err, len(r.Series), text)
	}
	s := r.Series[0]
	if !s.Consistent || r.ProcessStart == 0 {
		t.Errorf("consistent %t, process %v", s.Consistent, r.ProcessStart)
	}
	if got, want := [...]float64{s.Count, s.Prefill, s.Decode, s.PromptTokens, s.GenerationTokens, s.ComputedTokens, s.Running},
		[...]float64{4, .061, .9, 64, 30, 64, 1}; got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The sidecar finds the streams of a bare upstream in its windows: their numbers are exact.
func TestWindow(t *testing.T) {
	l := listen(t)
	go func() { _ = (&upstream{groups: map[string]*group{}}).serve(l) }()
	p, err := proxy.New(proxy.Config{
		Upstream:   &url.URL{Scheme: "http", Host: l.Addr().String()},
		Log:        slog.New(slog.DiscardHandler),
		Collectors: metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{}),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	server := httptest.NewServer(p)
	defer server.Close()
	for _, bare := range []bool{false, true} {
		j := job{Addr: server.Listener.Addr().String(), Shape: shape{Run: "1", Together: 1, Events: 10, Interval: time.Millisecond, Bare: bare}}
		exact := false
		var body []byte
		// The sidecar may still be learning what the upstream is.
		for deadline := time.Now().Add(time.Minute); !exact && time.Now().Before(deadline); {
			conn, err := j.dial()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(j.request(j.Shape)); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			if body, err = io.ReadAll(resp.Body); err != nil {
				t.Fatal(err)
			}
			_ = conn.Close()
			exact = bytes.Contains(body, []byte(`"timings":{`)) && !bytes.Contains(body, []byte(`"estimated"`))
		}
		if !exact {
			t.Errorf("bare %t: no exact timings in\n%s", bare, body)
		}
	}
}

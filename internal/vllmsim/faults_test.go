package vllmsim

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

const streamBody = `{"prompt":"p","max_tokens":5,"ignore_eos":true,"stream":true}`

func TestMetricsModes(t *testing.T) {
	s, client := start(t, fast())
	filtered, whole := s.URL+"/metrics/"+filteredQuery, s.URL+"/metrics"
	for _, c := range []struct {
		mode        MetricsMode
		url         string
		status      int
		emptyAnswer bool
	}{
		{MetricsOK, filtered, 200, false},
		{MetricsUnauthorized, whole, 401, false},
		{MetricsNotFound, filtered, 404, false},
		{MetricsEmpty, whole, 200, true},
		{MetricsEmptyFiltered, filtered, 200, true},
		{MetricsEmptyFiltered, whole, 200, false},
	} {
		s.SetFaults(Faults{Metrics: c.mode})
		resp, body := get(t, client, c.url)
		if resp.StatusCode != c.status || (body == "") != c.emptyAnswer {
			t.Errorf("mode %d, %s: %d, %q", c.mode, c.url, resp.StatusCode, body)
		}
	}

	for _, f := range []Faults{{Metrics: MetricsHang}, {MetricsDelay: time.Hour}} {
		s.SetFaults(f)
		before := s.Stats().MetricsFull
		ctx, leave := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, whole, nil)
		done := make(chan error)
		go func() {
			resp, err := client.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			done <- err
		}()
		eventually(t, "the reading arrives", func() bool { return s.Stats().MetricsFull > before })
		leave()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%+v: %v", f, err)
		}
	}
}

func TestMetricsSetups(t *testing.T) {
	cfg := fast()
	cfg.FilteredMetrics, cfg.DisableLogStats = false, true
	cfg.Models = []string{`a"b`}
	s, client := start(t, cfg)
	_, page := get(t, client, s.URL+"/metrics/"+filteredQuery)
	if !strings.Contains(page, "process_start_time_seconds ") || strings.Contains(page, "vllm:") {
		t.Errorf("unfiltered, without vllm: %s", page)
	}
	req, _ := http.NewRequest(http.MethodGet, s.URL+"/metrics/", nil)
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	z, err := gzip.NewReader(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(z); err != nil || string(b) != page {
		t.Errorf("%v: %s", err, b)
	}
}

func TestDieInTheMiddle(t *testing.T) {
	s, client := start(t, fast())
	for _, burst := range []bool{false, true} {
		s.SetFaults(Faults{DieAfterEvents: 3, Burst: burst})
		resp, err := post(t, t.Context(), client, s.URL+"/v1/completions", streamBody)
		if err != nil {
			t.Fatal(err)
		}
		data, err := events(resp.Body)
		resp.Body.Close()
		if len(data) != 3 || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("burst %t: %d events, %v", burst, len(data), err)
		}
	}
	s.SetFaults(Faults{DieAfterEvents: -1})
	resp, err := post(t, t.Context(), client, s.URL+"/v1/completions", streamBody)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); len(b) != 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", b, err)
	}
	resp.Body.Close()

	s.SetFaults(Faults{DieAfterEvents: 1})
	resp, err = post(t, t.Context(), client, s.URL+"/v1/completions", `{"prompt":"p"}`)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); len(b) == 0 || int64(len(b)) >= resp.ContentLength || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%d bytes of %d, %v", len(b), resp.ContentLength, err)
	}
	resp.Body.Close()
}

func TestBurstIsTheSameStream(t *testing.T) {
	s, client := start(t, fast())
	body := strings.Replace(streamBody, "{", `{"request_id":"x",`, 1)
	plain := ask(t, client, s.URL+"/v1/completions", body)
	s.SetFaults(Faults{Burst: true})
	if burst := ask(t, client, s.URL+"/v1/completions", body); normalise(burst, false, false) != normalise(plain, false, false) {
		t.Errorf("%s\n%s", plain, burst)
	}
}

func TestHeaderDelay(t *testing.T) {
	s, client := start(t, fast())
	s.SetFaults(Faults{HeaderDelay: time.Hour})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	resp, err := post(t, ctx, client, s.URL+"/v1/completions", streamBody)
	if err == nil {
		resp.Body.Close()
		t.Fatal("headers came")
	}
	if st := s.Stats(); st.Requests != 0 {
		t.Errorf("%+v", st)
	}
}

func TestEarlyMetrics(t *testing.T) {
	s, client := start(t, fast())
	count := func() float64 {
		return samples(t, client, s.URL)["vllm:request_prefill_time_seconds_count"]
	}
	s.SetFaults(Faults{EarlyMetrics: time.Hour})
	ask(t, client, s.URL+"/v1/completions", streamBody)
	if got := samples(t, client, s.URL); got["vllm:request_prefill_time_seconds_count"] != 0 || got["vllm:generation_tokens_total"] != 5 {
		t.Errorf("%v finished, %v tokens", got["vllm:request_prefill_time_seconds_count"], got["vllm:generation_tokens_total"])
	}
	s.SetFaults(Faults{EarlyMetrics: time.Millisecond})
	ask(t, client, s.URL+"/v1/completions", `{"prompt":"p"}`)
	eventually(t, "the second is counted", func() bool { return count() == 1 })
}

func TestRestart(t *testing.T) {
	cfg := Default()
	cfg.DecodeStep = time.Millisecond
	s, client := start(t, cfg)
	ask(t, client, s.URL+"/v1/completions", streamBody)
	before := samples(t, client, s.URL)
	resp, err := post(t, t.Context(), client, s.URL+"/v1/completions", `{"prompt":"q","max_tokens":30000,"ignore_eos":true,"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	eventually(t, "it runs", func() bool { return s.Stats().Running == 1 })
	s.Restart()
	if _, err := events(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("stream ended with %v", err)
	}
	after := samples(t, client, s.URL)
	const started, finished = "process_start_time_seconds", "vllm:request_prefill_time_seconds_count"
	if before[finished] != 1 || after[finished] != 0 || after[started] <= before[started] {
		t.Errorf("finished %v, %v; started %v, %v", before[finished], after[finished], before[started], after[started])
	}
	if st := s.Stats(); st.Broken != 1 || st.Aborted != 0 || st.Requests != 2 {
		t.Errorf("%+v", st)
	}
	ask(t, client, s.URL+"/v1/completions", streamBody)
}

func TestAPIKey(t *testing.T) {
	cfg := fast()
	cfg.APIKey = "k"
	s, client := start(t, cfg)
	if resp, body := get(t, client, s.URL+"/v1/models"); resp.StatusCode != http.StatusUnauthorized || body != `{"error":"Unauthorized"}` {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	req, _ := http.NewRequest(http.MethodGet, s.URL+"/v1/models", nil)
	req.Header.Set("Authorization", "Bearer k")
	resp, err := client.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	resp.Body.Close()
	for _, path := range []string{"/metrics", "/health", "/version"} {
		if resp, _ := get(t, client, s.URL+path); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
}

func TestForcedUsage(t *testing.T) {
	cfg := fast()
	cfg.ForceIncludeUsage = true
	s, client := start(t, cfg)
	if got := ask(t, client, s.URL+"/v1/completions", streamBody); !strings.Contains(got, `"usage":{`) {
		t.Error(got)
	}
}

// Close with a stream, a queued request and a hanging reading in flight.
func TestCloseLeavesNothing(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	cfg := Default()
	cfg.MaxRunning = 1
	s, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.SetFaults(Faults{Metrics: MetricsHang})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	done := make(chan struct{})
	for range 2 {
		go func() {
			defer func() { done <- struct{}{} }()
			if resp, err := post(t, t.Context(), client, s.URL+"/v1/completions", `{"prompt":"p","max_tokens":30000,"ignore_eos":true,"stream":true}`); err == nil {
				_, _ = events(resp.Body)
				resp.Body.Close()
			}
		}()
	}
	go func() {
		defer func() { done <- struct{}{} }()
		if resp, err := client.Get(s.URL + "/metrics"); err == nil {
			resp.Body.Close()
		}
	}()
	eventually(t, "all are there", func() bool {
		st := s.Stats()
		return st.Running == 1 && st.Waiting == 1 && st.MetricsFull == 1
	})
	s.Close()
	s.Close() // twice is harmless
	for range 3 {
		<-done
	}
	goleak.VerifyNone(t, ignore)
}

package proxy

import (
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// families parses a page as Prometheus does and returns the names on it. A family that stands twice is an error.
func families(t *testing.T, page string) map[string]bool {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	parsed, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		t.Errorf("Prometheus cannot read the page: %v", err)
	}
	names := map[string]bool{}
	for name := range parsed {
		names[name] = true
	}
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, _, _ := strings.Cut(rest, " ")
			if strings.Count(page, "# TYPE "+name+" ") > 1 {
				t.Errorf("the family %s stands twice", name)
			}
		}
	}
	return names
}

func TestMetricsPage(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	for _, accept := range []string{"", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"} {
		a := r.send(http.MethodGet, "/metrics", "", "Accept", accept, "Accept-Encoding", "gzip")
		if a.status != http.StatusOK || !strings.HasPrefix(a.header.Get("Content-Type"), "text/plain; version=0.0.4") || a.header.Get("Content-Encoding") != "" {
			t.Errorf("status %d, %v", a.status, a.header)
		}
		names := families(t, a.body)
		for _, name := range []string{"vllm:request_prefill_time_seconds", "process_start_time_seconds", "vllm_timings_requests_total", "vllm_timings_process_start_time_seconds", "vllm_timings_go_goroutines"} {
			if !names[name] {
				t.Errorf("%s is missing", name)
			}
		}
		if !strings.Contains(a.body, "\nvllm_timings_upstream_up 1\n") {
			t.Error("vLLM is said to be down")
		}
	}
	// What is below /metrics is vLLM's alone.
	if a := r.send(http.MethodGet, "/metrics/?name[]=vllm:request_prefill_time_seconds_sum", ""); strings.Contains(a.body, "vllm_timings_") || !strings.Contains(a.body, "vllm:request_prefill_time_seconds_sum") {
		t.Errorf("%d %.300s", a.status, a.body)
	}
	// Ours alone, in the form that is asked for.
	if a := r.send(http.MethodGet, "/-/metrics", ""); strings.Contains(a.body, "vllm:") || !families(t, a.body)["vllm_timings_requests_total"] {
		t.Errorf("%d %.300s", a.status, a.body)
	}
	a := r.send(http.MethodGet, "/-/metrics", "", "Accept", "application/openmetrics-text;version=1.0.0")
	if !strings.HasPrefix(a.header.Get("Content-Type"), "application/openmetrics-text") || !strings.HasSuffix(a.body, "# EOF\n") {
		t.Errorf("not OpenMetrics: %v", a.header)
	}
}

// With vLLM down a scrape still tells that, at once, and without any request that failed before.
func TestMetricsPageWithoutVLLM(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.learned()
	vllm.Close()
	a := r.send(http.MethodGet, "/metrics", "")
	names := families(t, a.body)
	if a.status != http.StatusOK || !names["vllm_timings_build_info"] || strings.Contains(a.body, "vllm:") {
		t.Errorf("status %d, %.300s", a.status, a.body)
	}
	if !strings.Contains(a.body, "\nvllm_timings_upstream_up 0\n") {
		t.Error("vLLM is said to be up")
	}
}

// A page that vLLM does not give as Prometheus' text is not mixed with ours.
func TestMetricsPageOfSomethingElse(t *testing.T) {
	for contentType, body := range map[string]string{"text/html": "<p>", "application/json": "{}", "text/plain": "a 1"} {
		up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", contentType)
			_, _ = w.Write([]byte(body))
		})
		r := newRig(t, up.URL)
		a := r.send(http.MethodGet, "/metrics", "")
		if names := families(t, a.body); a.status != http.StatusOK || !names["vllm_timings_build_info"] || names["a"] != (body == "a 1") {
			t.Errorf("%s: status %d, %.200s", contentType, a.status, a.body)
		}
	}
}

func TestHealthPages(t *testing.T) {
	r := newRig(t, "http://"+freeAddress(t)) // they tell of this process, whatever vLLM does
	for _, method := range []string{http.MethodGet, http.MethodHead} {
		for _, path := range []string{"/-/healthy", "/-/ready"} {
			if a := r.send(method, path, ""); a.status != http.StatusOK || a.body != "ok\n" && method == http.MethodGet {
				t.Errorf("%s %s: %d %q", method, path, a.status, a.body)
			}
		}
	}
	r.Drain()
	if a := r.send(http.MethodGet, "/-/ready", ""); a.status != http.StatusServiceUnavailable || a.body != "draining\n" {
		t.Errorf("while it drains /-/ready is %d %q", a.status, a.body)
	}
	if a := r.send(http.MethodGet, "/-/healthy", ""); a.status != http.StatusOK {
		t.Errorf("while it drains /-/healthy is %d", a.status)
	}
	if n := r.metric("requests_total"); n != 0 {
		t.Errorf("pages of our own are counted as %v requests", n)
	}
}

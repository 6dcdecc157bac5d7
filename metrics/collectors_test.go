package metrics

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

var update = flag.Bool("update", false, "write testdata/exposition.txt and docs/metrics.md anew")

// ours are the families but those of the Go runtime and the process, whose
// values nobody can foretell.
func ours(t testing.TB, reg prometheus.Gatherer) []string {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		name := f.GetName()
		if !strings.HasPrefix(name, Prefix) {
			t.Errorf("%s lacks the prefix", name)
		}
		if !strings.HasPrefix(name, Prefix+"go_") && !strings.HasPrefix(name, Prefix+"process_") {
			names = append(names, name)
		}
	}
	return names
}

var testBuild = Build{Version: "v1.2.3", Commit: "abc", GoVersion: "go1.26"}

// exercised has every family moved in a known way.
func exercised(reg Registry) *Collectors {
	c := NewCollectors(reg, testBuild)
	c.SetUpstreamUp(true)
	for range 4 {
		c.RequestStarted()
	}
	c.RequestDone("chat", 200)
	c.RequestDone("chat", 200)
	c.RequestDone("completions", 0)
	c.ObserveTimings(Observation{
		Endpoint: "chat", Source: "window", Exact: true, Model: "tiny",
		PrefillSeconds: Known(0.25), DecodeSeconds: Known(2), PrefillRate: Known(400), DecodeRate: Known(32),
		PromptTokens: Known(100), CachedTokens: Known(900), PredictedTokens: Known(64),
	})
	// One token, cached tokens and prefill unknown.
	c.ObserveTimings(Observation{
		Endpoint: "completions", Source: "observed", Model: "tiny",
		PrefillRate: Value{}, DecodeSeconds: Maybe(0, true), DecodeRate: Known(0),
		PromptTokens: Maybe(int64(5), true), CachedTokens: Maybe(7, false), PredictedTokens: Known(1),
	})
	// Nonsense is not counted.
	c.ObserveTimings(Observation{
		Endpoint: "chat", Source: "native", Exact: true,
		PrefillSeconds: Known(math.NaN()), DecodeSeconds: Known(-1), PrefillRate: Known(math.Inf(1)),
		PromptTokens: Known(-3), PredictedTokens: Known(math.NaN()),
	})
	c.Unedited("chat", "n_choices")
	c.UpstreamError("refused")
	c.ClientDisconnected()
	c.ObserveOverhead(300 * time.Microsecond)
	began := time.Unix(0, 0)
	c.ObserveReading(Reading{Began: began, Ended: began.Add(700 * time.Microsecond)}, nil)
	c.ObserveReading(Reading{}, errors.New("refused"))
	c.ObserveReading(Reading{}, fmt.Errorf("x: %w", os.ErrDeadlineExceeded))
	c.ObserveWindow(1)
	c.ObserveWindow(5)
	return c
}

func TestExposition(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	exercised(reg)
	names := ours(t, reg)
	const golden = "testdata/exposition.txt"
	if *update {
		var b bytes.Buffer
		families, _ := reg.Gather()
		for _, f := range families {
			if strings.HasPrefix(f.GetName(), Prefix+"go_") || strings.HasPrefix(f.GetName(), Prefix+"process_") {
				continue
			}
			if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.Open(golden)
	if err != nil {
		t.Fatal(err)
	}
	defer want.Close()
	if err := testutil.GatherAndCompare(reg, want, names...); err != nil {
		t.Error(err)
	}
	// As Prometheus' own linter has it; the runtime's families are not ours.
	problems, err := testutil.GatherAndLint(reg, names...)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestPromtool runs the linter of an installed Prometheus over the text that
// is appended to vLLM's page.
func TestPromtool(t *testing.T) {
	promtool := needs.Program(t, "promtool", "prometheus")
	var text bytes.Buffer
	if err := exercised(prometheus.NewRegistry()).WriteText(&text); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), promtool, "check", "metrics")
	cmd.Stdin = &text
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestWriteTextAfterVLLM appends our families to vLLM's page, and reads all.
func TestWriteTextAfterVLLM(t *testing.T) {
	c := exercised(prometheus.NewRegistry())
	for _, v := range versions {
		page, _ := recording(t, v+"/metrics_full.txt")
		both := bytes.NewBuffer(bytes.Clone(page))
		if err := c.WriteText(both); err != nil {
			t.Fatal(err)
		}
		parser := expfmt.NewTextParser(model.LegacyValidation)
		families, err := parser.TextToMetricFamilies(bytes.NewReader(both.Bytes()))
		if err != nil {
			t.Fatalf("%s: %v", v, err) // a name that stands twice would be one
		}
		for _, name := range []string{"vllm:request_prefill_time_seconds", "vllm_timings_prefill_seconds", "process_start_time_seconds", "vllm_timings_process_start_time_seconds", "vllm_timings_go_info"} {
			if families[name] == nil {
				t.Errorf("%s: no %s", v, name)
			}
		}
		got, err := Parse(both.Bytes())
		if err != nil || len(got.Series) != 1 || got.ProcessStart != recorded[v+"/metrics_full.txt"].ProcessStart {
			t.Errorf("%s: our families spoil the page: %+v, %v", v, got, err)
		}
	}
}

func TestWriteTextPassesErrorsOn(t *testing.T) {
	c := NewCollectors(prometheus.NewRegistry(), testBuild)
	r, w := io.Pipe()
	_ = r.CloseWithError(io.ErrShortWrite)
	if err := c.WriteText(w); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
}

func TestHandlerNegotiates(t *testing.T) {
	c := exercised(prometheus.NewRegistry())
	for accept, want := range map[string]string{
		"":                             "text/plain",
		"text/plain;version=0.0.4":     "text/plain",
		"application/openmetrics-text": "application/openmetrics-text",
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/-/metrics", nil)
		r.Header.Set("Accept", accept)
		c.Handler().ServeHTTP(w, r)
		body := w.Body.String()
		if got := w.Header().Get("Content-Type"); w.Code != http.StatusOK || !strings.HasPrefix(got, want) {
			t.Errorf("%q: %d, %s", accept, w.Code, got)
		}
		if ends := strings.HasSuffix(body, "# EOF\n"); ends != strings.Contains(want, "openmetrics") {
			t.Errorf("%q: ends with EOF: %v", accept, ends)
		}
		if !strings.Contains(body, `vllm_timings_timings_total{endpoint="chat",exactness="exact",source="window"} 1`) {
			t.Errorf("%q: %s", accept, body)
		}
	}
}

func TestModelsAreBounded(t *testing.T) {
	reg := prometheus.NewRegistry()
	c := NewCollectors(reg, testBuild)
	one := func(m string) {
		c.ObserveTimings(Observation{Endpoint: "chat", Source: "native", Exact: true, Model: m, PredictedTokens: Known(1)})
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 100 {
				one(fmt.Sprint("m", i))
			}
		})
	}
	wg.Wait()
	if n := testutil.CollectAndCount(c.byModel.predicted); n != maxModels+1 {
		t.Errorf("%d label values", n)
	}
	sum := 0.0
	for i := range 100 {
		if c.models.byName[fmt.Sprint("m", i)] != nil {
			sum += testutil.ToFloat64(c.byModel.predicted.WithLabelValues(fmt.Sprint("m", i)))
		}
	}
	if other := testutil.ToFloat64(c.byModel.predicted.WithLabelValues(otherModel)); sum+other != 800 || sum != 8*maxModels {
		t.Errorf("%v of known models, %v of others", sum, other)
	}
}

func TestLabel(t *testing.T) {
	for in, want := range map[string]string{
		"":                              "unknown",
		"meta-llama/Llama 3":            "meta-llama/Llama 3",
		"a\xffb":                        "a_b",
		"\xff\xfe":                      "_",
		"モデル":                           "モデル",
		strings.Repeat("a", 128):        strings.Repeat("a", 128),
		strings.Repeat("a", 129):        strings.Repeat("a", 128),
		strings.Repeat("a", 127) + "é":  strings.Repeat("a", 127),
		strings.Repeat("a", 126) + "é":  strings.Repeat("a", 126) + "é",
		strings.Repeat("a", 125) + "😀":  strings.Repeat("a", 125),
		strings.Repeat("\x80", 200):     "_",
		strings.Repeat("a\x80", 100):    strings.Repeat("a_", 64),
		strings.Repeat("a", 127) + "é€": strings.Repeat("a", 127),
	} {
		got := label(in)
		if got != want || len(got) > maxLabel || !utf8.ValidString(got) {
			t.Errorf("label(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestBadLabelsDoNotPanic: client_golang panics on invalid UTF-8.
func TestBadLabelsDoNotPanic(t *testing.T) {
	reg := prometheus.NewRegistry()
	c := NewCollectors(reg, Build{})
	const bad = "\xff\"\n\\"
	c.RequestStarted()
	c.RequestDone(bad, -5)
	c.Unedited(bad, bad)
	c.UpstreamError(bad)
	c.ObserveTimings(Observation{Endpoint: bad, Source: bad, Model: bad})
	var b bytes.Buffer
	if err := c.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	if _, err := parser.TextToMetricFamilies(&b); err != nil {
		t.Error(err)
	}
}

func TestObservingDoesNotAllocate(t *testing.T) {
	c := NewCollectors(prometheus.NewRegistry(), testBuild)
	o := Observation{
		Endpoint: "chat", Source: "window", Exact: true, Model: "tiny",
		PrefillSeconds: Known(0.25), DecodeSeconds: Known(2), PrefillRate: Known(400), DecodeRate: Known(32),
		PromptTokens: Known(100), CachedTokens: Known(900), PredictedTokens: Known(64),
	}
	if n := testing.AllocsPerRun(100, func() {
		c.RequestStarted()
		c.ObserveTimings(o)
		c.ObserveOverhead(time.Millisecond)
		c.ObserveReading(Reading{}, nil)
		c.ObserveWindow(1)
		c.RequestDone("chat", 200)
	}); n != 0 {
		t.Errorf("%v allocations a request", n)
	}
}

//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

var (
	benchRounds  = flag.Int("bench-rounds", 1, "rounds of TestBenchServe")
	benchAtOnce  = flag.String("bench-at-once", "8", "numbers of requests at the same time in TestBenchServe")
	benchPrompts = flag.Int("bench-prompts", 64, "requests of each run of TestBenchServe")
)

// benchWay is a way to a vLLM.
type benchWay struct {
	name    string
	url     string
	sidecar *stack.Sidecar // nil if there is none
}

// benchRun is what vLLM's load generator measured, and what the sidecar read of vLLM meanwhile.
type benchRun struct {
	way                string
	tokens, ttft, itl  float64 // tokens per second, medians in ms
	readings, occupied float64 // readings per second, part of the time in which one was under way
}

// TestBenchServe runs vLLM's own load generator straight, through sidecars, and with a patched vLLM. All its requests
// succeed; its figures are printed and not judged, as they may be those of a busy machine.
func TestBenchServe(t *testing.T) {
	vllm := shared.exact.get(t)
	ways := []benchWay{
		{name: "straight", url: vllm.URL},
		{name: "straight again", url: vllm.URL}, // what two runs differ by that do not differ
		{name: "patched", url: shared.patched.get(t).URL},
	}
	for _, source := range []string{"native", "window"} {
		s := startSidecar(t, vllm.URL, "--sources", source)
		ways = append(ways, benchWay{"sidecar, " + source, s.URL, s})
	}
	var loads []string
	for n := range strings.SplitSeq(*benchAtOnce, ",") {
		for _, endpoint := range []string{"openai-chat /v1/chat/completions", "openai /v1/completions"} {
			loads = append(loads, endpoint+" "+n)
		}
	}
	// All runs of a load have the same prompts, which are in the prefix cache after the first round: that one does not count.
	var order []benchWay
	args := []string{filepath.Join("clients", "bench.py"), stack.ModelDir(shared.vllm)}
	for _, load := range loads {
		backend := strings.Fields(load)
		for round := range 1 + *benchRounds {
			// Not in turn: no way always has the same neighbours.
			for _, i := range rand.New(rand.NewPCG(1, uint64(round))).Perm(len(ways)) {
				order = append(order, ways[i])
				args = append(args, backend[0], backend[1], ways[i].url, backend[2], strconv.Itoa(*benchPrompts))
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(shared.vllm), "python"), args...)
	cmd.Env = append(os.Environ(), "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1", "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var runs []benchRun
	count, seconds := readings(t, order[0].sidecar) // so far, of the way that is under way
	for lines := bufio.NewScanner(out); len(runs) < len(order) && lines.Scan(); {
		way, line := order[len(runs)], gjson.Parse(lines.Text())
		got := benchRun{way: way.name, tokens: line.Get("output_throughput").Float(), ttft: line.Get("median_ttft_ms").Float(), itl: line.Get("median_itl_ms").Float()}
		prompts := int64(*benchPrompts)
		if line.Get("completed").Int() != prompts || line.Get("failed").Int() != 0 || line.Get("total_output_tokens").Int() != prompts*32 {
			t.Errorf("%s: not all of %d requests for 32 tokens succeeded: %s", way.name, prompts, line.Raw)
		}
		if way.sidecar != nil {
			n, s := readings(t, way.sidecar)
			duration := line.Get("duration").Float()
			got.readings, got.occupied = (n-count)/duration, (s-seconds)/duration
		}
		if runs = append(runs, got); len(runs) < len(order) {
			count, seconds = readings(t, order[len(runs)].sidecar)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("vllm bench serve: %v\n%s", err, log.String()[max(0, log.Len()-3000):])
	}
	if len(runs) != len(order) {
		t.Fatalf("%d runs, want %d", len(runs), len(order))
	}
	t.Logf("vllm bench serve:\n%s", benchTable(loads, ways, runs))
	for _, way := range ways {
		if way.sidecar == nil {
			continue
		}
		checkNoFaults(t, way.sidecar)
		timed := 0.
		for _, m := range sidecarMetrics(t, way.sidecar)["vllm_timings_timings_total"].GetMetric() {
			timed += m.GetCounter().GetValue()
		}
		if runs := float64(len(loads) * (1 + *benchRounds)); timed < 32*runs { // each has a request of its own before it begins
			t.Errorf("%s: only %v answers of %v runs had timings", way.name, timed, runs)
		}
	}
}

// readings returns how many readings of vLLM's metrics a sidecar has made, and their time in seconds. No sidecar makes none.
func readings(t *testing.T, s *stack.Sidecar) (count, seconds float64) {
	t.Helper()
	if s == nil {
		return 0, 0
	}
	for _, m := range sidecarMetrics(t, s)["vllm_timings_window_reading_seconds"].GetMetric() {
		count, seconds = float64(m.GetHistogram().GetSampleCount()), m.GetHistogram().GetSampleSum()
	}
	return count, seconds
}

func sidecarMetrics(t *testing.T, s *stack.Sidecar) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(get(t, s.URL+"/-/metrics").body))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// benchTable has the medians over the rounds, and the ratio to the straight run of the same round with its range.
func benchTable(loads []string, ways []benchWay, runs []benchRun) string {
	var b strings.Builder
	b.WriteString("| load | figure |")
	for _, way := range ways {
		b.WriteString(" " + way.name + " |")
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---:|", len(ways)) + "\n")
	rounds := len(runs)/len(loads)/len(ways) - 1
	for i, load := range loads {
		of := runs[(i*(1+rounds)+1)*len(ways):]
		for _, figure := range []struct {
			name, format string
			value        func(benchRun) float64
			ratio        bool
		}{
			{"tokens/s", "%.0f", func(r benchRun) float64 { return r.tokens }, true},
			{"TTFT p50, ms", "%.0f", func(r benchRun) float64 { return r.ttft }, true},
			{"ITL p50, ms", "%.1f", func(r benchRun) float64 { return r.itl }, true},
			{"readings per second", "%.1f", func(r benchRun) float64 { return r.readings }, false},
			{"part of the time in which one was under way, %", "%.1f", func(r benchRun) float64 { return 100 * r.occupied }, false},
		} {
			fmt.Fprintf(&b, "| %s | %s |", load, figure.name)
			for _, way := range ways {
				var values, ratios []float64
				for round := range rounds {
					in := func(name string) float64 {
						of := of[round*len(ways):]
						return figure.value(of[slices.IndexFunc(of, func(r benchRun) bool { return r.way == name })])
					}
					values = append(values, in(way.name))
					ratios = append(ratios, in(way.name)/in(ways[0].name))
				}
				slices.Sort(values)
				slices.Sort(ratios)
				switch {
				case figure.ratio && way.name != ways[0].name:
					fmt.Fprintf(&b, " %.2f (%.2f to %.2f) |", ratios[rounds/2], ratios[0], ratios[rounds-1])
				case figure.ratio:
					fmt.Fprintf(&b, " "+figure.format+" ("+figure.format+" to "+figure.format+") |", values[rounds/2], values[0], values[rounds-1])
				case way.sidecar == nil:
					b.WriteString(" |")
				default:
					fmt.Fprintf(&b, " "+figure.format+" |", values[rounds/2])
				}
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

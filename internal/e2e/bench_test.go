//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestBenchServe runs vLLM's own load generator straight, through the sidecar, and with a patched vLLM. All its requests
// succeed; its figures are printed and not judged, as they are those of a busy machine.
func TestBenchServe(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL)
	patched := shared.patched.get(t)
	ways := []struct{ name, url string }{{"straight", vllm.URL}, {"sidecar", sidecar.URL}, {"patched", patched.URL}}
	args := []string{filepath.Join("clients", "bench.py"), stack.ModelDir(shared.vllm)}
	for _, run := range []string{"openai-chat /v1/chat/completions", "openai /v1/completions"} {
		for range 2 {
			for _, way := range ways {
				args = append(args, append(strings.Fields(run), way.url)...)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(shared.vllm), "python"), args...)
	cmd.Env = append(os.Environ(), "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1", "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	log, err := os.Create(filepath.Join(t.TempDir(), "bench.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cmd.Stderr = log
	out, err := cmd.Output()
	if err != nil {
		text, _ := os.ReadFile(log.Name())
		t.Fatalf("vllm bench serve: %v\n%s", err, text[max(0, len(text)-3000):])
	}

	var table strings.Builder
	fmt.Fprintf(&table, "%-12s %-8s %9s %9s %9s %9s %9s %9s\n", "backend", "way", "completed", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
	var runs int
	for line := range strings.Lines(string(out)) {
		run := gjson.Parse(line)
		way := ways[runs%len(ways)].name
		runs++
		fmt.Fprintf(&table, "%-12s %-8s %9d %9.1f %9.1f %9.1f %9.2f %9.2f\n", run.Get("backend").Str, way, run.Get("completed").Int(),
			run.Get("output_throughput").Float(), run.Get("median_ttft_ms").Float(), run.Get("p99_ttft_ms").Float(),
			run.Get("median_itl_ms").Float(), run.Get("p99_itl_ms").Float())
		if run.Get("completed").Int() != 64 || run.Get("failed").Int() != 0 || run.Get("total_output_tokens").Int() != 64*32 {
			t.Errorf("not all of 64 requests for 32 tokens succeeded: %s", line)
		}
	}
	if want := 2 * 2 * len(ways); runs != want {
		t.Errorf("%d runs, want %d:\n%s", runs, want, out)
	}
	t.Logf("vllm bench serve, times in ms:\n%s", table.String())
	checkNoFaults(t, sidecar)
	if page := string(get(t, sidecar.URL+"/-/metrics").body); !strings.Contains(page, `vllm_timings_timings_total{endpoint="/v1/chat/completions",exactness="exact",source="native"}`) {
		t.Errorf("its answers had no timings:\n%s", page)
	}
}

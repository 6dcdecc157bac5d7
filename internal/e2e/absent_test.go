//go:build e2e

package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// checkDown checks what a sidecar says while there is no vLLM behind it.
func checkDown(t *testing.T, s *stack.Sidecar, upstream string) {
	t.Helper()
	a := send(t, s.URL, newRequest("chat", "tiny", "anybody there?", 3, ""))
	message := gjson.GetBytes(a.body, "error.message").String()
	if a.status != http.StatusBadGateway || !strings.Contains(message, strings.TrimPrefix(upstream, "http://")) {
		t.Errorf("without vLLM: status %d, %s; want 502 and an error that names %s", a.status, a.body, upstream)
	}
	if a := get(t, s.URL+"/-/healthy"); a.status != http.StatusOK {
		t.Errorf("without vLLM: /-/healthy is %d, want 200: it is about the sidecar alone", a.status)
	}
	if a := get(t, s.URL+"/health"); a.status == http.StatusOK {
		t.Error("without vLLM: /health is 200; llama-swap would send requests")
	}
}

// TestLateVLLM: llama-swap starts models on demand, so the sidecar is there first. This file comes
// first in the alphabet, so this test runs while the shared vLLM is still starting.
func TestLateVLLM(t *testing.T) {
	select {
	case <-shared.plain.ready:
		if !shared.plain.started() {
			t.Fatal("this test needs a vLLM that starts later: run it without E2E_VLLM_PLAIN")
		}
		t.Log("vLLM is up already; TestVLLMRestarts covers its absence")
	default:
		checkDown(t, shared.early, shared.plain.url)
	}
	shared.plain.get(t)
	checkSoonExact(t, shared.early)
}

// checkSoonExact checks that a sidecar has found a vLLM that has just appeared: within a few requests its figures are
// vLLM's own. The very first ones may be estimated, as there was no reading before them.
func checkSoonExact(t *testing.T, s *stack.Sidecar) {
	t.Helper()
	var last string
	waitFor(t, 20*time.Second, "a request alone has exact timings", func() bool {
		a := send(t, s.URL, newRequest("chat", "tiny", "good morning", 8, `"stream":true`))
		timings, _ := a.member("timings") // windows alone give the first none
		last = timings.Raw
		return timings.Exists() && !timings.Get("estimated").Exists() && timings.Get("prompt_ms").Float() > 0
	})
	t.Logf("timings: %s", last)
}

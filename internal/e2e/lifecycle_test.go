//go:build e2e

package e2e

import (
	"bufio"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

func get(t *testing.T, url string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: body}
}

var running = regexp.MustCompile(`(?m)^vllm:num_requests_running\{[^}]*\} (\S+)$`)

// TestClientLeaves: vLLM stops working for a client that is gone.
func TestClientLeaves(t *testing.T) {
	vllm := shared.plain.get(t)
	sidecar := startSidecar(t, vllm.URL)
	for range 3 {
		const story = 3500 // tokens
		before := readCounters(t, vllm.URL)["vllm:generation_tokens_total"]
		r := newRequest("chat", "tiny", "a very long story", story, `"stream":true`)
		resp, err := http.Post(sidecar.URL+r.path, "application/json", strings.NewReader(r.body))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		waitFor(t, 3*time.Second, "vLLM has no request running after the client left", func() bool {
			m := running.FindSubmatch(get(t, vllm.URL+"/metrics").body)
			return m != nil && string(m[1]) == "0.0"
		})
		if made := readCounters(t, vllm.URL)["vllm:generation_tokens_total"] - before; made <= 0 || made >= story {
			t.Errorf("vLLM made %v tokens for a client that left, of %d", made, story)
		}
	}
	// The next one is not mixed up with those.
	checkAlone(t, answer{}, send(t, sidecar.URL, newRequest("text", "tiny", longPrompt("after"), 8, "")).timings(t), false)
}

// TestVLLMRestarts: vLLM dies in the middle of an answer and comes back; the sidecar stays.
func TestVLLMRestarts(t *testing.T) {
	vllm := shared.plain.get(t)
	if !shared.plain.started() {
		t.Fatal("this test kills vLLM: run it without E2E_VLLM_PLAIN")
	}
	sidecar := startSidecar(t, vllm.URL)
	checkSoonExact(t, sidecar)

	r := newRequest("chat", "tiny", "a very long story", 3500, `"stream":true`)
	resp, err := http.Post(sidecar.URL+r.path, "application/json", strings.NewReader(r.body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body := bufio.NewReader(resp.Body)
	for range 20 {
		if _, err := body.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	vllm.Kill()
	rest, err := io.ReadAll(body)
	if err == nil {
		t.Errorf("the answer of a vLLM that died ended cleanly; its end: %q", rest[max(0, len(rest)-300):])
	}
	if strings.Contains(string(rest), `"timings"`) || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the answer of a vLLM that died got an end of its own: %q", rest[max(0, len(rest)-300):])
	}
	checkDown(t, sidecar, vllm.URL)

	if err := vllm.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkSoonExact(t, sidecar)
	// The counters began again at nothing: windows go on from there.
	for _, stream := range []string{"", `"stream":true`} {
		a := send(t, sidecar.URL, newRequest("chat", "tiny", longPrompt("again "+stream), 8, stream))
		checkAlone(t, a, a.timings(t), false)
	}
}

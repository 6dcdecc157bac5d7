//go:build linux

package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// swapping is a llama-swap with two models, of which it runs one at a time.
func startSwapping(t *testing.T, mark, config string) *stack.LlamaSwap {
	t.Helper()
	llamaSwap, err := stack.FindLlamaSwap()
	if err != nil {
		needs.Unable(t, err)
	}
	t.Setenv(markVar, mark)
	swap, err := stack.StartLlamaSwap(t.Context(), llamaSwap, t.TempDir(), "llama-swap", config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		swap.Stop()
		if t.Failed() {
			t.Logf("llama-swap's log:\n%s", swap.Tail(8000))
		}
	})
	return swap
}

// askModel asks for a model and returns the error or what is wrong with the answer.
func askModel(url, model string) error {
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(
		`{"model":%q,"max_tokens":3,"ignore_eos":true,"messages":[{"role":"user","content":"one two three"}]}`, model)))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if got := gjson.GetBytes(body, "model").String(); err != nil || resp.StatusCode != http.StatusOK || got != model || gjson.GetBytes(body, "timings.predicted_n").Int() != 3 {
		return fmt.Errorf("%s: %s %v: %s", model, resp.Status, err, body)
	}
	return nil
}

func unloadAll(t *testing.T, url string) {
	t.Helper()
	resp := post(t, url+"/api/models/unload", "")
	if body := readAll(t, resp); resp.StatusCode != http.StatusOK {
		t.Fatalf("unload: %s %s", resp.Status, body)
	}
}

// TestRunLlamaSwap: llama-swap loads, swaps and unloads two models, 20 times, with requests for both at once: none is lost,
// each has its timings, and nothing is left of a model that was unloaded.
func TestRunLlamaSwap(t *testing.T) {
	program, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("startPort: %s\nlogToStdout: both\nmodels:\n", freePort(t, 2))
	for _, model := range []string{"a", "b"} {
		config += fmt.Sprintf("  %s:\n    cmd: %s run --listen 127.0.0.1:${PORT} --native-metrics on -- env %s=vllm GORACE=atexit_sleep_ms=0 %s serve --served-model-name %s\n",
			model, program, roleVar, self, model)
	}
	mark := fmt.Sprintf("llama-swap-%d", time.Now().UnixNano())
	swap := startSwapping(t, mark, config)
	const rounds, each = 20, 3
	asked := 0
	for range rounds {
		var wg sync.WaitGroup
		for _, model := range []string{"a", "b"} {
			for range each {
				asked++
				wg.Go(func() {
					if err := askModel(swap.URL, model); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
		unloadAll(t, swap.URL)
		var left []int
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
			if left = marked(mark); len(left) == 1 { // llama-swap
				break
			}
		}
		if len(left) != 1 {
			t.Fatalf("left after all models were unloaded: %v", left)
		}
		if t.Failed() {
			return
		}
	}
	log := swap.Tail(1 << 20)
	if n := strings.Count(log, "once more, with another port"); n > 0 {
		t.Errorf("%d port clashes", n)
	}
	if n := strings.Count(log, `msg="vLLM is ready"`); n < 2*rounds {
		t.Errorf("only %d loads for %d requests", n, asked)
	} else {
		t.Logf("%d loads, %d requests", n, asked)
	}
}

//go:build unix

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/cmd/vllm-timings/launch"
	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// fakeVLLM is the command `vllm serve MODEL --served-model-name NAME ... --port PORT`, or `docker run ... -p ADDR:PORT:8000`
// with the same behind the image, with a simulated vLLM behind it.
const fakeVLLM = `#!/bin/sh
flags=
while [ $# -gt 0 ]; do
	case $1 in
	--served-model-name) name=$2 ;;
	--port) port=$2 ;;
	-p) port=${2%:8000}; port=${port#127.0.0.1:} ;;
	--enable-sleep-mode) flags=$1 ;;
	esac
	shift
done
echo $$ >>"$FAKE_VLLM_PIDS"
exec simserver --listen "127.0.0.1:$port" --model "$name" --decode-step 1ms $flags
`

// TestLlamaSwapExamples starts llama-swap with each example in deploy/llama-swap as it stands, but for the ports, and
// looks at what its Activity page shows.
func TestLlamaSwapExamples(t *testing.T) {
	llamaSwap, err := stack.FindLlamaSwap()
	if err != nil {
		needs.Unable(t, err)
	}
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if out, err := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(bin, "simserver"), "../../internal/vllmsim/simserver").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, command := range []string{"vllm", "docker"} {
		if err := os.WriteFile(filepath.Join(bin, command), []byte(fakeVLLM), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// The daemon in sleep.yaml outlives llama-swap, as it is to, and has a log.
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	pids := filepath.Join(t.TempDir(), "pids")
	t.Setenv("FAKE_VLLM_PIDS", pids)
	t.Cleanup(func() {
		text, _ := os.ReadFile(pids)
		for word := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	t.Setenv("PATH", strings.Join([]string{bin, filepath.Dir(file), os.Getenv("PATH")}, string(os.PathListSeparator)))

	for name, models := range map[string][]string{
		"peer":   {"qwen3-8b", "vllm/qwen3-8b"},
		"cmd":    {"qwen3-8b", "qwen3-8b-elsewhere"},
		"docker": {"qwen3-8b"},
		"sleep":  {"qwen3-8b"},
	} {
		t.Run(name, func(t *testing.T) {
			// Of the vLLM that is there, of the one that llama-swap starts, and the first of two in a row of llama-swap's own.
			ports := []string{freePort(t, 1), freePort(t, 1), freePort(t, 2)}
			vllm := exec.Command("vllm", "serve", "--served-model-name", "qwen3-8b", "--port", ports[0])
			if err := vllm.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = vllm.Process.Kill()
				_ = vllm.Wait()
			})
			sidecar := startBinary(t, "--upstream", "http://127.0.0.1:"+ports[0], "--listen", "127.0.0.1:0")
			sidecar.log.await(t, "found vLLM 0.32.0")

			config, err := os.ReadFile("../../deploy/llama-swap/" + name + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			edited := strings.NewReplacer("127.0.0.1:8000", "127.0.0.1:"+ports[0], ": 9001", ": "+ports[1],
				"http://127.0.0.1:8010", sidecar.url).Replace(string(config))
			swap, err := stack.StartLlamaSwap(t.Context(), llamaSwap, t.TempDir(), "llama-swap", "startPort: "+ports[2]+"\n"+edited)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				swap.Stop()
				if t.Failed() {
					t.Logf("llama-swap's log:\n%s", swap.Tail(4000))
				}
			})
			last := 0
			ask := func(model, stream string) (entry stack.Activity, body, timings string) {
				body = readAll(t, post(t, swap.URL+"/v1/chat/completions", fmt.Sprintf(
					`{"model":%q,"stream":%s,"max_tokens":7,"ignore_eos":true,"messages":[{"role":"user","content":"one two three"}]}`, model, stream)))
				_, timings, _ = strings.Cut(body, `"timings":`)
				entry, err := swap.ActivityAfter(t.Context(), last)
				if err != nil {
					t.Fatal(err)
				}
				last = entry.ID
				return entry, body, timings
			}
			for _, model := range models {
				// What llama-swap has just started has yet to learn that vLLM is there.
				for end := time.Now().Add(patience); ; {
					if _, body, timings := ask(model, "false"); timings != "" {
						break
					} else if time.Now().After(end) {
						t.Fatalf("still no timings in %s", body)
					}
				}
				for _, stream := range []string{"false", "true"} {
					entry, body, timings := ask(model, stream)
					want := entry
					want.Status = 200
					want.Tokens.Output = 7
					want.Tokens.PromptPerSecond = gjson.Get(timings, "prompt_per_second").Float()
					want.Tokens.TokensPerSecond = gjson.Get(timings, "predicted_per_second").Float()
					if entry != want || want.Tokens.PromptPerSecond <= 0 || want.Tokens.TokensPerSecond <= 0 {
						t.Errorf("%s, stream %s: llama-swap shows %+v\nfor %s", model, stream, entry, body)
					}
				}
			}
		})
	}
}

// freePort returns the first of n ports in a row, none of which the kernel gives to somebody who asks for any.
func freePort(t *testing.T, n int) string {
	t.Helper()
next:
	for range 100 {
		first, err := launch.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if launch.PortTaken(net.JoinHostPort("127.0.0.1", strconv.Itoa(first+i))) {
				continue next
			}
		}
		return strconv.Itoa(first)
	}
	t.Fatalf("no %d free ports in a row", n)
	return ""
}

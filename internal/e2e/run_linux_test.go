//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestRun: llama-swap starts vLLM by `vllm-timings run`, as in deploy/llama-swap/cmd.yaml, with the first request. Its
// answers are exact without a flag from us, and nothing is left of it: when llama-swap unloads it, and when somebody kills
// the `vllm-timings run`.
func TestRun(t *testing.T) {
	port, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	var env strings.Builder
	for _, e := range stack.Env(shared.vllm) {
		fmt.Fprintf(&env, "      - %q\n", e)
	}
	swap := startLlamaSwap(t, fmt.Sprintf(`
healthCheckTimeout: 900
logToStdout: both
startPort: %d
models:
  tiny:
    env:
%s    cmd: |
      %s run --listen 127.0.0.1:${PORT}
      -- %s serve %s
    proxy: http://127.0.0.1:${PORT}
`, port, &env, shared.sidecar, shared.vllm, strings.Join(stack.ServeArgs(shared.vllm), " ")))

	last := 0
	for round, end := range []string{"unload", "kill -9"} {
		t.Run(end, func(t *testing.T) {
			began := time.Now()
			prompt := longPrompt(t.Name())
			for i, stream := range []string{"", `"stream":true`, ""} {
				a := send(t, swap.URL, newRequest("chat", "tiny", prompt, 12, stream))
				if i == 0 {
					t.Logf("loaded in %s", time.Since(began).Round(time.Second))
				}
				timings := a.timings(t)
				entry, err := swap.ActivityAfter(t.Context(), last)
				if err != nil {
					t.Fatal(err)
				}
				last = entry.ID
				checkActivity(t, entry, timings)
				checkAlone(t, a, timings, i > 0)
			}
			const series = `vllm_timings_timings_total{endpoint="/v1/chat/completions",exactness="exact",source="native"} 3`
			waitFor(t, 5*time.Second, series, func() bool {
				return strings.Contains(string(get(t, swap.URL+"/upstream/tiny/-/metrics").body), series)
			})

			family := descendants(t, swap.PID())
			t.Cleanup(func() { // should the test have found something
				for _, p := range living(t, family) {
					_ = syscall.Kill(p.pid, syscall.SIGKILL)
				}
			})
			t.Logf("running: %v", family)
			for _, name := range []string{"vllm-timings", "vllm", "VLLM::EngineCor"} { // the kernel keeps 15 characters
				if !slices.ContainsFunc(family, func(p process) bool { return p.name == name }) {
					t.Errorf("there is no %s: this test shows less than it says", name)
				}
			}
			ready := regexp.MustCompile(`msg="vLLM is ready" upstream=http://(\S+)`).FindAllStringSubmatch(swap.Tail(1<<20), -1)
			if len(ready) != round+1 {
				t.Fatalf("vLLM was ready %d times, want %d", len(ready), round+1)
			}

			began = time.Now()
			if end == "unload" {
				if a := send(t, swap.URL, request{"/api/models/unload", ""}); a.status != http.StatusOK {
					t.Fatalf("unload: %d %s", a.status, a.body)
				}
			} else {
				run := slices.IndexFunc(family, func(p process) bool { return p.parent == swap.PID() })
				if err := syscall.Kill(family[run].pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			var left []process
			waitFor(t, 30*time.Second, "no process is left", func() bool {
				left = living(t, family)
				return len(left) == 0
			})
			t.Logf("all gone in %s", time.Since(began).Round(100*time.Millisecond))
			for _, address := range []string{ready[round][1], fmt.Sprintf("127.0.0.1:%d", port)} {
				l, err := net.Listen("tcp", address)
				if err != nil {
					t.Errorf("the port is still taken: %v", err)
					continue
				}
				_ = l.Close()
			}
		})
	}
}

// process is one that ran when it was looked at. When it started tells it from a later one with its number.
type process struct {
	pid, parent int
	name, began string
}

// processes are those of the machine, without those that have ended and nobody has asked about yet. What vLLM's engine has
// in /proc/N/environ it overwrites with its title, so that a mark in the environment would not find it.
func processes(t *testing.T) map[int]process {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	all := map[int]process{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended meanwhile
		}
		number, rest, _ := bytes.Cut(text, []byte(" ("))
		end := bytes.LastIndexByte(rest, ')') // the name may have any character
		fields := strings.Fields(string(rest[end+1:]))
		pid, err := strconv.Atoi(string(number))
		if err != nil || fields[0] == "Z" {
			continue
		}
		parent, err := strconv.Atoi(fields[1])
		if err != nil {
			t.Fatal(err)
		}
		all[pid] = process{pid: pid, parent: parent, name: string(rest[:end]), began: fields[19]}
	}
	return all
}

// descendants are all that come from a process.
func descendants(t *testing.T, pid int) []process {
	t.Helper()
	all := processes(t)
	var found []process
	for _, p := range slices.SortedFunc(maps.Values(all), func(a, b process) int { return a.pid - b.pid }) {
		for up := p.parent; up > 0; up = all[up].parent {
			if up == pid {
				found = append(found, p)
				break
			}
		}
	}
	return found
}

// living are those of a family that still run.
func living(t *testing.T, family []process) []process {
	t.Helper()
	all := processes(t)
	return slices.DeleteFunc(slices.Clone(family), func(p process) bool { return all[p.pid].began != p.began })
}

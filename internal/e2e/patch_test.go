//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// gate is the environment variable that switches the patch of shared.patched on.
const gate = "VLLM_TIMINGS"

// startPatched starts a vLLM that is patched at boot by the exported script, as deploy/patch does it.
func (p *programs) startPatched(ctx context.Context, setup stack.Setup, site *stack.Site) (*stack.VLLM, error) {
	script := filepath.Join(site.Dir, "vllm-timings-patch.py")
	out, err := exec.CommandContext(ctx, p.sidecar, "patch", "export", "--format", "python", "--gate", gate, "--output", script).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("patch export: %w: %s", err, out)
	}
	if setup.Boot, err = stack.BootCommand(script); err != nil {
		return nil, err
	}
	setup.Env = append(setup.Env, site.Env()...)
	return stack.StartVLLM(ctx, setup)
}

// TestPatchedAtBoot: a vLLM that the script patched when it started says in each answer what its own histograms say.
func TestPatchedAtBoot(t *testing.T) {
	vllm := shared.patched.get(t)
	t.Cleanup(shared.patched.stop) // nobody needs it any more
	checkPatched(t, vllm.URL)

	t.Run("what has no timings is vLLM's", func(t *testing.T) {
		plain := shared.plain.get(t)
		for _, r := range []request{
			{"/v1/completions", several("text", "")},
			{"/v1/completions", several("text", `,"stream":true`)},
			{"/v1/chat/completions", several("chat", `,"stream":true,"stream_options":{"include_usage":true}`)},
			{"/v1/completions", `{"model":"tiny","prompt":["one","two"],"max_tokens":4,"temperature":0,"ignore_eos":true}`},
			{"/v1/completions", `{"model":"tiny","prompt":["one","two"],"max_tokens":4,"temperature":0,"ignore_eos":true,"stream":true}`},
			newRequest("chat", "nobody", "hello", 3, `"stream":true`),
			newRequest("text", "tiny", "hello", 3, `"stream":true,"top_p":-3`),
			{"/tokenize", `{"model":"tiny","prompt":"how many tokens?"}`},
		} {
			t.Run(r.body, func(t *testing.T) { compare(t, plain.URL, vllm.URL, r, 0) })
		}
	})
	t.Run("behind the sidecar", func(t *testing.T) {
		sidecar := startSidecar(t, vllm.URL)
		checkPatched(t, sidecar.URL)
		checkNoFaults(t, sidecar)
		page := string(get(t, sidecar.URL+"/-/metrics").body)
		if !strings.Contains(page, `exactness="exact",source="upstream"`) || strings.Contains(page, `source="window"`) || strings.Contains(page, `source="observed"`) {
			t.Errorf("not all timings are those of upstream:\n%s", page)
		}
	})
	t.Run("behind llama-swap", func(t *testing.T) {
		sidecar := startSidecar(t, vllm.URL)
		for name, url := range map[string]string{"vllm": vllm.URL, "sidecar": sidecar.URL} {
			swap := startLlamaSwap(t, fmt.Sprintf("peers:\n  %s:\n    proxy: %s\n    models: [tiny]\n", name, url))
			last := 0
			for _, kind := range []string{"chat", "text", "messages"} {
				for _, stream := range []string{"", `"stream":true`} {
					a := send(t, swap.URL, newRequest(kind, "tiny", longPrompt(t.Name()+kind+stream), 12, stream))
					entry, err := swap.ActivityAfter(t.Context(), last)
					if err != nil {
						t.Fatal(err)
					}
					last = entry.ID
					checkActivity(t, entry, a.timings(t))
				}
			}
		}
	})
	t.Run("many at once", func(t *testing.T) {
		answers := make([]answer, 16)
		done := make(chan error, len(answers))
		for i := range answers {
			go func() {
				var err error
				answers[i], err = trySend(t, vllm.URL, newRequest("chat", "tiny", longPrompt(fmt.Sprint(i)), 5+3*i, `"stream":true`))
				done <- err
			}()
		}
		for range answers {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		for i, a := range answers {
			if n := a.timings(t).Get("predicted_n").Int(); n != int64(5+3*i) {
				t.Errorf("predicted_n is %d, want %d", n, 5+3*i)
			}
		}
	})
	t.Run("in use", func(t *testing.T) {
		if shared.site == nil {
			t.Skip("somebody else started this vLLM")
		}
		out, err := exec.CommandContext(t.Context(), shared.sidecar, "patch", "revert", "--vllm-dir", shared.site.Package).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "is in use by process") {
			t.Errorf("revert under a running vLLM: %v\n%s", err, out)
		}
	})
}

// TestPatchGateOff: with the gate closed a patched vLLM answers as one that nobody touched.
func TestPatchGateOff(t *testing.T) {
	plain := shared.plain.get(t)
	site, setup := newSite(t, shared.vllm, "vllm-gate-off")
	vllm, err := shared.startPatched(t.Context(), setup, site)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(vllm.Stop)
	if edited, err := site.Edited(); err != nil || !slices.Contains(edited, "vllm_timings.py") {
		t.Fatalf("it is not patched: %q, %v", edited, err)
	}
	for _, kind := range []string{"chat", "text"} {
		for _, o := range []string{"", `"stream":true`, `"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`} {
			compare(t, plain.URL, vllm.URL, newRequest(kind, "tiny", "Is anybody there?", 9, o), 0)
		}
	}
	for _, kind := range []string{"responses", "messages"} { // their ids are of many kinds
		for _, o := range []string{"", `"stream":true`} {
			if a := send(t, vllm.URL, newRequest(kind, "tiny", "Is anybody there?", 9, o)); a.status != 200 || strings.Contains(string(a.body), "timings") {
				t.Errorf("%s: %d %s", kind, a.status, a.body)
			}
		}
	}
}

// TestPatchedImage patches an older vLLM as deploy/patch/Dockerfile does it, and takes the patch out again.
func TestPatchedImage(t *testing.T) {
	executable, err := stack.InstallVLLM(t.Context(), "0.19.1")
	if err != nil {
		t.Fatal(err)
	}
	site, setup := newSite(t, executable, "vllm-0.19.1")
	script, err := stack.ImageCommand()
	if err != nil {
		t.Fatal(err)
	}
	path := "PATH=" + strings.Join([]string{filepath.Dir(shared.sidecar), filepath.Dir(executable), os.Getenv("PATH")}, string(filepath.ListSeparator))
	run := func(script string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", script)
		cmd.Env = slices.Concat(os.Environ(), site.Env(), []string{path})
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return string(out)
	}
	if out := run(script); !strings.Contains(out, "is applied to "+site.Package) {
		t.Fatalf("not patched:\n%s", out)
	}
	edited, err := site.Edited()
	if err != nil || len(edited) < 3 {
		t.Fatalf("edited are %q, %v", edited, err)
	}

	setup.Env = append(setup.Env, site.Env()...)
	vllm, err := stack.StartVLLM(t.Context(), setup)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(vllm.Stop)
	for _, temperature := range []string{"0", "1"} {
		warm := request{"/v1/completions", `{"model":"tiny","prompt":"warm","max_tokens":4,"ignore_eos":true,"temperature":` + temperature + `}`}
		if a := send(t, vllm.URL, warm); a.status != 200 {
			t.Fatalf("warm-up: %d %s", a.status, a.body)
		}
	}
	checkPatched(t, vllm.URL)
	t.Run("doctor", func(t *testing.T) {
		checkDoctor(t, vllm.URL, map[string]string{"per_request_metrics": "false", "timings": "true", "exit_code": "0"})
	})
	vllm.Stop()

	run("vllm-timings patch revert")
	for _, path := range edited {
		if path == "vllm_timings.py" {
			if _, err := os.Stat(filepath.Join(site.Package, path)); !os.IsNotExist(err) {
				t.Errorf("%s is still there: %v", path, err)
			}
			continue
		}
		want, err := site.Original(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(site.Package, path))
		if err != nil || string(got) != string(want) || strings.Contains(string(got), "[vllm-timings]") {
			t.Errorf("%s is not as before (%v)", path, err)
		}
	}
}

// newSite makes a site for one test, and what its vLLM is started with.
func newSite(t *testing.T, executable, name string) (*stack.Site, stack.Setup) {
	t.Helper()
	site, err := stack.NewSite(t.Context(), executable)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := site.Remove(); err != nil {
			t.Error(err)
		}
	})
	port, err := stack.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return site, stack.Setup{Executable: executable, Logs: shared.logs, Name: name, Port: port}
}

// checkPatched compares the timings of each kind of answer with what vLLM's histograms moved by.
func checkPatched(t *testing.T, url string) {
	t.Helper()
	for _, kind := range []string{"chat", "text", "responses", "messages"} {
		streams := []string{"", `"stream":true`}
		if kind == "chat" || kind == "text" {
			streams = append(streams, `"stream":true,"stream_options":{"include_usage":true}`)
		}
		for _, stream := range streams {
			prompt := longPrompt(fmt.Sprint(time.Now().UnixNano())) // new to the cache
			for round, tokens := range []int{1, 24, 9} {
				t.Run(fmt.Sprintf("%s/%s/%d tokens", kind, stream, tokens), func(t *testing.T) {
					before := readCounters(t, url)
					a := send(t, url, newRequest(kind, "tiny", prompt, tokens, stream))
					after := readCounters(t, url)
					checkMoved(t, a, before, after, tokens)
					timings := a.timings(t)
					moved := func(name string) int64 { return int64(after["vllm:"+name] - before["vllm:"+name]) }
					want := moved("request_prompt_tokens_sum") - moved("request_prefill_kv_computed_tokens_sum")
					if cached := timings.Get("cache_n"); !cached.Exists() || cached.Int() != want || (want > 0) != (round > 0) {
						t.Errorf("cache_n is %q, vLLM counted %d, in round %d with one prompt", cached.Raw, want, round)
					}
					if _, n := a.member("metrics"); n > 0 {
						t.Errorf("`metrics` beside `timings`: %s", a.body)
					}
					checkEventPlace(t, kind, a)
				})
			}
		}
	}
}

// checkEventPlace: on the usage event, else on the last with a finish reason; or on the event that ends a response.
func checkEventPlace(t *testing.T, kind string, a answer) {
	t.Helper()
	switch docs := a.documents(); {
	case kind == "chat" || kind == "text":
		checkPlace(t, a, 1)
	case len(docs) > 1:
		i := slices.IndexFunc(docs, func(d []byte) bool { return gjson.GetBytes(d, "timings").Exists() })
		want := map[string]string{"responses": "response.completed response.incomplete", "messages": "message_delta"}[kind]
		if got := gjson.GetBytes(docs[i], "type").Str; !strings.Contains(want, got) {
			t.Errorf("the timings are on an event %q, want %s", got, want)
		}
	}
}

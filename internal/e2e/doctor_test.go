//go:build e2e

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestDoctor: what doctor says of a vLLM is true of it, and what it promises for each endpoint is what its answers get.
func TestDoctor(t *testing.T) {
	for name, c := range map[string]struct {
		in   *instance
		want map[string]string
	}{
		"plain": {shared.plain, map[string]string{"per_request_metrics": "false", "cached_tokens": "false", "exit_code": "1"}},
		"exact": {shared.exact, map[string]string{"per_request_metrics": "true", "cached_tokens": "true", "exit_code": "0"}},
	} {
		t.Run(name, func(t *testing.T) { checkDoctor(t, c.in.get(t).URL, c.want) })
	}
	t.Run("nobody there", func(t *testing.T) {
		port, err := stack.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		url := fmt.Sprintf("http://127.0.0.1:%d", port)
		found := doctorJSON(t, url)
		want := map[string]string{"upstream": `"` + url + `"`, "reachable": "false", "error": `"connection refused"`, "vllm": "false", "endpoints": "[]", "exit_code": "2"}
		if diff := cmp.Diff(want, members(found, want)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if code, text := doctor(t, "--upstream", url); code != 2 || !strings.Contains(text, "no: connection refused") {
			t.Errorf("exit code %d\n%s", code, text)
		}
	})
}

// checkDoctor compares what doctor finds at a vLLM with what is true of it, by the path of the member in doctor's JSON;
// differs is what is otherwise there than of most. Then it holds doctor to its promises.
func checkDoctor(t *testing.T, url string, differs map[string]string) {
	t.Helper()
	found := doctorJSON(t, url)
	want := map[string]string{
		"upstream": `"` + url + `"`, "reachable": "true", "vllm": "true", "vllm_timings": "false", "health": "200", "key_needed": "false",
		"version": gjson.GetBytes(get(t, url+"/version").body, "version").Raw,
		"models":  `["` + stack.Model + `"]`,
		"timings": "false", "metrics.mode": `"filtered"`, "metrics.engines": "1",
		"request.endpoint": `"/v1/chat/completions"`, "request.model": `"` + stack.Model + `"`, "request.status": "200",
	}
	maps.Copy(want, differs)
	if diff := cmp.Diff(want, members(found, want)); diff != "" {
		t.Errorf("doctor on %s (-want +got):\n%s\n%s", url, diff, found)
	}
	if ms := found.Get("metrics.reading_ms").Float(); ms <= 0 {
		t.Errorf("a reading takes %v ms", ms)
	}
	code, text := doctor(t, "--upstream", url)
	if fmt.Sprint(code) != want["exit_code"] || !strings.HasSuffix(text, "\n"+found.Get("verdict").Str+"\n") {
		t.Errorf("exit code %d of the table, which does not end in %s\n%s", code, found.Get("verdict"), text)
	}

	sidecar := startSidecar(t, url)
	checkSoonExact(t, sidecar)
	kinds := map[string]string{"/v1/chat/completions": "chat", "/v1/completions": "text", "/v1/responses": "responses", "/v1/messages": "messages"}
	promises := found.Get("endpoints").Array()
	if len(promises) != 2*len(kinds) {
		t.Errorf("%d kinds of answers, want %d: %s", len(promises), 2*len(kinds), found.Get("endpoints"))
	}
	for _, p := range promises {
		endpoint, source := p.Get("endpoint").Str, p.Get("source").Str
		stream := ""
		if p.Get("stream").Bool() {
			stream = `"stream":true`
		}
		// The table has one row for both, where they are alike.
		row := strings.Join([]string{endpoint, "JSON, stream", source, p.Get("alone").Str, p.Get("under_load").Str}, " ")
		if !strings.Contains(strings.Join(strings.Fields(text), " "), row) {
			t.Errorf("the table has no row %q:\n%s", row, text)
		}
		r := newRequest(kinds[endpoint], stack.Model, "Doctor, doctor, what is wrong with me?", 8, stream)
		checkSource(t, sidecar, r, 1, p.Get("alone").Str, source)
		if p.Get("under_load").Str == "exact" {
			checkSource(t, sidecar, r, 6, "exact", source)
		}
	}
}

// checkSource sends n requests at once and checks how good their timings are and whence, as the sidecar counts them.
func checkSource(t *testing.T, sidecar *stack.Sidecar, r request, n int, exactness, source string) {
	t.Helper()
	waitFor(t, 5*time.Second, "the requests before are counted", func() bool {
		return strings.Contains(string(get(t, sidecar.URL+"/-/metrics").body), "\nvllm_timings_in_flight_requests 0\n")
	})
	before := timingsCounts(t, sidecar)
	done := make(chan error, n)
	for range n {
		go func() {
			a, err := trySend(t, sidecar.URL, r)
			if err == nil && a.status != http.StatusOK {
				err = fmt.Errorf("%s: %d %s", r.path, a.status, a.body)
			}
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]int{fmt.Sprintf("endpoint=%q,exactness=%q,source=%q", r.path, exactness, source): n}
	var moved map[string]int
	waitFor(t, 5*time.Second, fmt.Sprintf("%d answers of %s are counted", n, r.path), func() bool {
		moved = map[string]int{}
		sum := 0
		for series, count := range timingsCounts(t, sidecar) {
			if count -= before[series]; count > 0 {
				moved[series] = count
				sum += count
			}
		}
		return sum >= n
	})
	if diff := cmp.Diff(want, moved); diff != "" {
		t.Errorf("%d at once of %s%s (-doctor's promise +the sidecar's metrics):\n%s", n, r.path, r.body, diff)
	}
}

// timingsCounts are the sidecar's counts of answers with timings, by their labels.
func timingsCounts(t *testing.T, sidecar *stack.Sidecar) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for line := range strings.Lines(string(get(t, sidecar.URL+"/-/metrics").body)) {
		if rest, ok := strings.CutPrefix(line, "vllm_timings_timings_total{"); ok {
			labels, value, _ := strings.Cut(rest, "} ")
			var n int
			if _, err := fmt.Sscan(value, &n); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			counts[labels] = n
		}
	}
	return counts
}

// members are those members of a document that want has, as they stand there.
func members(found gjson.Result, want map[string]string) map[string]string {
	got := map[string]string{}
	for path := range want {
		got[path] = found.Get(path).Raw
	}
	return got
}

// doctor runs `vllm-timings doctor`.
func doctor(t *testing.T, args ...string) (code int, stdout string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), shared.sidecar, append([]string{"doctor"}, args...)...)
	cmd.Env = stack.CleanEnv()
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if errs.Len() > 0 {
		t.Errorf("doctor writes to stderr: %s", &errs)
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

// doctorJSON runs it with --json and returns what it prints.
func doctorJSON(t *testing.T, url string) gjson.Result {
	t.Helper()
	code, text := doctor(t, "--upstream", url, "--json")
	var compact bytes.Buffer
	if err := json.Compact(&compact, []byte(text)); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	found := gjson.Parse(compact.String())
	if int64(code) != found.Get("exit_code").Int() {
		t.Errorf("exit code %d, but it says %s", code, found.Get("exit_code"))
	}
	return found
}

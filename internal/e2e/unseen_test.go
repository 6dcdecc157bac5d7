//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"
)

// TestUnaskedIsUnseen sends each request straight to vLLM and through the sidecar: but for the one inserted `timings`
// and the `metrics` that it replaces, the client gets the same bytes.
func TestUnaskedIsUnseen(t *testing.T) {
	options := []string{"", `"stream":false`, `"stream":true`}
	for _, o := range []string{
		`{}`, `null`,
		`{"include_usage":false}`, `{"include_usage":true}`,
		`{"continuous_usage_stats":true}`,
		`{"include_usage":false,"continuous_usage_stats":true}`,
		`{"include_usage":true,"continuous_usage_stats":true}`,
	} {
		options = append(options, `"stream":true,"stream_options":`+o)
	}
	for name, in := range map[string]*instance{"plain": shared.plain, "exact": shared.exact} {
		t.Run(name, func(t *testing.T) {
			vllm := in.get(t)
			sidecar := startSidecar(t, vllm.URL)
			for _, kind := range []string{"chat", "text"} {
				for _, o := range options {
					r := newRequest(kind, "tiny", "Tell me, "+kind+", how many bytes do you send?", 9, o)
					t.Run(kind+"/"+o, func(t *testing.T) { compare(t, vllm.URL, sidecar.URL, r, 1) })
				}
				// Several choices have no timings, and errors are vLLM's own.
				two := `"n":2,"stream":true,"stream_options":{"include_usage":true}`
				for what, r := range map[string]request{
					"n is 2, JSON":      {newRequest(kind, "", "", 0, "").path, several(kind, "")},
					"n is 2, stream":    {newRequest(kind, "", "", 0, "").path, several(kind, `,"stream":true`)},
					"unknown model":     newRequest(kind, "nobody", "hello", 3, `"stream":true`),
					"too long":          newRequest(kind, "tiny", "hello", 100000, `"stream":true`),
					"bad value":         newRequest(kind, "tiny", "hello", 3, `"stream":true,"top_p":-3`),
					"not JSON":          {newRequest(kind, "", "", 0, "").path, `{"model":"tiny",`},
					"bad stream_option": newRequest(kind, "tiny", "hello", 3, `"stream":true,"stream_options":"yes"`),
					"options, no stream": newRequest(kind, "tiny", "hello", 3,
						`"stream_options":{"include_usage":true}`),
					"greedy, n is 2": newRequest(kind, "tiny", "hello", 3, two),
				} {
					t.Run(kind+"/"+what, func(t *testing.T) { compare(t, vllm.URL, sidecar.URL, r, 0) })
				}
			}
		})
	}
}

// several is a request for two sampled choices.
func several(kind, more string) string {
	prompt := `"prompt":"two"`
	if kind == "chat" {
		prompt = `"messages":[{"role":"user","content":"two"}]`
	}
	return fmt.Sprintf(`{"model":"tiny",%s,"n":2,"max_tokens":5,"temperature":1,"seed":7,"ignore_eos":true%s}`, prompt, more)
}

// compare sends r both ways and compares.
func compare(t *testing.T, direct, through string, r request, wantTimings int) {
	t.Helper()
	send(t, direct, r) // fills vLLM's prefix cache: cached tokens are in the usage
	checkSame(t, func() map[string]string {
		return normalised(send(t, direct, r), wantTimings > 0)
	}, func() map[string]string {
		a := send(t, through, r)
		timings, n := a.member("timings")
		if n != wantTimings {
			t.Fatalf("%d `timings`, want %d:\n%s", n, wantTimings, a.body)
		}
		if _, m := a.member("metrics"); n > 0 && m > 0 {
			t.Fatalf("`metrics` beside `timings`:\n%s", a.body)
		}
		if n > 0 && timings.Get("predicted_n").Int() != 9 {
			t.Fatalf("predicted_n is not 9: %s", timings.Raw)
		}
		checkPlace(t, a, n)
		return normalised(a, wantTimings > 0)
	})
}

// checkSame makes a call straight to vLLM and through the sidecar, again and again until something that came one way
// equals something that came the other. Part of what vLLM sends is chance, with or without a sidecar: a busy one puts two
// tokens into one event, and the events of two choices come in one order or another. What the sidecar does wrong, it
// does wrong each time.
func checkSame[T any](t *testing.T, straight, through func() T) {
	t.Helper()
	var wants, gots []T
	for range 20 {
		want, got := straight(), through()
		wants, gots = append(wants, want), append(gots, got)
		same := func(seen []T, one T) bool {
			return slices.ContainsFunc(seen, func(other T) bool { return cmp.Equal(one, other) })
		}
		if same(wants, got) || same(gots, want) {
			return
		}
	}
	t.Errorf("not what vLLM sends in any of %d tries (-vLLM +sidecar):\n%s", len(gots), cmp.Diff(wants[0], gots[0]))
}

var (
	randomID = regexp.MustCompile(`"(id|request_id)":"((?:chatcmpl|cmpl|modelperm)-)[^"]*"`)
	created  = regexp.MustCompile(`"created":\d+`)
)

// normalised is an answer without what differs from one request to the next: ids, times and, where the sidecar has put
// its figures in, `timings` and `metrics`.
func normalised(a answer, withTimings bool) map[string]string {
	body := randomID.ReplaceAll(a.body, []byte(`"$1":"${2}X"`))
	body = created.ReplaceAll(body, []byte(`"created":0`))
	if withTimings {
		for _, doc := range (answer{header: a.header, body: body}).documents() {
			edited := without(without(doc, "timings"), "metrics")
			body = bytes.Replace(body, doc, edited, 1)
		}
	} else {
		// vLLM's own figures stay, and differ each time.
		body = regexp.MustCompile(`"metrics":\{[^}]*\}`).ReplaceAll(body, []byte(`"metrics":{}`))
	}
	out := map[string]string{"status": fmt.Sprint(a.status), "body": string(body)}
	for name, values := range a.header {
		// The length is that of the longer body; that it is one fits the body was checked by reading it.
		if name != "Date" && name != "Content-Length" {
			out[name] = strings.Join(values, ", ")
		}
	}
	_, out["has a Content-Length"] = a.header["Content-Length"], fmt.Sprint(a.header["Content-Length"] != nil)
	return out
}

// without cuts a top-level member out of a JSON object, with one comma, and leaves every other byte.
func without(doc []byte, name string) []byte {
	v := gjson.GetBytes(doc, name)
	if !v.Exists() {
		return doc
	}
	end := v.Index + len(v.Raw)
	begin := bytes.LastIndex(doc[:v.Index], []byte(`"`+name+`"`))
	switch {
	case doc[end] == ',':
		end++
	case begin > 0 && doc[begin-1] == ',':
		begin--
	}
	return slices.Concat(doc[:begin], doc[end:])
}

// checkPlace checks that the timings of a stream stand where llama.cpp has them: on the usage event, else on the last
// event with a finish reason.
func checkPlace(t *testing.T, a answer, timings int) {
	t.Helper()
	docs := a.documents()
	if timings == 0 || len(docs) < 2 {
		return
	}
	last := docs[len(docs)-1]
	if !gjson.GetBytes(last, "timings").IsObject() {
		t.Errorf("the timings are not on the last event:\n%s", a.body)
	}
	if usage := gjson.GetBytes(last, "choices.#").Int() == 0; !usage && gjson.GetBytes(last, "choices.0.finish_reason").Type != gjson.String {
		t.Errorf("the timings are on neither a usage nor a finish event:\n%s", last)
	}
}

// TestOtherPathsAreVLLMs: what is not an answer with timings passes through as it is.
func TestOtherPathsAreVLLMs(t *testing.T) {
	vllm := shared.plain.get(t)
	sidecar := startSidecar(t, vllm.URL)
	for _, r := range []request{
		{"/tokenize", `{"model":"tiny","prompt":"how many tokens?"}`},
		{"/detokenize", `{"model":"tiny","tokens":[70,71,72]}`},
		{"/v1/embeddings", `{"model":"tiny","input":"x"}`},
		{"/nowhere", `{}`},
	} {
		t.Run(r.path, func(t *testing.T) { compare(t, vllm.URL, sidecar.URL, r, 0) })
	}
	for _, path := range []string{"/version", "/health", "/v1/models", "/openapi.json", "/metrics/?name[]=vllm:num_requests_running"} {
		want, got := get(t, vllm.URL+path), get(t, sidecar.URL+path)
		if diff := cmp.Diff(normalised(want, false), normalised(got, false)); diff != "" {
			t.Errorf("GET %s (-vLLM +sidecar):\n%s", path, diff)
		}
	}
	page := get(t, sidecar.URL+"/metrics")
	for _, name := range []string{"\nvllm:request_prefill_time_seconds_sum", "\nvllm_timings_upstream_up 1"} {
		if page.status != http.StatusOK || !bytes.Contains(page.body, []byte(name)) {
			t.Errorf("/metrics has status %d and lacks %q", page.status, strings.TrimSpace(name))
		}
	}
}

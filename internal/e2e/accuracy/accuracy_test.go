//go:build unix

package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/tidwall/gjson"
)

const usage = `{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}},"x":"prompt_tokens_","prompt_tokens_details":"prompt_tok`

// The relay hides cached tokens however an answer arrives and is read, and changes nothing else.
func TestHider(t *testing.T) {
	want := strings.ReplaceAll(usage, `"prompt_tokens_details"`, `"hidden_tokens_details"`)
	readers := map[string]func(io.Reader) io.Reader{
		"whole":               func(r io.Reader) io.Reader { return r },
		"a byte a read":       iotest.OneByteReader,
		"half":                iotest.HalfReader,
		"the end with data":   iotest.DataErrReader,
		"a read that is none": func(r io.Reader) io.Reader { return io.MultiReader(strings.NewReader(""), r) },
	}
	for name, reader := range readers {
		t.Run(name, func(t *testing.T) {
			h := &hider{ReadCloser: io.NopCloser(reader(strings.NewReader(usage)))}
			got, err := io.ReadAll(h)
			if err != nil || string(got) != want {
				t.Errorf("got %q, %v\nwant %q", got, err, want)
			}
		})
	}
	if got, err := io.ReadAll(&hider{ReadCloser: io.NopCloser(iotest.TimeoutReader(strings.NewReader(usage)))}); err == nil {
		t.Errorf("an answer that breaks off ends well, with %q", got)
	}
}

func TestRelay(t *testing.T) {
	vllm := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, usage)
	}))
	defer vllm.Close()
	relay, err := startRelay(vllm.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	resp, err := http.Get(relay.URL + "/v1/chat/completions")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, _ := io.ReadAll(resp.Body); len(got) != len(usage) || strings.Contains(string(got), string(detailsKey)) {
		t.Errorf("got %q", got)
	}
}

func TestSummary(t *testing.T) {
	answer := func(timings string) result {
		return result{
			timings: gjson.Parse(timings),
			metrics: gjson.Parse(`{"time_to_first_token_ms":10,"generation_time_ms":100}`),
			usage:   gjson.Parse(`{"prompt_tokens":9,"completion_tokens":5,"hidden_tokens_details":{"cached_tokens":4}}`),
		}
	}
	const tokens = `"cache_n":4,"prompt_n":5,"predicted_n":5`
	for name, test := range map[string]struct {
		timings string
		want    summary
		correct bool
	}{
		"exact":           {`{` + tokens + `,"prompt_ms":10,"predicted_ms":100}`, summary{exact: 1, prefillNear: 1, decodeNear: 1}, true},
		"exact and wrong": {`{` + tokens + `,"prompt_ms":10,"predicted_ms":100.1}`, summary{exact: 1, prefillNear: 1, decodeNear: 1}, false},
		"exact, wrong tokens": {`{"cache_n":5,"prompt_n":4,"predicted_n":5,"prompt_ms":10,"predicted_ms":100}`,
			summary{exact: 1, prefillNear: 1, decodeNear: 1}, false},
		"estimated, near": {`{` + tokens + `,"prompt_ms":10.9,"predicted_ms":100.9,"estimated":true}`, summary{estimated: 1, prefillNear: 1, decodeNear: 1}, true},
		"estimated, far":  {`{` + tokens + `,"prompt_ms":11.1,"predicted_ms":101.1,"estimated":true}`, summary{estimated: 1}, true},
		"cached unknown": {`{"prompt_n":9,"predicted_n":5,"prompt_ms":10,"predicted_ms":100,"estimated":true}`,
			summary{estimated: 1, prefillNear: 1, decodeNear: 1, cachedWrong: 1}, true},
		"no decode":              {`{` + tokens + `,"prompt_ms":10,"estimated":true}`, summary{withoutDurations: 1, prefillNear: 1}, true},
		"no timings":             {``, summary{withoutDurations: 1, cachedWrong: 1}, true},
		"generated tokens wrong": {`{"cache_n":4,"prompt_n":5,"predicted_n":6,"estimated":true}`, summary{withoutDurations: 1}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := summarise([]result{answer(test.timings)})
			if got.correct() != test.correct {
				t.Errorf("correct: %v", got.correct())
			}
			if got.exact != test.want.exact || got.estimated != test.want.estimated || got.withoutDurations != test.want.withoutDurations ||
				got.cachedWrong != test.want.cachedWrong || got.prefillNear != test.want.prefillNear || got.decodeNear != test.want.decodeNear {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestRows(t *testing.T) {
	o := options{Sources: []string{"window", "observed"}, Answers: []string{"streamed", "JSON"}, Concurrency: []int{1, 16}, Direct: []int{4}, Hidden: []int{16}, Lengths: "short"}
	var got []string
	for _, r := range o.rows() {
		got = append(got, r.String())
	}
	want := []string{
		"short, window, 1 at once, streamed", "short, window, 1 at once, JSON",
		"short, window, 16 at once, streamed", "short, window, 16 at once, JSON",
		"short, window, 4 + 1 direct at once, streamed", "short, window, 4 + 1 direct at once, JSON",
		"short, window, 16, cached not told at once, streamed", "short, window, 16, cached not told at once, JSON",
		"short, observed, 1 at once, streamed", "short, observed, 16 at once, streamed",
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("got\n%s\nwant\n%s", g, w)
	}
	for name, o := range map[string]options{
		"no such length":  {Lengths: "long", Requests: 1},
		"nobody at once":  {Lengths: "short", Requests: 1, Direct: []int{0}},
		"nothing to send": {Lengths: "short"},
	} {
		if o.complete() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

package vllmsim

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var versions = []string{"0.32.0", "0.19.1", "0.11.2"}

// recording is an answer as curl -i printed it.
type recording struct {
	status, contentType, body string
}

func readRecording(t *testing.T, version, name string) recording {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", version, name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	raw = bytes.ReplaceAll(raw, []byte("\r\n"), []byte("\n"))
	head, body, ok := strings.Cut(string(raw), "\n\n")
	if !ok {
		t.Fatalf("%s: no end of headers", name)
	}
	var r recording
	r.body = body
	for i, line := range strings.Split(head, "\n") {
		if i == 0 {
			r.status = strings.TrimPrefix(line, "HTTP/1.1 ")
		} else if v, ok := strings.CutPrefix(strings.ToLower(line), "content-type: "); ok {
			r.contentType = v
		}
	}
	return r
}

// rules take out of an answer what differs from run to run and from model to
// model. The number of completion tokens stays.
var rules = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`"id":"(chatcmpl|cmpl|modelperm)-[0-9a-f]{16}([0-9a-f]{16})?"`), `"id":"$1-ID$2"`},
	{regexp.MustCompile(`-ID[0-9a-f]{16}"`), `-ID16MORE"`},
	{regexp.MustCompile(`"created":\d+`), `"created":0`},
	{regexp.MustCompile(`"(content|text)":"(?:[^"\\]|\\.)*"`), `"$1":"TEXT"`},
	{regexp.MustCompile(`"(prompt_tokens|total_tokens)":\d+`), `"$1":0`},
	{regexp.MustCompile(`"(cached_tokens|created_cache_tokens)":[1-9]\d*`), `"$1":SOME`},
	{regexp.MustCompile(`"(\w+_ms|tokens_per_second)":[0-9.e-]+`), `"$1":0`},
	{regexp.MustCompile(`"root":"[^"]*"`), `"root":""`},
}

// errorRules are for error messages: numbers that depend on the tokenizer,
// and the part in which old versions show the request and a stack trace.
var errorRules = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(contains|has|value=)( ?)\d{5,}`), `$1${2}MANY`},
	{regexp.MustCompile(`input_(text|tokens)`), `input_X`},
	{regexp.MustCompile(`(, 'input': .*)?\}\\n\\n  File .*\]","type"`), `REST","type"`},
	{regexp.MustCompile(`(, 'input': [^"]*)?\}","type"`), `REST","type"`},
}

// merged are recordings in which several tokens shared an event, as happens
// when vLLM's front end is slower than its engine.
var merged = map[string]bool{"0.19.1/completion_stream": true, "0.11.2/chat_stream_n2_usage": true}

func normalise(body string, several, merged bool) string {
	for _, r := range rules {
		body = r.pattern.ReplaceAllString(body, r.with)
	}
	if strings.HasPrefix(body, `{"error"`) {
		for _, r := range errorRules {
			body = r.pattern.ReplaceAllString(body, r.with)
		}
	}
	lines := strings.Split(body, "\n\n")
	if several { // the order of choices is not fixed
		slices.Sort(lines)
	}
	if merged {
		lines = slices.Compact(lines)
	}
	return strings.Join(lines, "\n\n")
}

func TestAnswersAreShapedLikeRecordings(t *testing.T) {
	chat, text := "/v1/chat/completions", "/v1/completions"
	long := strings.Repeat("hello world ", 6000)
	cases := []struct {
		name, method, path, body string
		header                   string // X-Request-Id
	}{
		{name: "chat_nonstream", path: chat},
		{name: "chat_nonstream_n2", path: chat},
		{name: "chat_stream", path: chat},
		{name: "chat_stream_usage", path: chat},
		{name: "chat_stream_usage_continuous", path: chat},
		{name: "chat_stream_continuous_only", path: chat},
		{name: "chat_stream_maxtokens1", path: chat},
		{name: "chat_stream_n2_usage", path: chat},
		{name: "chat_cached_prompt", path: chat},
		{name: "chat_cached_prompt_again", path: chat},
		{name: "unknown_fields_chat_stream_usage", path: chat},
		{name: "stream_xrequestid", path: chat, header: "my-req-1"},
		{name: "user_request_id", path: chat},
		{name: "completion_nonstream", path: text},
		{name: "completion_nonstream_n2_2prompts", path: text},
		{name: "completion_stream", path: text},
		{name: "completion_stream_usage", path: text},
		{name: "completion_stream_n2_2prompts", path: text},
		{name: "completion_stream_n2_2prompts_usage", path: text},
		{name: "completion_stream_n2_2prompts_usage_continuous", path: text},
		{name: "err_404", path: "/v1/nothing"},
		{name: "err_badjson", path: chat},
		{name: "err_get_chat", path: chat, method: http.MethodGet},
		{name: "err_max_tokens_too_large", path: chat},
		{name: "err_max_tokens_too_large_stream", path: chat},
		{name: "err_missing_messages", path: chat},
		{name: "err_stream_options_without_stream", path: chat},
		{name: "err_unknown_model", path: chat},
		{name: "err_unknown_model_stream", path: chat},
		{name: "err_prompt_too_long_stream", path: chat,
			body: `{"model":"tiny","messages":[{"role":"user","content":"` + long + `"}],"max_tokens":6,"stream":true}`},
		{name: "err_completion_prompt_too_long_stream", path: text,
			body: `{"model":"tiny","prompt":"` + long + `","max_tokens":6,"stream":true}`},
		{name: "health", method: http.MethodGet, path: "/health"},
		{name: "ping", method: http.MethodGet, path: "/ping"},
		{name: "load", method: http.MethodGet, path: "/load"},
		{name: "version", method: http.MethodGet, path: "/version"},
		{name: "models", method: http.MethodGet, path: "/v1/models"},
	}
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			cfg := fast()
			cfg.Version = version
			cfg.MaxModelLen = 4096
			cfg.PrefillTokensPerSecond = 1e6 // without any prefill time there is no tokens_per_second
			cfg.PromptTokensDetails, cfg.PerRequestMetrics = true, true
			cfg.PrefixCacheBlock = 128 // as on the recordings' CPU
			s, client := start(t, cfg)
			for _, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					if _, err := os.Stat(filepath.Join("testdata", version, c.name+".txt")); err != nil {
						t.Skip("not recorded for this version")
					}
					want := readRecording(t, version, c.name)
					body := []byte(c.body)
					if c.body == "" {
						body, _ = os.ReadFile(filepath.Join("testdata", version, c.name+".req.json"))
					}
					method := c.method
					if method == "" {
						method = http.MethodPost
					}
					req, err := http.NewRequest(method, s.URL+c.path, bytes.NewReader(body))
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("X-Request-Id", c.header)
					resp, err := client.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					defer resp.Body.Close()
					got, err := io.ReadAll(resp.Body)
					if err != nil {
						t.Fatal(err)
					}
					if resp.Status != want.status || resp.Header.Get("Content-Type") != want.contentType {
						t.Errorf("%s, content type %q; recorded %s, %q", resp.Status, resp.Header.Get("Content-Type"), want.status, want.contentType)
					}
					if resp.Header.Get("Server") != "uvicorn" {
						t.Errorf("Server: %s", resp.Header.Get("Server"))
					}
					several := strings.Contains(c.name, "n2")
					merged := merged[version+"/"+c.name]
					if diff := cmp.Diff(normalise(want.body, several, merged), normalise(string(got), several, merged)); diff != "" {
						t.Errorf("recorded (-), simulated (+):\n%s", diff)
					}
				})
			}
		})
	}
}

// seriesOf returns the HELP and TYPE lines and the series of a page, without
// values.
func seriesOf(page string) (lines []string) {
	for _, line := range strings.Split(strings.TrimSpace(page), "\n") {
		if !strings.HasPrefix(line, "#") {
			line = line[:strings.LastIndexByte(line, ' ')]
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

const filteredQuery = "?name[]=vllm:request_prefill_time_seconds_sum&name[]=vllm:request_prefill_time_seconds_count&name[]=vllm:request_decode_time_seconds_sum"

func TestFilteredMetricsLikeRecordings(t *testing.T) {
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			cfg := fast()
			cfg.Version = version
			s, client := start(t, cfg)
			want := readRecording(t, version, "metrics_filtered_slash")
			resp, got := get(t, client, s.URL+"/metrics/"+filteredQuery)
			if diff := cmp.Diff(seriesOf(want.body), seriesOf(got)); diff != "" {
				t.Error(diff)
			}
			if ct := resp.Header.Get("Content-Type"); ct != want.contentType {
				t.Errorf("content type %q, recorded %q", ct, want.contentType)
			}
			if !slices.Equal(resp.TransferEncoding, []string{"chunked"}) {
				t.Errorf("transfer encoding %v", resp.TransferEncoding)
			}
			// Without the slash, name[] means nothing.
			resp, whole := get(t, client, s.URL+"/metrics"+filteredQuery)
			if len(whole) < 20_000 || resp.ContentLength != int64(len(whole)) {
				t.Errorf("%d bytes, Content-Length %d", len(whole), resp.ContentLength)
			}
			if st := s.Stats(); st.MetricsFiltered != 1 || st.MetricsFull != 1 {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestWholePageIsPartOfTheRecordedOne(t *testing.T) {
	s, client := start(t, fast())
	want := readRecording(t, "0.32.0", "metrics_full")
	resp, page := get(t, client, s.URL+"/metrics")
	if ct := resp.Header.Get("Content-Type"); ct != want.contentType {
		t.Errorf("content type %q, recorded %q", ct, want.contentType)
	}
	recorded := map[string]bool{}
	for _, line := range seriesOf(want.body) {
		recorded[line] = true
	}
	for _, line := range seriesOf(page) {
		// The long help of this one is cut short.
		if !recorded[line] && !strings.HasPrefix(line, "# HELP vllm:num_requests_waiting_by_reason") {
			t.Errorf("not on the recorded page: %s", line)
		}
	}
}

func TestFamiliesOfVersions(t *testing.T) {
	for _, version := range versions {
		cfg := fast()
		cfg.Version = version
		s, client := start(t, cfg)
		families, err := os.ReadFile(filepath.Join("testdata", version, "metric_families.txt"))
		if err != nil {
			t.Fatal(err)
		}
		_, page := get(t, client, s.URL+"/metrics/")
		for _, line := range strings.Split(page, "\n") {
			if f, ok := strings.CutPrefix(line, "# TYPE "); ok && !strings.Contains(f, "_created ") && !strings.Contains(string(families), f+"\n") {
				t.Errorf("%s has no family %s", version, f)
			}
		}
		computed := strings.Contains(page, "vllm:request_prefill_kv_computed_tokens_sum")
		if computed != (version != "0.11.2") {
			t.Errorf("%s: computed tokens family: %t", version, computed)
		}
	}
}

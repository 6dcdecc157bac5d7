package proxy

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/timings"
)

// The line of a request says what was measured, and nothing of what was said.
func TestLogLine(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	const secret = "s3cret-pr0mpt"
	for _, stream := range []bool{true, false} {
		r.quiet()
		before := len(r.log.requests(t, slog.LevelInfo))
		a := r.send(http.MethodPost, string(chat)+"?key="+secret, chatRequest(stream, 7, secret), "Authorization", "Bearer "+secret, "Cookie", secret)
		r.quiet()
		lines := r.log.requests(t, slog.LevelInfo)
		if len(lines) != before+1 {
			t.Fatalf("%d lines for one request", len(lines)-before)
		}
		line := lines[before]
		for member, want := range map[string]string{
			"method": "POST", "path": string(chat), "status": "200", "model": "tiny", "stream": fmt.Sprint(stream), "source": "window", "estimated": "false",
			"prompt_n": a.timings.Get("prompt_n").Raw, "cache_n": a.timings.Get("cache_n").Raw, "predicted_n": "7",
			"prompt_ms": a.timings.Get("prompt_ms").Raw, "predicted_ms": a.timings.Get("predicted_ms").Raw,
		} {
			if got := line.Get(member).String(); got != want {
				t.Errorf("%s is %q, want %q: %s", member, got, want, line.Raw)
			}
		}
		for _, member := range []string{"prompt_per_second", "predicted_per_second", "duration_ms", "overhead_ms"} {
			if line.Get(member).Num <= 0 {
				t.Errorf("%s is %q: %s", member, line.Get(member).Raw, line.Raw)
			}
		}
	}
	if strings.Contains(r.log.String(), secret) {
		t.Errorf("a secret is in the log:\n%s", r.log)
	}
}

func TestLogLineAsText(t *testing.T) {
	vllm := startEngine(t)
	var book logBook
	r := newRig(t, vllm.URL, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&book, nil)) })
	r.warm()
	r.chat(true, 5)
	r.quiet()
	want := regexp.MustCompile(`(?m)^time=\S+ level=INFO msg=request method=POST path=/v1/chat/completions status=200 duration_ms=[\d.]+ model=tiny stream=true ` +
		`source=window estimated=false prompt_n=\d+ cache_n=\d+ predicted_n=5 prompt_ms=[\d.]+ prompt_per_second=[\d.]+ predicted_ms=[\d.]+ predicted_per_second=[\d.]+ overhead_ms=[\d.]+$`)
	if !want.MatchString(book.String()) {
		t.Errorf("no such line:\n%s", book.String())
	}
}

// Health checks and scrapes come every few seconds; they are not for a log that people read.
func TestLogLevels(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.learned()
	for path, level := range map[string]slog.Level{"/health": slog.LevelDebug, "/v1/models": slog.LevelDebug, "/no/such": slog.LevelInfo} {
		r.send(http.MethodGet, path, "")
		r.quiet()
		for _, at := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn} {
			n := 0
			for _, line := range r.log.requests(t, at) {
				if line.Get("path").Str == path {
					n++
				}
			}
			if want := map[bool]int{true: 1}[at == level]; n != want {
				t.Errorf("%s: %d lines at %v, want %d", path, n, at, want)
			}
		}
	}
	for _, path := range []string{"/metrics", "/-/healthy", "/-/ready", "/-/metrics"} {
		r.send(http.MethodGet, path, "")
		if strings.Contains(r.log.String(), `"path":"`+path+`"`) {
			t.Errorf("%s is in the log", path)
		}
	}
}

// A path or a model name is what a client likes; it must not make lines of its own, nor long ones.
func TestLogIsNotForged(t *testing.T) {
	vllm := startEngine(t)
	var book logBook
	r := newRig(t, vllm.URL, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&book, nil)) })
	r.learned()
	r.send(http.MethodPost, "/a%0alevel=ERROR", "")
	r.send(http.MethodPost, string(chat), strings.Replace(chatRequest(false, 1, "x"), `"tiny"`, `"`+strings.Repeat("m\\n", 10_000)+`"`, 1))
	r.quiet()
	for line := range strings.Lines(book.String()) {
		if !strings.HasPrefix(line, "time=") {
			t.Errorf("a line of a client's: %.100s", line)
		}
		if len(line) > 2000 {
			t.Errorf("a line of %d bytes: %.200s", len(line), line)
		}
	}
}

func TestCountsTokens(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	long := strings.Repeat("a long prompt ", 40)
	var prompt, cached, predicted float64
	for i := range 4 {
		a := r.send(http.MethodPost, string(chat), chatRequest(i%2 == 0, 5+i, long+fmt.Sprint(i)))
		vllm.check(t, a)
		prompt += a.timings.Get("prompt_n").Num
		cached += a.timings.Get("cache_n").Num
		predicted += a.timings.Get("predicted_n").Num
	}
	if cached == 0 {
		t.Error("nothing was cached")
	}
	r.quiet()
	warm := vllm.truthOfFirst(t, r)
	r.wantMetric(prompt+warm.prompt, "prompt_tokens_total", "model", "tiny")
	r.wantMetric(cached, "cached_tokens_total", "model", "tiny")
	r.wantMetric(predicted+warm.predicted, "predicted_tokens_total", "model", "tiny")
	r.wantMetric(5, "timings_total", "endpoint", string(chat))
	r.wantMetric(5, "requests_total", "endpoint", string(chat), "code", "200")
	r.wantMetric(0, "in_flight_requests")
	r.wantMetric(5, "overhead_seconds")
	r.wantMetric(5, "decode_seconds", "model", "tiny")
}

type tokens struct{ prompt, predicted float64 }

// truthOfFirst returns the tokens of the request that warmed a rig up.
func (e *engine) truthOfFirst(t *testing.T, r *rig) tokens {
	t.Helper()
	line := r.log.requests(t, slog.LevelInfo)[0]
	return tokens{line.Get("prompt_n").Num, line.Get("predicted_n").Num}
}

// Each reason for which an answer goes through as it came is counted under its name.
func TestUneditedReasons(t *testing.T) {
	big := strings.Repeat(" ", DefaultMaxEvent+64<<10)
	const whole, events = "application/json", "text/event-stream"
	for _, test := range []struct {
		reason      string
		request     string
		contentType string
		body        string
		encoding    string
		change      func(*Config)
	}{
		{reason: "request_not_understood", request: `{"stream":"yes"}`, contentType: whole, body: `{}`},
		{reason: "request_too_large", request: chatRequest(true, 1, strings.Repeat("x", 2000)), contentType: events, body: doneEvent, change: func(c *Config) { c.MaxRequest = 1000 }},
		{reason: "several_choices", request: `{"n":2}`, contentType: whole, body: `{}`},
		{reason: "several_choices", contentType: whole, body: `{"choices":[{},{}],"usage":{"prompt_tokens":1,"completion_tokens":2}}`},
		{reason: "several_choices", contentType: events, body: strings.Replace(tokenEvent, `"index":0`, `"index":1`, 1) + usageEvent + doneEvent},
		{reason: "content_encoding", contentType: whole, encoding: "br", body: "not brotli"},
		{reason: "content_type", contentType: "text/html", body: "<p>"},
		{reason: "answer_too_large", contentType: whole, body: `{"choices":[]` + big + `}`},
		{reason: "event_too_large", contentType: events, body: "data: {\"choices\":[]" + big + "}\n\n" + doneEvent},
		{reason: "invalid_json", contentType: whole, body: `{"choices":`},
		{reason: "no_usage", contentType: whole, body: `{"choices":[]}`},
		{reason: "no_usage", contentType: events, body: tokenEvent + finishEvent + doneEvent},
		{reason: "no_usage", contentType: events, body: tokenEvent},
		{reason: "no_usage", contentType: events, body: tokenEvent + doneEvent},
		{reason: "no_source", contentType: whole, body: `{"choices":[{}],"usage":{"prompt_tokens":1,"completion_tokens":2}}`},
		{reason: "no_source", contentType: events, body: tokenEvent + finishEvent + usageEvent + doneEvent, change: func(c *Config) { c.Sources = timings.Sources{timings.Native} }},
		{reason: "upstream_error", contentType: events, body: tokenEvent + `data: {"error":{"message":"x"}}` + "\n\n" + doneEvent},
	} {
		t.Run(test.reason, func(t *testing.T) {
			up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if notAVLLM(w, r) {
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", test.contentType)
				if test.encoding != "" {
					w.Header().Set("Content-Encoding", test.encoding)
				}
				_, _ = io.WriteString(w, test.body)
			})
			var changes []func(*Config)
			if test.change != nil {
				changes = append(changes, test.change)
			}
			r := newRig(t, up.URL, changes...)
			r.learned()
			request := test.request
			if request == "" {
				request = `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`
			}
			if a := r.send(http.MethodPost, string(chat), request); a.body != test.body || a.err != nil {
				t.Errorf("error %v; got %d bytes %.300q, want %d %.300q", a.err, len(a.body), a.body, len(test.body), test.body)
			}
			r.wantMetric(1, "unedited_total", "endpoint", string(chat), "reason", test.reason)
			r.wantMetric(1, "unedited_total")
			r.wantMetric(0, "timings_total")
			r.quiet()
			lines := r.log.requests(t, slog.LevelInfo)
			if len(lines) != 1 || lines[0].Get("no_timings").Str != test.reason {
				t.Errorf("the log does not say why: %v", lines)
			}
		})
	}
}

// Errors of vLLM's are its own: not counted as failures of the proxy, and no reason is given for timings that nobody expects.
func TestErrorsOfVLLM(t *testing.T) {
	vllm := startEngine(t, func(c *vllmsim.Config) { c.APIKey = "k" })
	r := newRig(t, vllm.URL)
	r.learned()
	for request, status := range map[string]int{`{"messages":[`: 400, `{"model":"none","messages":[]}`: 404} {
		if a := r.send(http.MethodPost, string(chat), request, "Authorization", "Bearer k"); a.status != status || !gjson.Get(a.body, "error").Exists() {
			t.Errorf("%s: %d %s", request, a.status, a.body)
		}
		r.wantMetric(1, "requests_total", "endpoint", string(chat), "code", fmt.Sprint(status))
	}
	if a := r.chat(true, 3); a.status != http.StatusUnauthorized {
		t.Errorf("status %d without a key", a.status)
	}
	r.wantMetric(0, "unedited_total")
	r.wantMetric(0, "upstream_errors_total")
}

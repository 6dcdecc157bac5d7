package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
)

const (
	// askTimeout bounds each question to vLLM but the request to the model, which may have to wait for others.
	askTimeout     = 5 * time.Second
	requestTimeout = time.Minute
	// readings is how many readings of the metrics are timed.
	readings = 5
)

// The endpoints whose answers get timings.
const (
	chatPath      = "/v1/chat/completions"
	textPath      = "/v1/completions"
	responsesPath = "/v1/responses"
	messagesPath  = "/v1/messages"
)

// findings are what doctor has found out, and concludes from that. Pointers are nil where something is not known.
type findings struct {
	Upstream  string   `json:"upstream"`
	Reachable bool     `json:"reachable"`
	Error     string   `json:"error,omitempty"` // why it is not
	VLLM      bool     `json:"vllm"`            // it looks like one
	Sidecar   bool     `json:"vllm_timings"`    // a vllm-timings answers there
	Health    int      `json:"health,omitempty"`
	Version   string   `json:"version,omitempty"`
	Models    []string `json:"models"`
	KeyNeeded bool     `json:"key_needed"`

	Native  *bool         `json:"per_request_metrics"` // answers have vLLM's own
	Cached  *bool         `json:"cached_tokens"`       // usage tells them
	Timings *bool         `json:"timings"`             // answers have them without us
	Metrics metricsPage   `json:"metrics"`
	Request *modelRequest `json:"request,omitempty"`

	Endpoints []endpointVerdict `json:"endpoints"`
	Advice    []string          `json:"advice"`
	Verdict   string            `json:"verdict"`
	ExitCode  int               `json:"exit_code"`

	keyGiven, inV1 bool
	noRequest      bool
	wantedModel    string
	estimates      bool // is what these timings say that they are
	remedy         string
}

// metricsPage is what was found at /metrics.
type metricsPage struct {
	Mode      string  `json:"mode"`
	Error     string  `json:"error,omitempty"` // why it cannot be read
	ReadingMS float64 `json:"reading_ms,omitempty"`
	Engines   int     `json:"engines,omitempty"`
	Merged    bool    `json:"merged,omitempty"`   // over several API server processes
	Balanced  bool    `json:"balanced,omitempty"` // several vLLMs answer by turns

	mode   metrics.Mode
	advice string
}

// modelRequest is the request to the model.
type modelRequest struct {
	Endpoint string  `json:"endpoint"`
	Model    string  `json:"model"`
	Status   int     `json:"status,omitempty"`
	MS       float64 `json:"ms"`
	Error    string  `json:"error,omitempty"`
}

// examine asks vLLM for all that can be known.
func examine(ctx context.Context, s *doctorSettings) *findings {
	e := newEngine(&s.settings)
	e.transport.DisableKeepAlives = false // as serve does, and it is over sooner than vLLM closes an idle connection
	defer e.transport.CloseIdleConnections()
	f := &findings{
		Upstream: e.name, Models: []string{}, Advice: []string{}, Metrics: metricsPage{Mode: metrics.ModeUnknown.String()},
		keyGiven: s.key != "", noRequest: s.noRequest, wantedModel: s.model,
		inV1: strings.HasSuffix(strings.TrimRight(s.upstream.Path, "/"), "/v1"),
	}
	status, body, err := get(ctx, e, "version")
	if err != nil {
		f.Error, f.remedy = proxy.Explain(err)
		return f
	}
	_, page, _ := get(ctx, e, "-/metrics")
	f.Sidecar = strings.Contains(page, metrics.Prefix+"build_info")
	if status >= http.StatusInternalServerError { // something before vLLM answers for it
		f.Error = problem(status, body)
		return f
	}
	f.Reachable = true
	f.note(status)
	if status == http.StatusOK {
		f.Version = gjson.Get(body, "version").String()
	}
	f.Health, _, _ = get(ctx, e, "health")
	f.askModels(ctx, e)
	f.askMetrics(ctx, e)
	f.VLLM = f.Version != "" || len(f.Models) > 0 || f.Metrics.mode.Readable() || f.KeyNeeded
	if f.VLLM && !s.noRequest {
		f.request(ctx, e)
	}
	return f
}

func get(ctx context.Context, e *engine, path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return e.do(ctx, http.MethodGet, path, "", "")
}

// note takes from a status whether a key is missing, or the wrong one.
func (f *findings) note(status int) {
	f.KeyNeeded = f.KeyNeeded || status == http.StatusUnauthorized || status == http.StatusForbidden
}

// problem tells an answer that is none.
func problem(status int, body string) string {
	text := fmt.Sprintf("status %d", status)
	for _, path := range []string{"error.message", "error", "detail", "message"} {
		if m := gjson.Get(body, path); m.Type == gjson.String && m.Str != "" {
			return text + ": " + m.Str
		}
	}
	return text
}

func (f *findings) askModels(ctx context.Context, e *engine) {
	status, body, err := get(ctx, e, "v1/models")
	if err != nil {
		return
	}
	f.note(status)
	if status != http.StatusOK {
		return
	}
	for _, id := range gjson.Get(body, "data.#.id").Array() {
		f.Models = append(f.Models, id.String())
	}
}

// askMetrics finds out how the metrics can be read, as serve does, and how long that takes.
func (f *findings) askMetrics(ctx context.Context, e *engine) {
	ctx, cancel := context.WithTimeout(ctx, 2*askTimeout)
	defer cancel()
	m := &f.Metrics
	reader := metrics.NewReader(e.transport, e.base, metrics.ReaderOptions{Bearer: e.key})
	mode, err := reader.Probe(ctx)
	var last metrics.Reading
	var took []time.Duration
	started := map[float64]bool{}
	for range readings {
		if err != nil {
			break
		}
		if last, err = reader.Read(ctx); err == nil {
			took = append(took, last.Duration())
			started[last.ProcessStart] = true
		}
	}
	m.mode, m.Mode = mode, mode.String()
	if err != nil {
		m.fail(err)
		return
	}
	slices.Sort(took)
	m.ReadingMS = ms(took[len(took)/2])
	engines := map[string]bool{}
	for _, s := range last.Series {
		engine, _, _ := strings.Cut(s.Key, ",")
		engines[engine] = true
	}
	m.Engines = len(engines)
	m.Merged = mode == metrics.ModeFull && last.ProcessStart == 0
	m.Balanced = len(started) > 1
}

func (m *metricsPage) fail(err error) {
	if m.mode.Readable() { // it was, a moment ago
		m.mode, m.Mode = metrics.ModeNone, metrics.ModeNone.String()
	}
	m.Error = err.Error()
	var e *metrics.Error
	if !errors.As(err, &e) {
		return
	}
	m.advice = e.Advice()
	switch {
	case e.Kind == metrics.KindStatus:
		m.Error = fmt.Sprintf("status %d", e.Status)
	case e.Err != nil:
		m.Error = e.Err.Error()
	}
}

// request asks the model for two tokens. One without a chat template completes a text instead.
func (f *findings) request(ctx context.Context, e *engine) {
	model := f.wantedModel
	switch {
	case model != "":
	case len(f.Models) > 0:
		model = f.Models[0]
	default:
		return
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	type question struct {
		Model     string    `json:"model"`
		MaxTokens int       `json:"max_tokens"`
		Messages  []message `json:"messages,omitempty"`
		Prompt    string    `json:"prompt,omitempty"`
	}
	answer, first := f.send(ctx, e, chatPath, question{Model: model, MaxTokens: 2, Messages: []message{{"user", "Hi"}}}, model)
	f.Request = first
	switch first.Status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusInternalServerError, http.StatusNotImplemented:
		text, second := f.send(ctx, e, textPath, question{Model: model, MaxTokens: 2, Prompt: "Hi"}, model)
		if second.Status == http.StatusOK {
			answer, f.Request = text, second
		}
	}
	f.note(f.Request.Status)
	if f.Request.Status == http.StatusOK {
		f.read(answer)
	}
}

func (f *findings) send(ctx context.Context, e *engine, path string, question any, model string) (string, *modelRequest) {
	r := &modelRequest{Endpoint: path, Model: model}
	text, err := json.Marshal(question)
	if err != nil { // it cannot
		r.Error = err.Error()
		return "", r
	}
	began := time.Now()
	status, body, err := e.do(ctx, http.MethodPost, path, "", string(text))
	r.Status, r.MS = status, ms(time.Since(began))
	switch {
	case err != nil:
		r.Error, _ = proxy.Explain(err)
	case status != http.StatusOK:
		r.Error = problem(status, body)
	case !gjson.Valid(body) || !gjson.Get(body, "choices").IsArray():
		r.Status, r.Error = 0, "the answer is no completion"
	}
	return body, r
}

// read takes from an answer what it has.
func (f *findings) read(answer string) {
	known := func(b bool) *bool { return &b }
	t := gjson.Get(answer, "timings")
	f.Timings = known(t.IsObject())
	f.estimates = t.Get("estimated").Bool()
	if !f.Sidecar { // which takes them out
		m := gjson.Get(answer, "metrics")
		f.Native = known(m.Get("time_to_first_token_ms").Type == gjson.Number && m.Get("generation_time_ms").Type == gjson.Number)
	}
	cached := gjson.Get(answer, "usage.prompt_tokens_details.cached_tokens").Type == gjson.Number
	if cached || proxy.HasNative(f.Version) { // older ones tell them only where there are any
		f.Cached = known(cached)
	}
}

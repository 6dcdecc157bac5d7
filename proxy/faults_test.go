package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// freeAddress returns an address at which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	return s.Listener.Addr().String()
}

// wantBadGateway checks the answer that stands for a vLLM that is not there.
func wantBadGateway(t *testing.T, a answer, address, secret string) {
	t.Helper()
	message := gjson.Get(a.body, "error.message").String()
	switch {
	case a.status != http.StatusBadGateway || a.header.Get("Content-Type") != "application/json":
		t.Errorf("status %d, content type %q", a.status, a.header.Get("Content-Type"))
	case !gjson.Valid(a.body) || gjson.Get(a.body, "error.type").String() != "upstream_error" || gjson.Get(a.body, "error.code").Int() != 502:
		t.Errorf("not an error as OpenAI's API has it: %s", a.body)
	case !strings.Contains(message, address) || !strings.Contains(message, "--upstream") || !strings.Contains(message, "connection refused"):
		t.Errorf("it must name the upstream, what happened and what to do: %s", message)
	case a.header.Get("Content-Length") != strconv.Itoa(len(a.body)):
		t.Errorf("content length %s of %d bytes", a.header.Get("Content-Length"), len(a.body))
	case strings.Contains(a.body, secret):
		t.Errorf("a secret is in it: %s", a.body)
	}
}

// llama-swap starts models on demand: the sidecar is there before vLLM is.
func TestUpstreamComesLate(t *testing.T) {
	address := freeAddress(t)
	r := newRig(t, "http://user:hunter2@"+address)
	for _, path := range []string{string(chat), "/v1/embeddings"} {
		wantBadGateway(t, r.send(http.MethodPost, path, chatRequest(true, 5, "s3cret"), "Authorization", "Bearer hunter2"), address, "hunter2")
	}
	wantBadGateway(t, r.send(http.MethodGet, "/health", ""), address, "hunter2")
	r.wantMetric(3, "upstream_errors_total", "kind", "connection refused")
	r.wantMetric(3, "requests_total", "code", "502")
	r.wantMetric(0, "upstream_up")

	vllm := listenEngine(t, address)
	eventually(t, "vLLM answers", func() bool { return r.send(http.MethodGet, "/health", "").status == http.StatusOK })
	r.warm() // and the sidecar has learned by itself what it is
	vllm.check(t, r.chat(true, 10))
	vllm.check(t, r.chat(false, 10))
	r.wantMetric(1, "upstream_up")
	if strings.Contains(r.log.String(), "hunter2") || strings.Contains(r.log.String(), "s3cret") {
		t.Error("a secret is in the log")
	}
}

// Without any request, too, the sidecar finds a vLLM that comes late.
func TestLearnsWithoutRequests(t *testing.T) {
	address := freeAddress(t)
	r := newRig(t, "http://"+address)
	eventually(t, "it is said that vLLM is not there", func() bool { return strings.Contains(r.log.String(), "does not answer yet") })
	listenEngine(t, address)
	r.learned()
	if n := strings.Count(r.log.String(), "does not answer yet"); n != 1 {
		t.Errorf("said %d times that vLLM is not there", n)
	}
}

// recorder notes every byte that an upstream wrote.
type recorder struct {
	mu   sync.Mutex
	body strings.Builder
}

func (rec *recorder) wrap(next http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v1/") {
			w = teed{w, rec}
		}
		next.ServeHTTP(w, r)
	}
}

func (rec *recorder) String() string {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.body.String()
}

type teed struct {
	http.ResponseWriter
	rec *recorder
}

func (w teed) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w teed) Write(p []byte) (int, error) {
	w.rec.mu.Lock()
	w.rec.body.Write(p)
	w.rec.mu.Unlock()
	return w.ResponseWriter.Write(p)
}

// An answer that vLLM did not finish reaches the client as a broken body, with nothing added and nothing lost.
func TestUpstreamDies(t *testing.T) {
	for _, test := range []struct {
		name   string
		stream bool
		after  int // events
	}{
		{"right after the headers", true, -1},
		{"after the role event", true, 1},
		{"in the midst of a stream", true, 4},
		{"before [DONE]", true, 12},
		{"in the midst of a JSON answer", false, 1},
		{"at the start of a JSON answer", false, -1},
	} {
		t.Run(test.name, func(t *testing.T) {
			vllm, rec := startEngine(t), &recorder{}
			up := startUpstream(t, rec.wrap(vllm.Sim))
			r := newRig(t, up.URL)
			r.learned()
			vllm.SetFaults(vllmsim.Faults{DieAfterEvents: test.after})
			a := r.chat(test.stream, 10)
			if a.status != http.StatusOK || !errors.Is(a.err, io.ErrUnexpectedEOF) {
				t.Errorf("status %d, error %v, want an unexpected EOF", a.status, a.err)
			}
			want := rec.String()
			if test.after == 12 {
				// The usage event was not asked for by the client; timings may be in the event before it.
				if a.timings.Exists() {
					want = a.body
				}
			}
			if a.body != want {
				t.Errorf("got\n%s\nwant all that vLLM sent\n%s", a.body, want)
			}
			r.wantMetric(1, "upstream_errors_total", "kind", "connection closed")
			r.wantMetric(0, "client_disconnects_total")
			if test.after != 12 {
				r.wantMetric(1, "unedited_total", "reason", "upstream_error")
			}
			vllm.SetFaults(vllmsim.Faults{})
			time.Sleep(2 * fresh) // so that the next request gets a baseline, without the one that broke
			vllm.check(t, r.chat(test.stream, 10))
		})
	}
}

const (
	firstEvent  = `data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	tokenEvent  = `data: {"id":"a","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	finishEvent = `data: {"id":"a","choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}` + "\n\n"
	usageEvent  = `data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}` + "\n\n"
	doneEvent   = "data: [DONE]\n\n"
)

// The event with the finish reason is held for the usage event. Where that does not come, the finish event must not be lost.
func TestUpstreamDiesBeforeUsage(t *testing.T) {
	for _, rest := range []string{"", `data: {"id":"a","choi`, ": comment\n\n"} {
		sent := firstEvent + tokenEvent + finishEvent + rest
		up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
			if notAVLLM(w, r) {
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, sent)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		})
		r := newRig(t, up.URL)
		r.learned()
		if a := r.chat(true, 2); !errors.Is(a.err, io.ErrUnexpectedEOF) || a.body != sent {
			t.Errorf("error %v, got\n%s\nwant\n%s", a.err, a.body, sent)
		}
		r.wantMetric(1, "upstream_errors_total")
		r.wantMetric(1, "unedited_total", "reason", "upstream_error")
	}
}

// Nothing is between a slow vLLM and its client: no timeout ends an answer.
func TestSlowUpstream(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	vllm.SetFaults(vllmsim.Faults{HeaderDelay: 300 * time.Millisecond})
	a := r.chat(true, 5)
	vllm.check(t, a) // the delay is in none of the figures
	if a.took < 300*time.Millisecond {
		t.Errorf("took %v", a.took)
	}
}

func TestRestart(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	for range 3 {
		vllm.check(t, r.chat(true, 5))
	}
	l := r.start(string(chat), chatRequest(true, 10_000, "broken off"))
	l.until(t, `"content":" `)
	vllm.Restart()
	for range l.lines {
	}
	r.wantMetric(1, "upstream_errors_total", "kind", "connection closed")
	var answers []answer
	for i := range 5 {
		answers = append(answers, r.chat(i%2 == 0, 5))
	}
	for i, a := range answers {
		if i == 0 && !a.exact() {
			continue // no reading before it need be of the new process
		}
		vllm.check(t, a)
	}
}

// vLLM records a request after it woke its client when many finish in one step.
func TestEarlyMetrics(t *testing.T) {
	for _, stream := range []bool{true, false} {
		vllm := startEngine(t)
		r := newRig(t, vllm.URL)
		r.warm()
		for _, late := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 45 * time.Millisecond} {
			vllm.SetFaults(vllmsim.Faults{EarlyMetrics: late})
			a := r.chat(stream, 5)
			if a.status != http.StatusOK || a.err != nil || !a.timings.Exists() {
				t.Fatalf("status %d, error %v, %s", a.status, a.err, a.body)
			}
			if err := vllm.wrong(t, a); err != nil {
				t.Errorf("recorded %v late: %v", late, err)
			}
			if !a.exact() {
				t.Errorf("recorded %v late: said to be an estimate: %s", late, a.timings.Raw)
			}
		}
	}
}

// atOnce answers before it has read the request's body, as vLLM does with a key that it refuses.
func atOnce(w http.ResponseWriter, r *http.Request) {
	if notAVLLM(w, r) {
		return
	}
	// It takes the rest then. (One that closes instead, as Go's server does above 256 KB, can have its answer lost on the way
	// to any client.)
	c := http.NewResponseController(w)
	_ = c.EnableFullDuplex()
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"id":"a","choices":[]}`)
	_ = c.Flush()
	_, _ = io.Copy(io.Discard, r.Body)
}

// Go's ReverseProxy cuts 0.6 % of such answers.
func TestAnswersAtOnce(t *testing.T) {
	total := 20_000
	if raceEnabled || testing.Short() {
		total = 2000
	}
	up := startUpstream(t, atOnce)
	for _, test := range []struct {
		name string
		path string
		size int
		n    int
	}{
		{"chat", string(chat), 200, total},
		{"chat, 300 KB", string(chat), 300 << 10, total / 10},
		{"other", "/v1/embeddings", 200, total},
		{"other, 300 KB", "/v1/embeddings", 300 << 10, total / 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, up.URL)
			r.learned()
			body := chatRequest(false, 5, strings.Repeat("a", test.size))
			var wg sync.WaitGroup
			var failed counter
			for range 32 {
				wg.Go(func() {
					for range test.n / 32 {
						resp, err := r.http.Post(r.url+test.path, "application/json", strings.NewReader(body))
						if err != nil {
							failed.next()
							continue
						}
						answer, err := io.ReadAll(resp.Body)
						resp.Body.Close()
						if err != nil || resp.StatusCode != http.StatusOK || string(answer) != `{"id":"a","choices":[]}` {
							failed.next()
						}
					}
				})
			}
			wg.Wait()
			if n := failed.next() - 1; n > 0 {
				t.Errorf("%d of %d answers failed; kinds: closed %v, other %v", n, test.n,
					r.metric("upstream_errors_total", "kind", "connection closed"), r.metric("upstream_errors_total", "kind", "other"))
			}
		})
	}
}

// 502 where vLLM's name is unknown or its address takes no connection says so.
func TestBadGatewayKinds(t *testing.T) {
	r := newRig(t, "http://no-such-host.invalid:8000")
	a := r.send(http.MethodGet, "/v1/models", "")
	if a.status != http.StatusBadGateway || !strings.Contains(gjson.Get(a.body, "error.message").String(), "name not found") {
		t.Errorf("%d, %s", a.status, a.body)
	}
}

// An error of ours is valid JSON whatever is in it.
func TestWriteErrorIsJSON(t *testing.T) {
	for _, message := range []string{"plain", `"quoted" \`, "control \x00\x07\x1b\x7f", "not UTF-8 \xff", "beyond \U0001F600 \u2028"} {
		w := httptest.NewRecorder()
		writeError(w, http.StatusBadRequest, message, "invalid_request_error")
		if !gjson.Valid(w.Body.String()) || w.Header().Get("Content-Length") != fmt.Sprint(w.Body.Len()) {
			t.Errorf("%q: %s", message, w.Body)
		}
	}
}

// The body of a request is a lot of memory; vLLM has it when it answers.
func TestRequestBodyIsLetGo(t *testing.T) {
	ex := &exchange{ctx: t.Context(), body: newReplayable([]byte("body"))}
	ex.answerBegan(&http.Response{StatusCode: http.StatusBadRequest, Body: http.NoBody, Request: &http.Request{URL: &url.URL{}}})
	if _, err := ex.body.open(); err == nil {
		t.Error("the body can still be sent")
	}
}

package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/metrics"
)

// rig is a sidecar on a real socket, with what tests look at.
type rig struct {
	*Proxy
	t    testing.TB
	url  string
	http *http.Client // asks for no compression and follows no redirect
	log  *logBook
	reg  *prometheus.Registry
}

// newRig starts a sidecar before the upstream. When the test ends it must have no goroutine left.
func newRig(t testing.TB, upstream string, change ...func(*Config)) *rig {
	t.Helper()
	base, err := url.Parse(upstream)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, log: &logBook{}, reg: prometheus.NewRegistry()}
	cfg := Config{
		Upstream:   base,
		Collectors: metrics.NewCollectors(r.reg, metrics.Build{}),
		Log:        slog.New(slog.NewJSONHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Deadline:   3 * time.Second, // few tests are about it, and a busy machine may take longer than the default
	}
	for _, f := range change {
		f(&cfg)
	}
	if r.Proxy, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(r.Proxy)
	server.Listener, server.Config.ConnContext = Clients{server.Listener}, ConnContext
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	server.Start()
	r.url = server.URL
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 256}
	r.http = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		server.Close()
		r.Proxy.Close()
	})
	return r
}

// eventually polls. It is for what other goroutines do after the test's own gates are open.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	within(t, 10*time.Second, what, done)
}

func within(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// learned waits until the sidecar knows its upstream and has a baseline of its metrics.
func (r *rig) learned() {
	r.t.Helper()
	eventually(r.t, "the sidecar knows its upstream", r.upstream.isKnown)
}

// quiet waits until no request is under way and returns what the log holds by then.
func (r *rig) quiet() {
	r.t.Helper()
	eventually(r.t, "no request is in flight", func() bool { return r.metric("in_flight_requests") == 0 })
}

// metric sums up the samples of one of our families that have these labels, given as name and value in turns. Of a
// histogram it is the number of observations.
func (r *rig) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != metrics.Prefix+name {
			continue
		}
		for _, m := range f.Metric {
			if hasLabels(m, labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

func hasLabels(m *dto.Metric, labels []string) bool {
	for i := 0; i < len(labels); i += 2 {
		found := false
		for _, l := range m.Label {
			found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
		}
		if !found {
			return false
		}
	}
	return true
}

// wantMetric fails the test when a family does not reach a value soon: some are counted after the client has its answer.
func (r *rig) wantMetric(want float64, name string, labels ...string) {
	r.t.Helper()
	var got float64
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if got = r.metric(name, labels...); got == want {
			return
		}
	}
	r.t.Errorf("%s%v is %v, want %v", name, labels, got, want)
}

// answer is what a client got.
type answer struct {
	status  int
	header  http.Header
	trailer http.Header
	body    string
	err     error // that the body ended in
	id      string
	timings gjson.Result
	took    time.Duration
}

func (a answer) exact() bool { return a.timings.Exists() && !a.timings.Get("estimated").Bool() }

// send sends a request with a body and reads the answer to its end.
func (r *rig) send(method, path, body string, header ...string) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return r.do(req)
}

func (r *rig) do(req *http.Request) answer {
	r.t.Helper()
	start := time.Now()
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Errorf("%s %s: %v", req.Method, req.URL, err)
		return answer{err: err}
	}
	defer resp.Body.Close()
	a := answer{status: resp.StatusCode, header: resp.Header}
	raw, err := io.ReadAll(resp.Body)
	a.body, a.err, a.trailer, a.took = string(raw), err, resp.Trailer, time.Since(start)
	if isStream(resp.Header.Get("Content-Type")) {
		for line := range strings.Lines(a.body) {
			if data, ok := strings.CutPrefix(line, "data: "); ok && gjson.Valid(data) {
				if x := gjson.Get(data, "id"); x.Exists() {
					a.id = x.String()
				}
				if x := gjson.Get(data, "timings"); x.Exists() {
					a.timings = x
				}
			}
		}
	} else {
		a.id, a.timings = gjson.Get(a.body, "id").String(), gjson.Get(a.body, "timings")
	}
	return a
}

// request is the body of a chat request.
func chatRequest(stream bool, tokens int, prompt string) string {
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":%v}`, prompt, tokens, stream)
}

// chat sends a chat request whose prompt nobody else has, and whose number of tokens few others have: requests that look
// alike can be mistaken for one another, and are then said to be estimates.
func (r *rig) chat(stream bool, tokens int) answer {
	r.t.Helper()
	n := prompts.next()
	return r.send(http.MethodPost, string(chat), chatRequest(stream, tokens, fmt.Sprint(n, strings.Repeat(" and", n%40))))
}

// prompts numbers prompts, so that each is new to the prefix cache.
var prompts counter

type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) next() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return c.n
}

// engine is a simulated vLLM that keeps what really happened to each request.
type engine struct {
	*vllmsim.Server
	mu    sync.Mutex
	truth map[string]vllmsim.Record
}

// quick is the setup of most tests: 2 ms a token.
func quick(c *vllmsim.Config) {
	c.DecodeStep = 2 * time.Millisecond
	c.PrefillTokensPerSecond = 2000
}

func startEngine(t testing.TB, change ...func(*vllmsim.Config)) *engine {
	t.Helper()
	return listenEngine(t, "127.0.0.1:0", change...)
}

func listenEngine(t testing.TB, address string, change ...func(*vllmsim.Config)) *engine {
	t.Helper()
	e := &engine{truth: map[string]vllmsim.Record{}}
	cfg := vllmsim.Default()
	quick(&cfg)
	cfg.OnEnd = func(r vllmsim.Record) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.truth[r.ID] = r
	}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	if e.Server, err = vllmsim.Listen(address, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// record returns what really happened to a request.
func (e *engine) record(t testing.TB, id string) vllmsim.Record {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	r, ok := e.truth[id]
	if !ok {
		t.Errorf("the engine knows nothing of a request %q", id)
	}
	return r
}

// check fails the test unless the timings of an answer are the engine's own figures.
func (e *engine) check(t testing.TB, a answer) {
	t.Helper()
	if a.status != http.StatusOK || a.err != nil || !a.exact() {
		t.Errorf("want an answer with exact timings, got status %d, error %v, timings %s", a.status, a.err, a.timings.Raw)
		return
	}
	if err := e.wrong(t, a); err != nil {
		t.Error(err)
	}
}

// wrong says in what the timings of an answer are not what really happened.
func (e *engine) wrong(t testing.TB, a answer) error {
	t.Helper()
	r := e.record(t, a.id)
	for name, want := range map[string]float64{
		"prompt_n":     float64(r.PromptTokens - r.CachedTokens),
		"cache_n":      float64(r.CachedTokens),
		"predicted_n":  float64(r.CompletionTokens),
		"prompt_ms":    float64(r.Prefill) / 1e6,
		"predicted_ms": float64(r.Decode) / 1e6,
	} {
		if got := a.timings.Get(name); !got.Exists() || math.Abs(got.Num-want) > 0.01 {
			return fmt.Errorf("%s: %s is %s, want %v; timings %s", a.id, name, got.Raw, want, a.timings.Raw)
		}
	}
	return nil
}

// warm makes the first reading, without which no window has a beginning.
func (r *rig) warm() {
	r.t.Helper()
	r.learned()
	if a := r.chat(true, 2); a.status != http.StatusOK {
		r.t.Fatalf("status %d, %s", a.status, a.body)
	}
	r.quiet() // it is counted
}

// logBook is the writer of a JSON log.
type logBook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// lines returns the records with a level and a part of a message.
func (l *logBook) lines(t testing.TB, level slog.Level, part string) []gjson.Result {
	t.Helper()
	var found []gjson.Result
	for scan := bufio.NewScanner(strings.NewReader(l.String())); scan.Scan(); {
		if !json.Valid(scan.Bytes()) {
			t.Errorf("a log line is not JSON: %s", scan.Text())
		}
		line := gjson.Parse(scan.Text())
		if line.Get("level").String() == level.String() && strings.Contains(line.Get("msg").String(), part) {
			found = append(found, line)
		}
	}
	return found
}

// requests returns the lines of requests with a level.
func (l *logBook) requests(t testing.TB, level slog.Level) []gjson.Result {
	t.Helper()
	return slices.DeleteFunc(l.lines(t, level, "request"), func(line gjson.Result) bool { return line.Get("msg").Str != "request" })
}

// gate is passed when it is open. Its zero value is no gate; use newGate.
type gate struct {
	arrived chan struct{} // one value for each that came to it
	once    sync.Once
	opened  chan struct{}
}

func newGate(t testing.TB) *gate {
	g := &gate{arrived: make(chan struct{}, 1000), opened: make(chan struct{})}
	t.Cleanup(g.open) // whoever waits when a test fails must not wait for ever
	return g
}

func (g *gate) open() { g.once.Do(func() { close(g.opened) }) }

// pass waits at the gate, and reports false when ctx ended first.
func (g *gate) pass(ctx context.Context) bool {
	g.arrived <- struct{}{}
	select {
	case <-g.opened:
		return true
	case <-ctx.Done():
		return false
	}
}

// reached waits until somebody is at the gate.
func (g *gate) reached(t testing.TB) {
	t.Helper()
	select {
	case <-g.arrived:
	case <-time.After(10 * time.Second):
		t.Fatal("nobody came to the gate")
	}
}

// startUpstream serves an upstream that a test writes itself.
func startUpstream(t testing.TB, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// notAVLLM answers what the sidecar asks of itself as something that is no vLLM, and reports whether it did.
func notAVLLM(w http.ResponseWriter, r *http.Request) bool {
	if r.Header.Get("User-Agent") != "vllm-timings" {
		return false
	}
	http.NotFound(w, r)
	return true
}

// acceptConns is a listener each of whose connections is served in a goroutine of its own, until the test ends.
func acceptConns(t *testing.T, serve func(*net.TCPConn)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go serve(conn.(*net.TCPConn))
		}
	}()
	return l.Addr().String()
}

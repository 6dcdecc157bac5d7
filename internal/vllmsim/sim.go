package vllmsim

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Sim is a simulated vLLM. It is an http.Handler, safe for concurrent use.
type Sim struct {
	cfg    Config
	era    era
	engine *engine
	faults atomic.Pointer[Faults]
	sleep  sleeper

	mu       sync.Mutex // guards closed, and handlers.Add against Close
	closed   bool
	quit     chan struct{} // closed by Close
	handlers sync.WaitGroup

	requests, rejected           atomic.Int64
	metricsFull, metricsFiltered atomic.Int64
}

// New starts a simulated vLLM. Call Close to end it.
func New(cfg Config) *Sim {
	s := &Sim{cfg: cfg.withDefaults(), quit: make(chan struct{})}
	s.era = eraOf(s.cfg.Version)
	s.engine = newEngine(&s.cfg)
	s.faults.Store(&Faults{})
	return s
}

// Config returns the setup with its defaults filled in.
func (s *Sim) Config() Config { return s.cfg }

// SetFaults makes the requests that come from now on meet these faults.
func (s *Sim) SetFaults(f Faults) { s.faults.Store(&f) }

// Faults returns the faults that are set.
func (s *Sim) Faults() Faults { return *s.faults.Load() }

// Restart does what a restart of vLLM does: answers in flight break, counters
// and the prefix cache are empty, and the process start time is a later one.
// The listener stays.
func (s *Sim) Restart() { s.engine.restart() }

// Close ends the engine, breaks the answers in flight, and waits until their
// handlers have ended. Requests that come later are cut off.
func (s *Sim) Close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.quit)
	}
	s.mu.Unlock()
	s.engine.close()
	s.handlers.Wait()
}

// Stats returns what was counted so far.
func (s *Sim) Stats() Stats {
	e := s.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	return Stats{
		Requests:        s.requests.Load(),
		Rejected:        s.rejected.Load(),
		Finished:        e.finished,
		Aborted:         e.aborted,
		Broken:          e.broken,
		Running:         len(e.prefilling) + len(e.decoding),
		Waiting:         len(e.waiting),
		MetricsFull:     s.metricsFull.Load(),
		MetricsFiltered: s.metricsFiltered.Load(),
	}
}

// ServeHTTP answers as vLLM does.
func (s *Sim) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	s.handlers.Add(1)
	s.mu.Unlock()
	defer s.handlers.Done()

	w.Header().Set("Server", "uvicorn")
	w.Header().Set("Vary", "Origin")
	path := r.URL.Path
	if s.cfg.APIKey != "" && strings.HasPrefix(path, "/v1") && r.Method != http.MethodOptions &&
		r.Header.Get("Authorization") != "Bearer "+s.cfg.APIKey {
		writeJSON(w, http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		return
	}
	if s.cfg.DevMode && s.dev(w, r) {
		return
	}
	if r.Method == http.MethodPost && strings.HasPrefix(path, "/v1/") && !s.awake(r) {
		panic(http.ErrAbortHandler)
	}
	switch {
	case path == "/v1/chat/completions":
		s.method(w, r, func() { s.completion(w, r, kindChat) }, http.MethodPost)
	case path == "/v1/completions":
		s.method(w, r, func() { s.completion(w, r, kindText) }, http.MethodPost)
	case path == "/v1/models":
		s.method(w, r, func() { writeJSON(w, http.StatusOK, s.modelList()) }, http.MethodGet)
	case path == "/version":
		s.method(w, r, func() { writeJSON(w, http.StatusOK, `{"version":`+quote(s.cfg.Version)+`}`) }, http.MethodGet)
	case path == "/load":
		s.method(w, r, func() { writeJSON(w, http.StatusOK, `{"server_load":0}`) }, http.MethodGet)
	case path == "/health":
		s.method(w, r, func() { empty(w) }, http.MethodGet)
	case path == "/ping":
		s.method(w, r, func() { empty(w) }, http.MethodGet, http.MethodPost)
	case path == "/metrics" || strings.HasPrefix(path, "/metrics/"):
		s.metrics(w, r)
	default:
		writeJSON(w, http.StatusNotFound, `{"detail":"Not Found"}`)
	}
}

func (s *Sim) method(w http.ResponseWriter, r *http.Request, serve func(), allowed ...string) {
	for _, m := range allowed {
		if r.Method == m {
			serve()
			return
		}
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	writeJSON(w, http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`)
}

func empty(w http.ResponseWriter) {
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
}

func writeJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
}

func (s *Sim) writeError(w http.ResponseWriter, err error) {
	var api *apiError
	if !errors.As(err, &api) {
		// The body could not be read: there is nobody to tell.
		panic(http.ErrAbortHandler)
	}
	param := "null"
	if api.param != "" {
		param = quote(api.param)
	}
	writeJSON(w, api.status, `{"error":{"message":`+quote(api.message)+`,"type":`+quote(api.kind)+
		`,"param":`+param+`,"code":`+strconv.Itoa(api.status)+`}}`)
}

func (s *Sim) modelList() string {
	var b strings.Builder
	created := strconv.FormatInt(time.Now().Unix(), 10)
	b.WriteString(`{"object":"list","data":[`)
	for i, name := range s.cfg.Models {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(`{"id":` + quote(name) + `,"object":"model","created":` + created +
			`,"owned_by":"vllm","root":` + quote("/data/llm/"+s.cfg.Models[0]) + `,"parent":null,"max_model_len":` + strconv.Itoa(s.cfg.MaxModelLen) +
			`,"permission":[{"id":"modelperm-` + s.randomHex() + `","object":"model_permission","created":` + created +
			`,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,` +
			`"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`)
	}
	b.WriteString(`]}`)
	return b.String()
}

// pause waits for d. It reports false when the client left or the server
// closed before that.
func (s *Sim) pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	case <-s.quit:
		return false
	}
}

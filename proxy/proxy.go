// Package proxy is the reverse proxy between a client and vLLM that adds `timings` to answers.
//
// A request goes through this package from top to bottom: a route of Handler, planRequest, forward, and with vLLM's
// answer answerBegan, then stream or editBody, settle, and report.
package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/sse"
	"github.com/vllm-timings/vllm-timings/timings"
)

// endpoint is an endpoint of vLLM whose answers get timings.
type endpoint string

const (
	chat        endpoint = "/v1/chat/completions"
	completions endpoint = "/v1/completions"
	responses   endpoint = "/v1/responses"
	messages    endpoint = "/v1/messages"
	invocations endpoint = "/invocations" // SageMaker's, for any of the others' bodies
	other       endpoint = "other"        // all that goes through untouched
)

// dialect returns the form of the endpoint's answers, unknown where the request decides.
func (e endpoint) dialect() dialect {
	switch e {
	case chat:
		return chatDialect
	case completions:
		return completionsDialect
	case responses:
		return responsesDialect
	case messages:
		return messagesDialect
	}
	return unknownDialect
}

// Config is what a Proxy needs. Zero values are defaults where they are not said to be required.
type Config struct {
	Upstream    *url.URL // of vLLM: required
	Sources     timings.Sources
	Deadline    time.Duration  // how long an answer may be kept for readings of /metrics
	KeepMetrics bool           // leave vLLM's `metrics` beside `timings`
	UsageAlways bool           // never hide usage
	MaxRequest  int64          // bytes of a request body that is edited; longer ones stream through
	MaxEvent    int            // bytes of an event or answer that is edited
	MaxRequests int            // requests that may be answered at a time, those that cost vLLM little not counted; 0 for any number
	Key         string         // for this process's own requests to vLLM; those of clients have theirs
	RootCAs     *x509.CertPool // for an upstream with TLS; nil are the system's
	Socket      string         // path of a unix socket at which the upstream listens, whatever the host of Upstream
	Log         *slog.Logger
	Collectors  *metrics.Collectors // required
}

// Defaults of Config.
const (
	DefaultDeadline   = 250 * time.Millisecond
	DefaultMaxRequest = 64 << 20
	DefaultMaxEvent   = sse.MinLimit
)

// name is what people know the upstream by.
func (c *Config) name() string {
	if c.Socket != "" {
		return (&url.URL{Scheme: "unix", Path: c.Socket}).String()
	}
	return c.Upstream.Redacted()
}

// Proxy is the handler. Close ends what it does in the background.
type Proxy struct {
	sources     timings.Sources
	keepMetrics bool
	usageAlways bool
	maxRequest  int64
	maxEvent    int
	log         *slog.Logger
	collectors  *metrics.Collectors
	transport   *http.Transport
	direct      *direct
	base        *url.URL
	upstream    *upstream
	windows     *windows
	routes      http.Handler
	edited      *httputil.ReverseProxy // for answers that may get timings
	plain       *httputil.ReverseProxy // for everything else
	draining    atomic.Bool

	background background
	open       open               // requests
	detached   open               // connections of clients that left net/http's server
	linger     time.Duration      // how long one may stay open when its answer has ended
	places     chan struct{}      // one in it for each request that is answered, nil for any number of them
	running    context.Context    // ends with Cut
	cut        context.CancelFunc // ends running

	inFlight atomic.Int64  // requests that are with vLLM
	sent     atomic.Uint64 // requests that were ever sent to it

	stop context.CancelFunc
	wg   sync.WaitGroup
}

// New returns a Proxy before the vLLM at cfg.Upstream, which need not run yet.
func New(cfg Config) (*Proxy, error) {
	if cfg.Upstream == nil || cfg.Upstream.Host == "" || cfg.Upstream.Scheme != "http" && cfg.Upstream.Scheme != "https" {
		return nil, errors.New("the upstream must be a URL like http://127.0.0.1:8000")
	}
	if cfg.Collectors == nil {
		return nil, errors.New("no collectors")
	}
	if cfg.Sources == nil {
		cfg.Sources = timings.AllSources
	}
	if cfg.Deadline == 0 {
		cfg.Deadline = DefaultDeadline
	}
	if cfg.MaxRequest == 0 {
		cfg.MaxRequest = DefaultMaxRequest
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{
		sources:     cfg.Sources,
		keepMetrics: cfg.KeepMetrics,
		usageAlways: cfg.UsageAlways,
		maxRequest:  cfg.MaxRequest,
		maxEvent:    max(cfg.MaxEvent, DefaultMaxEvent),
		log:         cfg.Log,
		collectors:  cfg.Collectors,
		transport:   newTransport(cfg),
		base:        cfg.Upstream,
		linger:      lingerTime,
	}
	p.direct = &direct{transport: p.transport, next: retrying{p.transport}}
	if cfg.MaxRequests > 0 {
		p.places = make(chan struct{}, cfg.MaxRequests)
	}
	reader := metrics.NewReader(p.transport, p.base, metrics.ReaderOptions{Bearer: cfg.Key})
	p.upstream = newUpstream(p.base, cfg.name(), cfg.Key, p.transport, reader, p.collectors, p.log)
	p.upstream.ready = func(ctx context.Context) { _, _ = p.windows.readings.Next(ctx) }
	p.windows = newWindows(reader, p.collectors, p.log, cfg.Deadline, p.upstream.forget)
	p.edited = p.reverseProxy(0, p.answerBegan)
	p.plain = p.reverseProxy(-1, p.answerBegan)
	p.routes = p.router()
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	p.running, p.cut = context.WithCancel(context.Background())
	p.wg.Go(func() { p.upstream.run(ctx) })
	return p, nil
}

// Close stops what runs in the background and closes idle connections. Requests must have ended.
func (p *Proxy) Close() {
	p.stop()
	p.windows.close()
	p.wg.Wait()
	p.direct.idle.close()
	p.transport.CloseIdleConnections()
}

// Drain makes /-/ready answer 503, so that nothing new is sent here.
func (p *Proxy) Drain() { p.draining.Store(true) }

// newTransport returns the Transport to vLLM.
func newTransport(cfg Config) *http.Transport {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	dial := dialer.DialContext
	if cfg.Socket != "" {
		dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", cfg.Socket)
		}
	}
	return &http.Transport{
		DialContext:         dial,
		TLSClientConfig:     &tls.Config{RootCAs: cfg.RootCAs},
		TLSHandshakeTimeout: 10 * time.Second,
		// All connections go to one host; the default keeps two, and the others are opened anew for each request.
		MaxIdleConnsPerHost: maxIdle,
		IdleConnTimeout:     idleFor,
		DisableCompression:  true, // bytes go through as they are
		// More of a header would be kept in memory.
		MaxResponseHeaderBytes: maxAnswerHeader,
		// Each open answer keeps a connection with its buffers. This one is for a request's header; bodies go past it.
		WriteBufferSize:       1 << 10,
		ExpectContinueTimeout: time.Second,
	}
}

// reverseProxy returns a proxy that flushes as flushInterval says; event streams are always flushed at once.
func (p *Proxy) reverseProxy(flushInterval time.Duration, began func(*http.Response) error) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:        p.rewrite,
		Transport:      p.direct,
		FlushInterval:  flushInterval,
		ErrorLog:       quiet,
		BufferPool:     bufferPool{},
		ModifyResponse: began,
		ErrorHandler:   p.failed,
	}
}

// quiet is for what net/http says of broken answers, with parts of them. A request's line says what broke.
var quiet = log.New(io.Discard, "", 0)

// Open returns how many requests have not been answered to the end.
func (p *Proxy) Open() int { return p.open.count() }

// Wait waits until there is no such request, or ctx ends, and then for their connections. An http.Server's Shutdown does
// not know of those that are streamed or upgraded.
func (p *Proxy) Wait(ctx context.Context) error {
	if err := p.open.wait(ctx); err != nil {
		return err
	}
	return p.detached.wait(context.Background()) // for lingerTime at most
}

// Cut breaks off the answers that are streamed.
func (p *Proxy) Cut() { p.cut() }

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.open.add(1)
	defer p.open.add(-1)
	if !p.takes(w, r) {
		return
	}
	if EndsConnection(r) {
		w.Header().Set("Connection", "close")
	}
	p.routes.ServeHTTP(w, r)
}

func (p *Proxy) router() http.Handler {
	r := chi.NewRouter()
	r.Get("/-/healthy", p.healthy)
	r.Get("/-/ready", p.ready)
	r.Head("/-/healthy", p.healthy)
	r.Head("/-/ready", p.ready)
	r.Method(http.MethodGet, "/-/metrics", p.collectors.Handler())
	r.Get("/metrics", p.metricsPage)
	r.Get(string(responses)+"/{id}", p.retrieve)
	for _, e := range []endpoint{chat, completions, responses, messages, invocations} {
		r.Post(string(e), func(w http.ResponseWriter, r *http.Request) { p.generate(e, w, r) })
	}
	r.NotFound(p.passThrough)
	r.MethodNotAllowed(p.passThrough)
	return r
}

// generate serves an endpoint whose answers get timings.
func (p *Proxy) generate(e endpoint, w http.ResponseWriter, r *http.Request) {
	ex := p.begin(e, r)
	detached := false
	defer func() {
		if !detached {
			p.report(ex)
		}
	}()
	if !p.enter(ex, w, r) {
		return
	}
	body, rest, err := readBody(r, p.maxRequest)
	read := time.Now()
	switch {
	case err != nil:
		p.badBody(ex, w, err)
		return
	case rest != nil:
		ex.unedited("request_too_large")
		if r.ContentLength < 0 {
			r.Header.Del("Expect") // some of the body is here, the client has had its go-ahead
		}
		r.Body = rest
	default:
		ex.plan, body = planRequest(e, body, p.usageAlways, p.upstream.quirks())
		if !ex.known {
			ex.unedited("request_not_understood")
		}
		ex.body = newReplayable(body)
		r.Body, _ = ex.body.open()
		r.GetBody = ex.body.open
		r.ContentLength = int64(len(body))
		r.TransferEncoding = nil
		r.Header.Del("Expect") // the body is here, the client has had its go-ahead
	}
	ex.own = time.Since(read)
	if detached = ex.known && p.detach(ex, w, r); !detached {
		p.forward(ex, p.edited, w, r)
	}
}

// retrieve serves a response that ran in the background.
func (p *Proxy) retrieve(w http.ResponseWriter, r *http.Request) {
	ex := p.begin(responses, r)
	defer p.report(ex)
	ex.plan = plan{endpoint: responses, dialect: responsesDialect, known: true, single: true, showUsage: true}
	ex.retrieved = true
	p.forward(ex, p.edited, w, r)
}

// passThrough serves everything else.
func (p *Proxy) passThrough(w http.ResponseWriter, r *http.Request) {
	ex := p.begin(other, r)
	defer p.report(ex)
	if p.enter(ex, w, r) {
		p.forward(ex, p.plain, w, r)
	}
}

func (p *Proxy) begin(e endpoint, r *http.Request) *exchange {
	p.collectors.RequestStarted()
	return &exchange{plan: plan{endpoint: e}, proxy: p, ctx: r.Context(), method: r.Method, path: r.URL.Path, start: time.Now()}
}

// forward sends a request to vLLM and its answer to the client.
func (p *Proxy) forward(ex *exchange, by http.Handler, w http.ResponseWriter, r *http.Request) {
	if ex.body == nil && r.ContentLength != 0 {
		// vLLM may answer before it has the whole body. Without this, the server would stop reading it then, and the
		// Transport, which still sends it, would take that for an error and close the connection in the midst of the answer.
		_ = http.NewResponseController(w).EnableFullDuplex()
		ex.upload = &upload{ReadCloser: r.Body, left: r.ContentLength}
		r.Body = ex.upload
		w = oneContinue{w}
	}
	if r.Method == http.MethodPost {
		ex.alone = p.inFlight.Add(1) == 1
		defer p.inFlight.Add(-1)
		ex.others = p.sent.Add(1) - 1
	}
	p.upstream.hurry()
	if ex.alone && ex.known && p.sources.Has(timings.Window) {
		began := time.Now()
		switch exact := p.upstream.exact(); {
		case !exact:
			p.windows.baseline()
		case ex.dialect == messagesDialect: // vLLM has no metrics in those
			p.windows.before(r.Context())
		}
		ex.own += time.Since(began)
	}
	if ex.retrieved {
		ex.sent = p.background.when(chi.URLParam(r, "id"))
	} else {
		ex.sent = time.Now()
	}
	whole := false
	defer func() {
		if !whole && !ex.clientLeft() { // vLLM's answer broke off, and a panic has the client see that
			ex.bodyFailed(io.ErrUnexpectedEOF)
			// What came until then is the client's, headers too. The server drops what it has not sent yet.
			_ = http.NewResponseController(w).Flush()
		}
	}()
	by.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, ex)))
	whole = true
}

// oneContinue leaves "100 Continue" to the server, which sends one with the first read of the body: that comes when vLLM's
// was there, or was waited for long enough. Passed on as well, a late one of vLLM's would be the client's second.
type oneContinue struct{ http.ResponseWriter }

func (w oneContinue) WriteHeader(status int) {
	if status != http.StatusContinue {
		w.ResponseWriter.WriteHeader(status)
	}
}

// Unwrap is for http.ResponseController.
func (w oneContinue) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// rewrite makes the request to vLLM out of the client's: another address, nothing else. What ReverseProxy takes away to
// be safe by default is put back: this proxy decides nothing by it, and vLLM is to see what it would see without it.
func (p *Proxy) rewrite(r *httputil.ProxyRequest) {
	in, out := r.In, r.Out
	out.URL.Scheme, out.URL.Host = p.base.Scheme, p.base.Host
	if prefix := strings.TrimRight(p.base.Path, "/"); prefix != "" {
		out.URL.RawPath = strings.TrimRight(p.base.EscapedPath(), "/") + in.URL.EscapedPath()
		out.URL.Path = prefix + in.URL.Path
	}
	out.URL.RawQuery = in.URL.RawQuery
	out.Host = in.Host
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := in.Header[name]; ok && !listed(in.Header, name) {
			out.Header[name] = v
		}
	}
}

// listed reports whether h says of a header that it is for this connection only.
func listed(h http.Header, name string) bool {
	for _, names := range h["Connection"] {
		for other := range strings.SplitSeq(names, ",") {
			if strings.EqualFold(strings.TrimSpace(other), name) {
				return true
			}
		}
	}
	return false
}

func (p *Proxy) answerBegan(resp *http.Response) error {
	exchangeOf(resp.Request.Context()).answerBegan(resp)
	return nil
}

// bufferPool implements httputil.BufferPool.
type bufferPool struct{}

func (bufferPool) Get() []byte  { return bigBuffers.Get().(*[bigBuffer]byte)[:] }
func (bufferPool) Put(b []byte) { bigBuffers.Put((*[bigBuffer]byte)(b)) }

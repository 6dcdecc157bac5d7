package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
	"github.com/vllm-timings/vllm-timings/timings"
)

const (
	// leastHeader is what --max-header-bytes must be at least. net/http reads that much at a time.
	leastHeader = 4 << 10
	// cutTimeout bounds how long answers that were cut off may take to notice.
	cutTimeout = time.Second
)

// The flags of commands that serve. docs/flags.md has a row for each. The texts are read by their complete methods.
type (
	serveCmd struct {
		ListenFlag
		Upstream string `default:"http://127.0.0.1:8000" placeholder:"URL" help:"Address of vLLM, which need not run yet. unix:///run/vllm.sock is a socket. Default ${default}."`
		ProxyFlags
		DrainTimeout string `default:"30s" placeholder:"TIME" help:"How long answers in flight may take to end after SIGTERM or SIGINT. Default ${default}."`
		LogFlags
	}
	// ListenFlag says where to serve.
	ListenFlag struct {
		Listen string `default:"127.0.0.1:8010" placeholder:"ADDR" help:"Address to serve at, host:port, or :port for all interfaces. Default ${default}."`
	}
	// AccessFlags are what may be needed to talk to vLLM besides its address.
	AccessFlags struct {
		UpstreamCA         string `name:"upstream-ca" placeholder:"FILE" help:"Certificates (PEM) to trust besides the system's, for an upstream with https."`
		UpstreamAPIKey     string `name:"upstream-api-key" placeholder:"KEY" help:"Key for the readings of /version and /metrics, where they need one. Clients send their own. Others on this machine may see it here: better use the variable or the file."`
		UpstreamAPIKeyFile string `name:"upstream-api-key-file" placeholder:"FILE" help:"File with that key."`
	}
	// ProxyFlags say how to serve.
	ProxyFlags struct {
		AccessFlags
		Sources         string `default:"upstream,native,window,observed" placeholder:"LIST" help:"Where numbers may come from, in order; the first that has exact ones is taken. Default ${default}."`
		MetricsDeadline string `default:"250ms" placeholder:"TIME" help:"How long the end of an answer may wait for vLLM's /metrics. Default ${default}."`
		KeepMetrics     toggle `default:"false" help:"Leave vLLM's own metrics in answers beside timings. Not with llama-swap, which shows wrong speeds then."`
		Usage           string `default:"auto" placeholder:"WHEN" help:"auto: hide the usage that the client did not ask for. always: never hide it, for a vLLM with --enable-force-include-usage. Default ${default}."`
		MaxRequestBytes string `default:"67108864" placeholder:"N" help:"Longer request bodies stream through unedited. Default ${default} (64 MiB)."`
		MaxEventBytes   string `default:"16777216" placeholder:"N" help:"Longer events and answers pass through unedited. Default and least ${default} (16 MiB)."`
		MaxHeaderBytes  string `default:"1048576" placeholder:"N" help:"Longer headers of requests are answered with status 431. Default ${default} (1 MiB)."`
		HeaderTimeout   string `default:"30s" placeholder:"TIME" help:"How long a client may take to send the header of a request. Bodies and answers may take any time. Default ${default}."`

		MaxConcurrentRequests string `default:"0" placeholder:"N" help:"While so many requests are being answered, further ones get status 429. GET, HEAD and OPTIONS do not count. Default ${default}, no limit."`
	}
	// LogFlags say what is told.
	LogFlags struct {
		LogLevel  string `default:"info" placeholder:"LEVEL" help:"debug, info, warn or error. Default ${default}."`
		LogFormat string `default:"text" placeholder:"FORMAT" help:"text, json, or llama: as text, with the numbers of a request in the lines that llama.cpp prints. Default ${default}."`
	}
)

// settings are the flags as values that can be used.
type settings struct {
	upstream    *url.URL // its scheme may be unix
	cas         *x509.CertPool
	key         string
	sources     timings.Sources
	deadline    time.Duration
	keepMetrics bool
	usageAlways bool
	maxRequest  int64
	maxEvent    int
	maxHeader   int
	headerTime  time.Duration
	maxRequests int
	drain       time.Duration
	logLevel    slog.Level
	logFormat   string
}

// complete reads all flags and reports all that is wrong with them at once.
func (c *serveCmd) complete() (settings, error) {
	var s settings
	var wrong problems
	var err error
	s.upstream, err = parseUpstream(c.Upstream)
	c.ListenFlag.complete(&wrong)
	wrong.add("upstream", c.Upstream, err)
	c.notSelf(s.upstream, c.Upstream, &wrong)
	c.ProxyFlags.complete(&s, &wrong)
	s.drain, err = parseDuration(c.DrainTimeout, 0)
	wrong.add("drain-timeout", c.DrainTimeout, err)
	c.LogFlags.complete(&s, &wrong)
	return s, wrong.err()
}

func (c *ListenFlag) complete(wrong *problems) {
	_, _, err := parseListen(c.Listen)
	wrong.add("listen", c.Listen, err)
}

// notSelf makes sure that an upstream, if there is one, is not what is served here. Its flag had that value.
func (c *ListenFlag) notSelf(upstream *url.URL, value string, wrong *problems) {
	host, port, err := parseListen(c.Listen)
	if err == nil && upstream != nil && isSelf(upstream, host, port) {
		wrong.add("upstream", value, fmt.Errorf("%s is what --listen %s serves: each request would come back for ever. Give vLLM's address, or another port to --listen", upstream.Redacted(), c.Listen))
	}
}

// open begins to listen.
func (c *ListenFlag) open() (net.Listener, error) {
	listener, err := net.Listen("tcp", c.Listen)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("--listen %s is in use by another process: stop that or choose another port", c.Listen)
	case err != nil:
		return nil, fmt.Errorf("--listen %s: %w", c.Listen, err)
	}
	return listener, nil
}

func (c *ProxyFlags) complete(s *settings, wrong *problems) {
	c.AccessFlags.complete(s, wrong)
	var err error
	s.sources, err = timings.ParseSources(c.Sources)
	wrong.add("sources", c.Sources, err)
	s.deadline, err = parseDuration(c.MetricsDeadline, time.Millisecond)
	wrong.add("metrics-deadline", c.MetricsDeadline, err)
	s.keepMetrics, err = parseToggle(c.KeepMetrics)
	wrong.add("keep-metrics", string(c.KeepMetrics), err)
	usage, err := parseWord(c.Usage, "auto", "always")
	wrong.add("usage", c.Usage, err)
	s.usageAlways = usage == "always"
	s.maxRequest, err = parseBytes(c.MaxRequestBytes, 1)
	wrong.add("max-request-bytes", c.MaxRequestBytes, err)
	maxEvent, err := parseBytes(c.MaxEventBytes, proxy.DefaultMaxEvent)
	wrong.add("max-event-bytes", c.MaxEventBytes, err)
	s.maxEvent = int(maxEvent)
	maxHeader, err := parseBytes(c.MaxHeaderBytes, leastHeader)
	wrong.add("max-header-bytes", c.MaxHeaderBytes, err)
	s.maxHeader = int(maxHeader)
	s.headerTime, err = parseDuration(c.HeaderTimeout, time.Millisecond)
	wrong.add("header-timeout", c.HeaderTimeout, err)
	s.maxRequests, err = parseCount(c.MaxConcurrentRequests)
	wrong.add("max-concurrent-requests", c.MaxConcurrentRequests, err)
}

func (c *LogFlags) complete(s *settings, wrong *problems) {
	var err error
	s.logLevel, err = parseLevel(c.LogLevel)
	wrong.add("log-level", c.LogLevel, err)
	s.logFormat, err = parseWord(c.LogFormat, "text", "json", "llama")
	wrong.add("log-format", c.LogFormat, err)
}

func (c *AccessFlags) complete(s *settings, wrong *problems) {
	var err error
	if c.UpstreamCA != "" {
		s.cas, err = readCAs(c.UpstreamCA)
		if err == nil && s.upstream != nil && s.upstream.Scheme != "https" {
			err = fmt.Errorf("the upstream %s has no TLS: begin it with https://, or leave this out", s.upstream.Redacted())
		}
		wrong.add("upstream-ca", c.UpstreamCA, err)
	}
	s.key, err = parseKey(c.UpstreamAPIKey)
	wrong.add("upstream-api-key", c.UpstreamAPIKey, err)
	switch {
	case c.UpstreamAPIKeyFile == "":
		return
	case c.UpstreamAPIKey != "":
		err = errors.New("there is --upstream-api-key too: give one of them")
	default:
		s.key, err = readKey(c.UpstreamAPIKeyFile)
	}
	wrong.add("upstream-api-key-file", c.UpstreamAPIKeyFile, err)
}

// check implements checker.
func (c *serveCmd) check() error {
	_, err := c.complete()
	return err
}

func (s *settings) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: s.logLevel}
	switch s.logFormat {
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts))
	case "llama":
		return slog.New(newLlamaLog(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// newCollectors returns our own metrics.
func newCollectors() *metrics.Collectors {
	v := buildVersion()
	return metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{Version: v.version, Commit: v.commit})
}

// proxy returns the proxy before the upstream.
func (s *settings) proxy(c *metrics.Collectors, log *slog.Logger) (*proxy.Proxy, error) {
	upstream, socket := s.upstream, ""
	if upstream.Scheme == "unix" {
		upstream, socket = &url.URL{Scheme: "http", Host: "localhost"}, upstream.Path
	}
	return proxy.New(proxy.Config{
		Upstream:    upstream,
		Socket:      socket,
		RootCAs:     s.cas,
		Key:         s.key,
		Sources:     s.sources,
		Deadline:    s.deadline,
		KeepMetrics: s.keepMetrics,
		UsageAlways: s.usageAlways,
		MaxRequest:  s.maxRequest,
		MaxEvent:    s.maxEvent,
		MaxRequests: s.maxRequests,
		Log:         log,
		Collectors:  c,
	})
}

// Run serves until the context ends.
func (c *serveCmd) Run(e *env) error {
	s, err := c.complete()
	if err != nil {
		return err
	}
	listener, err := c.open()
	if err != nil {
		return err
	}
	log := s.logger(e.stderr)
	p, err := s.proxy(newCollectors(), log)
	if err != nil {
		_ = listener.Close()
		return err
	}
	defer p.Close()
	log.Info("serving", "listen", "http://"+listener.Addr().String(), "upstream", s.upstream.Redacted(), "sources", s.sources.String(), "version", buildVersion().version)
	if strings.HasSuffix(strings.TrimRight(s.upstream.Path, "/"), "/v1") {
		log.Warn("--upstream ends in /v1, which the paths of requests begin with: vLLM is asked for /v1/v1/... Leave it out if that is not meant", "upstream", s.upstream.Redacted())
	}
	return serve(e.ctx, listener, p, &s, log)
}

// served is a handler that knows of its requests what http.Server does not. *proxy.Proxy is one.
type served interface {
	http.Handler
	Drain()                     // says to those who ask that nothing new should come
	Open() int                  // requests that are not answered to the end
	Wait(context.Context) error // until there is none
	Cut()                       // ends those that http.Server cannot
}

// server serves a handler.
type server struct {
	http   *http.Server
	served served
	cut    context.CancelFunc
	failed chan error // what Serve returned
	log    *slog.Logger
}

func startServer(listener net.Listener, h served, set *settings, log *slog.Logger) *server {
	all, cut := context.WithCancel(context.Background())
	s := &server{served: h, cut: cut, failed: make(chan error, 1), log: log, http: &http.Server{
		Handler:           h,
		ConnContext:       proxy.ConnContext,
		ReadHeaderTimeout: set.headerTime, // and nothing else has a limit
		MaxHeaderBytes:    set.maxHeader,
		BaseContext:       func(net.Listener) context.Context { return all },
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
	go func() { s.failed <- s.http.Serve(proxy.Clients{Listener: listener}) }()
	return s
}

// stop accepts nothing more, and lets the answers in flight end until the time is over. Then it cuts them off, with this
// warning.
func (s *server) stop(within time.Duration, warning string) error {
	defer s.cut()
	limit, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	// Shutdown refuses new connections at once and waits for all others but upgraded ones, of which it knows nothing.
	err := s.http.Shutdown(limit)
	if err == nil {
		err = s.served.Wait(limit)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		s.log.Warn(warning, "in_flight", s.served.Open())
		err = s.http.Close()
		s.cut()
		s.served.Cut()
		limit, cancel := context.WithTimeout(context.Background(), cutTimeout)
		defer cancel()
		_ = s.served.Wait(limit)
	}
	if ended := <-s.failed; err == nil && !errors.Is(ended, http.ErrServerClosed) {
		err = ended
	}
	return err
}

// drain is stop with what is to be told of it.
func (s *server) drain(within time.Duration) error {
	s.served.Drain()
	s.log.Info("stopping: answers in flight may end, a second signal ends them at once", "in_flight", s.served.Open(), "drain_timeout", within.String())
	return s.stop(within, "answers were cut off: they took longer than --drain-timeout")
}

// serve serves h until ctx ends, and then until the answers in flight have ended or the time for that is over.
func serve(ctx context.Context, listener net.Listener, h served, set *settings, log *slog.Logger) error {
	s := startServer(listener, h, set, log)
	select {
	case err := <-s.failed:
		s.cut()
		return err
	case <-ctx.Done():
	}
	err := s.drain(set.drain)
	if err == nil {
		log.Info("stopped")
	}
	return err
}

package metrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// Mode is how vLLM's metrics can be read.
type Mode uint32

const (
	// ModeUnknown: not probed yet.
	ModeUnknown Mode = iota
	// ModeFiltered: GET /metrics/?name[]=..., with the slash, reaches
	// prometheus_client's own handler, which gives the wanted samples only
	// (prometheus_client 0.23.1 and newer, one API server process). 1.5 KB and
	// 0.7 ms of vLLM's event loop.
	ModeFiltered
	// ModeFull: only the whole page of GET /metrics has the samples, 50 to
	// 60 KB and 6 to 10 ms of vLLM's event loop.
	ModeFull
	// ModeNoStats: there is a page, without the samples: vLLM runs with
	// --disable-log-stats.
	ModeNoStats
	// ModeNone: no page to be had.
	ModeNone
)

func (m Mode) String() string {
	switch m {
	case ModeUnknown:
		return "unknown"
	case ModeFiltered:
		return "filtered"
	case ModeFull:
		return "full"
	case ModeNoStats:
		return "no-stats"
	case ModeNone:
		return "none"
	default:
		return fmt.Sprintf("mode-%d", uint32(m))
	}
}

// Readable says whether [Reader.Read] can give a reading.
func (m Mode) Readable() bool { return m == ModeFiltered || m == ModeFull }

// ReaderOptions are optional; the zero value is good.
type ReaderOptions struct {
	// Bearer is sent as the key, for metrics behind something that asks for
	// one; vLLM itself does not, not even with --api-key.
	Bearer string
	// Now is the clock of [Reading.Began] and Ended; time.Now by default.
	Now func() time.Time
}

// Reader reads the metrics page of one vLLM. It is safe for concurrent use.
type Reader struct {
	rt             http.RoundTripper
	filtered, full *http.Request // templates
	now            func() time.Time
	mode           atomic.Uint32
}

// NewReader makes a reader for the vLLM at base, which may have a path prefix.
// It asks through rt alone, so no redirect is followed and no cookie is kept.
func NewReader(rt http.RoundTripper, base *url.URL, opts ReaderOptions) *Reader {
	r := &Reader{rt: rt, now: opts.Now}
	if r.now == nil {
		r.now = time.Now
	}
	header := http.Header{
		// Never OpenMetrics: there the names are other ones (vllm_...).
		"Accept": {"text/plain;version=0.0.4"},
		// vLLM would spend time on gzip, and the Transport on undoing it.
		"Accept-Encoding": {"identity"},
		"User-Agent":      {"vllm-timings"},
	}
	if opts.Bearer != "" {
		header.Set("Authorization", "Bearer "+opts.Bearer)
	}
	template := func(path string, query url.Values) *http.Request {
		root := *base
		if root.Path == "" {
			root.Path = "/" // else JoinPath gives a path without a slash before it
		}
		u := root.JoinPath(path)
		u.User, u.Fragment, u.RawFragment = nil, "", ""
		u.RawQuery = query.Encode()
		req := &http.Request{
			Method: http.MethodGet, URL: u, Host: u.Host, Header: header,
			Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		}
		if base.User != nil && opts.Bearer == "" {
			password, _ := base.User.Password()
			req.Header = header.Clone()
			req.SetBasicAuth(base.User.Username(), password)
		}
		return req
	}
	names := make([]string, 0, len(wanted)+1)
	for _, name := range wanted {
		names = append(names, namePrefix+name)
	}
	names = append(names, processStartName)
	r.filtered = template("metrics/", url.Values{"name[]": names})
	r.full = template("metrics", nil)
	return r
}

// Mode is what the last [Reader.Probe] found.
func (r *Reader) Mode() Mode { return Mode(r.mode.Load()) }

// Probe finds out how the metrics can be read, with at most two requests, and
// keeps the answer for [Reader.Read]. The error is always an [*Error] and says
// why the mode is not a readable one; it is nil for ModeFiltered and ModeFull.
// vLLM is told apart from its answers alone, so probe again after it restarts.
func (r *Reader) Probe(ctx context.Context) (Mode, error) {
	mode, err := r.probe(ctx)
	r.mode.Store(uint32(mode))
	return mode, err
}

func (r *Reader) probe(ctx context.Context) (Mode, error) {
	// A vLLM that has just started has its samples with the value 0, so an
	// empty filtered page means several API server processes or no stats.
	p, err := r.get(ctx, r.filtered)
	if err == nil && len(p.Series) > 0 && p.other == 0 {
		return ModeFiltered, nil
	}
	if e := (*Error)(nil); errors.As(err, &e) && e.Kind == KindTransport {
		return ModeNone, err
	}
	p, err = r.get(ctx, r.full)
	switch {
	case err != nil:
		return ModeNone, err
	case len(p.Series) > 0:
		return ModeFull, nil
	}
	return ModeNoStats, r.noSamples(r.full, p)
}

// Read asks for the page once, in the present mode. A nil error means that
// there is at least one series. The error is always an [*Error]; KindNoSamples
// means that vLLM has changed since the last probe.
func (r *Reader) Read(ctx context.Context) (Reading, error) {
	req := r.full
	switch r.Mode() {
	case ModeFiltered:
		req = r.filtered
	case ModeFull:
	default:
		return Reading{}, fail(req, KindMode, nil)
	}
	p, err := r.get(ctx, req)
	if err == nil && len(p.Series) == 0 {
		err = r.noSamples(req, p)
	}
	if err != nil {
		return Reading{}, err
	}
	return p.Reading, nil
}

func (r *Reader) noSamples(req *http.Request, p page) error {
	what := "it has no vllm: sample"
	if p.vllm > 0 {
		what = fmt.Sprintf("it has %d vllm: samples, but not those of finished requests", p.vllm)
	}
	return fail(req, KindNoSamples, errors.New(what))
}

// maxKeptBuffer is above any whole page of a single engine.
const maxKeptBuffer = 256 << 10

// buffers hold the pages while they are parsed; a Reading keeps no byte of it.
var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func (r *Reader) get(ctx context.Context, template *http.Request) (page, error) {
	req := template.WithContext(ctx)
	// The Transport may not change a request's header, other RoundTrippers do.
	req.Header = template.Header.Clone()
	began := r.now()
	resp, err := r.rt.RoundTrip(req)
	if err != nil {
		return page{}, fail(template, KindTransport, cause(ctx, err))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		// A short rest is read so that the connection can be used again.
		_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
		e := fail(template, KindStatus, nil)
		e.Status = resp.StatusCode
		return page{}, e
	}
	if err := checkHeader(resp.Header); err != nil {
		return page{}, fail(template, KindFormat, err)
	}
	buf := buffers.Get().(*bytes.Buffer)
	defer func() {
		if buf.Cap() <= maxKeptBuffer {
			buf.Reset()
			buffers.Put(buf)
		}
	}()
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, MaxPage+1))
	ended := r.now()
	if err != nil {
		return page{}, fail(template, KindTransport, fmt.Errorf("after %d bytes: %w", n, cause(ctx, err)))
	}
	p, err := parse(buf.Bytes())
	if err != nil {
		return page{}, fail(template, KindFormat, err)
	}
	p.Began, p.Ended = began, ended
	return p, nil
}

// checkHeader rejects what cannot be the text format: a login page would
// otherwise look like a vLLM without statistics.
func checkHeader(h http.Header) error {
	if c := h.Get("Content-Encoding"); c != "" && c != "identity" {
		return fmt.Errorf("it came as %q although it was asked for uncompressed", c)
	}
	ct := h.Get("Content-Type")
	if ct == "" {
		return nil
	}
	if media, _, err := mime.ParseMediaType(ct); err != nil || media != "text/plain" {
		return fmt.Errorf("it has the content type %q, not text/plain", ct)
	}
	return nil
}

// cause prefers the context's own reason to the Transport's wording of it.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil && !errors.Is(err, c) {
		return c
	}
	return err
}

func fail(req *http.Request, kind ErrorKind, err error) *Error {
	u := *req.URL
	u.RawQuery = ""
	return &Error{Kind: kind, URL: u.String(), Err: err}
}

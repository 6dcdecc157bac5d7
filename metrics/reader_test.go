package metrics

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// fakeVLLM serves /metrics/ and /metrics, and remembers what was asked.
type fakeVLLM struct {
	slash, full http.HandlerFunc

	mu   sync.Mutex
	seen []*http.Request
}

func (f *fakeVLLM) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.seen = append(f.seen, r)
	f.mu.Unlock()
	h := http.HandlerFunc(http.NotFound)
	switch {
	case strings.HasSuffix(r.URL.Path, "/metrics/") && f.slash != nil:
		h = f.slash
	case strings.HasSuffix(r.URL.Path, "/metrics") && f.full != nil:
		h = f.full
	}
	h(w, r)
}

func (f *fakeVLLM) paths() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var paths []string
	for _, r := range f.seen {
		paths = append(paths, r.URL.Path)
	}
	return paths
}

func start(t *testing.T, f *fakeVLLM, prefix string, opts ReaderOptions) *Reader {
	t.Helper()
	s := httptest.NewServer(f)
	rt := &http.Transport{}
	t.Cleanup(func() {
		rt.CloseIdleConnections()
		s.Close()
	})
	base, err := url.Parse(s.URL + prefix)
	if err != nil {
		t.Fatal(err)
	}
	return NewReader(rt, base, opts)
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", code) }
}

func answer(contentType, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = io.WriteString(w, body)
	}
}

func TestProbe(t *testing.T) {
	const text = "text/plain; version=0.0.4; charset=utf-8"
	for _, tt := range []struct {
		name  string
		vllm  *fakeVLLM
		mode  Mode
		kind  ErrorKind // 0: no error
		words string    // in the error
		asked int
	}{
		{"0.11.2", &fakeVLLM{slash: filtering(t, "0.11.2/metrics_full.txt"), full: replay(t, "0.11.2/metrics_full.txt")}, ModeFiltered, 0, "", 1},
		{"0.19.1", &fakeVLLM{slash: filtering(t, "0.19.1/metrics_full.txt"), full: replay(t, "0.19.1/metrics_full.txt")}, ModeFiltered, 0, "", 1},
		{"0.32.0", &fakeVLLM{slash: filtering(t, "0.32.0/metrics_full.txt"), full: replay(t, "0.32.0/metrics_full.txt")}, ModeFiltered, 0, "", 1},
		{"fresh", &fakeVLLM{slash: filtering(t, "0.19.1/api2_metrics_fresh.txt")}, ModeFiltered, 0, "", 1},
		{"old prometheus_client", &fakeVLLM{slash: replay(t, "0.19.1/metrics_full.txt"), full: replay(t, "0.19.1/metrics_full.txt")}, ModeFull, 0, "", 2},
		{"two API servers, 0.11.2", &fakeVLLM{slash: replay(t, "0.11.2/api2_metrics_filtered_slash.txt"), full: replay(t, "0.11.2/api2_metrics_full.txt")}, ModeFull, 0, "", 2},
		{"two API servers, 0.19.1", &fakeVLLM{slash: replay(t, "0.19.1/api2_metrics_filtered_slash.txt"), full: replay(t, "0.19.1/api2_metrics_full.txt")}, ModeFull, 0, "", 2},
		{"two API servers, 0.32.0", &fakeVLLM{slash: replay(t, "0.32.0/api2_metrics_filtered_slash.txt"), full: replay(t, "0.32.0/api2_metrics_full.txt")}, ModeFull, 0, "", 2},
		{"two API servers, fresh", &fakeVLLM{slash: replay(t, "0.19.1/api2_metrics_filtered_slash.txt"), full: replay(t, "0.19.1/api2_metrics_fresh.txt")}, ModeFull, 0, "", 2},
		{"only without the slash", &fakeVLLM{full: replay(t, "0.32.0/metrics_full.txt")}, ModeFull, 0, "", 2},
		{"OpenMetrics at the filter", &fakeVLLM{slash: replay(t, "0.32.0/metrics_slash_openmetrics_filtered.txt"), full: replay(t, "0.32.0/metrics_full.txt")}, ModeFull, 0, "", 2},
		{"no stats", &fakeVLLM{slash: replay(t, "0.19.1/nologstats_metrics_filtered.txt"), full: replay(t, "0.19.1/nologstats_metrics_full.txt")}, ModeNoStats, KindNoSamples, "--disable-log-stats", 2},
		{"other vllm samples", &fakeVLLM{slash: answer(text, ""), full: answer(text, "vllm:x 1\nvllm:y 2\n")}, ModeNoStats, KindNoSamples, "2 vllm: samples", 2},
		{"not there", &fakeVLLM{}, ModeNone, KindStatus, "404", 2},
		{"key wanted", &fakeVLLM{slash: status(401), full: status(401)}, ModeNone, KindStatus, "key", 2},
		{"forbidden", &fakeVLLM{slash: status(403), full: status(403)}, ModeNone, KindStatus, "403", 2},
		{"starting", &fakeVLLM{slash: status(503), full: status(503)}, ModeNone, KindStatus, "starting", 2},
		{"redirect", &fakeVLLM{slash: status(307), full: status(307)}, ModeNone, KindStatus, "redirects", 2},
		{"login page", &fakeVLLM{slash: answer("text/html", "<html>\n"), full: answer("text/html", "<html>\n")}, ModeNone, KindFormat, "text/html", 2},
		{"cut off", &fakeVLLM{slash: answer(text, "x"), full: answer(text, "vllm:x")}, ModeNone, KindFormat, "cut off", 2},
		{"too large", &fakeVLLM{slash: answer(text, ""), full: answer(text, strings.Repeat("# x\n", MaxPage/4+1))}, ModeNone, KindFormat, "more than", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t, tt.vllm, "", ReaderOptions{})
			if r.Mode() != ModeUnknown {
				t.Errorf("mode before: %v", r.Mode())
			}
			mode, err := r.Probe(t.Context())
			if mode != tt.mode || r.Mode() != tt.mode {
				t.Errorf("mode %v, kept %v, want %v (%v)", mode, r.Mode(), tt.mode, err)
			}
			checkError(t, err, tt.kind, tt.words)
			if got := len(tt.vllm.paths()); got != tt.asked {
				t.Errorf("asked %d times: %v", got, tt.vllm.paths())
			}
			reading, err := r.Read(t.Context())
			if mode.Readable() {
				if err != nil || len(reading.Series) != 1 || reading.Ended.Before(reading.Began) || reading.Began.IsZero() {
					t.Errorf("reading %+v, error %v", reading, err)
				}
			} else {
				checkError(t, err, KindMode, "not read")
			}
		})
	}
}

func checkError(t *testing.T, err error, kind ErrorKind, words string) *Error {
	t.Helper()
	if kind == 0 {
		if err != nil {
			t.Errorf("error %v", err)
		}
		return nil
	}
	e := (*Error)(nil)
	if !errors.As(err, &e) || e.Kind != kind || !strings.Contains(e.Error(), words) || !strings.Contains(e.Error(), e.Advice()) {
		t.Fatalf("error %v, want kind %v and %q", err, kind, words)
	}
	return e
}

func TestReadAllVersions(t *testing.T) {
	for _, v := range versions {
		for mode, vllm := range map[Mode]*fakeVLLM{
			ModeFiltered: {slash: filtering(t, v+"/metrics_full.txt")},
			ModeFull:     {full: replay(t, v+"/metrics_full.txt")},
		} {
			r := start(t, vllm, "", ReaderOptions{})
			if got, err := r.Probe(t.Context()); got != mode {
				t.Fatalf("%s: mode %v, %v, want %v", v, got, err, mode)
			}
			got, err := r.Read(t.Context())
			if err != nil {
				t.Fatal(v, err)
			}
			if d := cmp.Diff(recorded[v+"/metrics_full.txt"], got, cmpopts.IgnoreFields(Reading{}, "Began", "Ended")); d != "" {
				t.Errorf("%s %v: -want +got:\n%s", v, mode, d)
			}
		}
	}
}

// TestRequests looks at what vLLM is asked.
func TestRequests(t *testing.T) {
	for _, tt := range []struct {
		name, prefix, user, bearer string
		path, auth                 string
	}{
		{name: "plain", path: "/metrics/"},
		{name: "slash", prefix: "/", path: "/metrics/"},
		{name: "prefix", prefix: "/models/tiny", path: "/models/tiny/metrics/"},
		{name: "prefix, slash, query", prefix: "/models/tiny/?a=b#c", path: "/models/tiny/metrics/"},
		{name: "key", bearer: "k", path: "/metrics/", auth: "Bearer k"},
		{name: "user", user: "me:pw@", path: "/metrics/", auth: "Basic bWU6cHc="},
		{name: "user and key", user: "me:pw@", bearer: "k", path: "/metrics/", auth: "Bearer k"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &fakeVLLM{slash: filtering(t, "0.32.0/metrics_full.txt")}
			s := httptest.NewServer(f)
			defer s.Close()
			rt := &http.Transport{}
			defer rt.CloseIdleConnections()
			base, err := url.Parse(strings.Replace(s.URL, "http://", "http://"+tt.user, 1) + tt.prefix)
			if err != nil {
				t.Fatal(err)
			}
			r := NewReader(rt, base, ReaderOptions{Bearer: tt.bearer})
			if _, err := r.Probe(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := f.seen[0]
			if got.URL.Path != tt.path || got.Method != http.MethodGet || "http://"+got.Host != s.URL {
				t.Errorf("%s %s at %s", got.Method, got.URL.Path, got.Host)
			}
			want := http.Header{"Accept": {"text/plain;version=0.0.4"}, "Accept-Encoding": {"identity"}, "User-Agent": {"vllm-timings"}}
			if tt.auth != "" {
				want.Set("Authorization", tt.auth)
			}
			if d := cmp.Diff(want, got.Header); d != "" {
				t.Errorf("header: -want +got:\n%s", d)
			}
			q := got.URL.Query()
			if d := cmp.Diff(url.Values{"name[]": wantedNames()}, q, cmpopts.SortSlices(strings.Compare)); d != "" {
				t.Errorf("names: -want +got:\n%s", d)
			}
		})
	}
}

func TestReadAfterVLLMChanged(t *testing.T) {
	f := &fakeVLLM{slash: filtering(t, "0.32.0/metrics_full.txt"), full: replay(t, "0.32.0/metrics_full.txt")}
	r := start(t, f, "", ReaderOptions{})
	if _, err := r.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	// It restarts with two API server processes.
	f.slash, f.full = replay(t, "0.32.0/api2_metrics_filtered_slash.txt"), replay(t, "0.32.0/api2_metrics_full.txt")
	_, err := r.Read(t.Context())
	checkError(t, err, KindNoSamples, "no vllm: sample")
	if mode, err := r.Probe(t.Context()); mode != ModeFull || err != nil {
		t.Errorf("mode %v, %v", mode, err)
	}
	if _, err := r.Read(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestReadErrors(t *testing.T) {
	u, _ := url.Parse("http://me:secret@vllm:8000/x?y=z")
	errRefused := errors.New("connection refused")
	var rt roundTripper
	r := NewReader(&rt, u, ReaderOptions{})
	r.mode.Store(uint32(ModeFull))

	rt.do = func(*http.Request) (*http.Response, error) { return nil, errRefused }
	_, err := r.Read(t.Context())
	e := checkError(t, err, KindTransport, "connection refused")
	if !errors.Is(err, errRefused) || e.Timeout() || Result(err) != "error" {
		t.Errorf("%v: timeout %v, result %q", err, e.Timeout(), Result(err))
	}
	if e.URL != "http://vllm:8000/x/metrics" {
		t.Errorf("URL %q", e.URL)
	}
	if mode, err := r.Probe(t.Context()); mode != ModeNone || !errors.Is(err, errRefused) || rt.calls != 2 {
		t.Errorf("mode %v, error %v, calls %d", mode, err, rt.calls)
	}

	// The body breaks off, and the connection is given back all the same.
	r.mode.Store(uint32(ModeFull))
	body := &brokenBody{Reader: strings.NewReader("vllm:request_prefill_time_seconds_count 1\n")}
	rt.do = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: body}, nil
	}
	_, err = r.Read(t.Context())
	checkError(t, err, KindTransport, "after 42 bytes")
	if !errors.Is(err, io.ErrUnexpectedEOF) || !body.closed {
		t.Errorf("%v, closed %v", err, body.closed)
	}

	rt.do = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Header: http.Header{"Content-Encoding": {"gzip"}}, Body: http.NoBody}, nil
	}
	_, err = r.Read(t.Context())
	checkError(t, err, KindFormat, "gzip")

	// Time runs out: the Transport says so in its own words.
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	rt.do = func(*http.Request) (*http.Response, error) { return nil, errors.New("net/http: request canceled") }
	_, err = r.Read(ctx)
	e = checkError(t, err, KindTransport, "deadline")
	if !e.Timeout() || Result(err) != "timeout" || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v: timeout %v, result %q", err, e.Timeout(), Result(err))
	}
}

type roundTripper struct {
	do    func(*http.Request) (*http.Response, error)
	calls int
}

func (r *roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	r.calls++
	return r.do(req)
}

type brokenBody struct {
	io.Reader
	closed bool
}

func (b *brokenBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (b *brokenBody) Close() error { b.closed = true; return nil }

// TestReadingTimes: Began is before the request goes out, Ended after the body.
func TestReadingTimes(t *testing.T) {
	var ticks int
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	u, _ := url.Parse("http://vllm")
	rt := &roundTripper{do: func(*http.Request) (*http.Response, error) {
		ticks += 10
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(pageOf("", 1, "")))}, nil
	}}
	r := NewReader(rt, u, ReaderOptions{Now: func() time.Time { ticks++; return at(ticks) }})
	r.mode.Store(uint32(ModeFiltered))
	got, err := r.Read(t.Context())
	if err != nil || !got.Began.Equal(at(1)) || !got.Ended.Equal(at(12)) || got.Duration() != 11*time.Second {
		t.Errorf("began %v, ended %v, error %v", got.Began.Unix(), got.Ended.Unix(), err)
	}
}

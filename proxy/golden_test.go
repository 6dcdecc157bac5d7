package proxy

import (
	"bytes"
	"flag"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/timings"
)

var update = flag.Bool("update", false, "write testdata/golden anew")

// testCollectors are shared by proxies of tests that do not look at them: making them takes longer than a test.
var testCollectors = sync.OnceValue(func() *metrics.Collectors {
	return metrics.NewCollectors(prometheus.NewPedanticRegistry(), metrics.Build{})
})

// newTestProxy returns a proxy that has learned all about its upstream and has read its metrics once.
func newTestProxy(t testing.TB, cfg Config, rt http.RoundTripper) *Proxy {
	t.Helper()
	cfg.Collectors = testCollectors()
	cfg.Deadline = time.Second // nothing here is about it, and a busy machine may take longer than usual
	if rt != nil {
		cfg.Upstream = &url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.stop() // it is to learn now, and then no more
	p.wg.Wait()
	if rt != nil {
		p.transport.RegisterProtocol("http", rt)
		p.edited.Transport = p.transport // not by connections of streams' own
	}
	if !p.upstream.learn(t.Context()) {
		t.Fatal("the upstream was not learned")
	}
	if _, err := p.windows.readings.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

// clientRequest is what a client sends to get a recording.
func clientRequest(t testing.TB, r *recording, base string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), r.method, base+r.path, bytes.NewReader(r.request))
	if err != nil {
		t.Fatal(err)
	}
	if r.request != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req
}

// overNetwork returns what a client receives through a proxy of a vLLM that sends event by event.
func overNetwork(t testing.TB, p *player, cfg Config) (int, http.Header, []byte) {
	t.Helper()
	vllm := httptest.NewServer(p)
	t.Cleanup(vllm.Close)
	cfg.Upstream, _ = url.Parse(vllm.URL)
	front := httptest.NewServer(newTestProxy(t, cfg, nil))
	defer front.Close()
	resp, err := front.Client().Do(clientRequest(t, p.asked, front.URL))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, body
}

// piecewise returns what a client receives when vLLM's answer arrives in pieces and is read with a buffer of n bytes.
func piecewise(t testing.TB, p *player, cfg Config, size func() int, n int) []byte {
	t.Helper()
	proxy := newTestProxy(t, cfg, inPieces{p, size})
	proxy.edited.BufferPool, proxy.plain.BufferPool = bufferOf(n), bufferOf(n)
	w := httptest.NewRecorder()
	proxy.ServeHTTP(w, clientRequest(t, p.asked, "http://front"))
	return w.Body.Bytes()
}

// bufferOf is a BufferPool of small buffers.
type bufferOf int

func (n bufferOf) Get() []byte { return make([]byte, n) }
func (n bufferOf) Put([]byte)  {}

// sizes gives the sizes of pieces in turn, again and again.
func sizes(list ...int) func() int {
	i := 0
	return func() int {
		i++
		return list[(i-1)%len(list)]
	}
}

// steady makes an answer again where the machine stood still while it came: then the time between its events is rightly
// taken for a proof that a window of 40 ms is another request's.
func steady(r *recording, make func() []byte) []byte {
	for again := 0; ; again++ {
		began := time.Now()
		body := make()
		exact := !r.getsTimings() || ourTimings.Match(body) && !bytes.Contains(body, []byte(`"estimated"`))
		if exact || again == 20 || time.Since(began) < 200*time.Millisecond {
			return body
		}
	}
}

var boundaries = []struct {
	name   string
	pieces []int
	buffer int
}{
	{"bytes", []int{1}, bigBuffer},
	{"odd", []int{7, 1, 193, 2, 1021}, bigBuffer},
	{"whole", []int{1 << 20}, bigBuffer},
	{"buffer of 1", []int{1 << 20}, 1},
	{"buffer of 3, odd", []int{5, 2, 311}, 3},
}

// TestGolden: what the client receives for each recorded answer, byte for byte, with each source and however its bytes
// arrive.
func TestGolden(t *testing.T) {
	written := map[string]bool{}
	for _, version := range versions {
		all := loadRecordings(t, version)
		for _, name := range slices.Sorted(maps.Keys(all)) {
			rec := all[name]
			for _, source := range []timings.Source{timings.Native, timings.Window} {
				// Older ones have no metrics in their answers, and none has them in /v1/messages.
				native := version == "0.32.0" && rec.getsTimings() && endpoint(rec.path) != messages
				if source == timings.Native && !native {
					continue
				}
				cfg := Config{Sources: timings.Sources{source}}
				file := filepath.Join("testdata", "golden", version, name+"."+string(source)+".out")
				written[file] = rec.getsTimings()
				t.Run(version+"/"+name+"/"+string(source), func(t *testing.T) {
					var status int
					var header http.Header
					body := steady(rec, func() (body []byte) {
						status, header, body = overNetwork(t, newPlayer(t, version, all, rec), cfg)
						return body
					})
					checkHead(t, rec, status, header, body)
					want := rec.body
					if rec.getsTimings() {
						checkStraight(t, rec, body)
						want = golden(t, file, body)
					}
					if diff := cmp.Diff(string(want), string(body)); diff != "" {
						t.Errorf("over the network: %s", diff)
					}
					for _, b := range boundaries {
						got := steady(rec, func() []byte {
							return piecewise(t, newPlayer(t, version, all, rec), cfg, sizes(b.pieces...), b.buffer)
						})
						if diff := cmp.Diff(string(want), string(got)); diff != "" {
							t.Errorf("%s: %s", b.name, diff)
						}
					}
				})
			}
		}
	}
	files, err := filepath.Glob(filepath.Join("testdata", "golden", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !written[file] {
			t.Errorf("%s belongs to no recording", file)
		}
	}
}

// golden returns the content of a golden file, or writes it.
func golden(t *testing.T, file string, got []byte) []byte {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return readFile(t, file)
}

// checkHead: status and headers are vLLM's, only the length is that of what follows.
func checkHead(t *testing.T, rec *recording, status int, got http.Header, body []byte) {
	t.Helper()
	if status != rec.status {
		t.Errorf("status %d, want %d", status, rec.status)
	}
	want := rec.header.Clone()
	if want.Get("Content-Length") != "" {
		want.Set("Content-Length", strconv.Itoa(len(body)))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("headers: %s", diff)
	}
}

var (
	ourTimings = regexp.MustCompile(`,"timings":\{[^{}]*\}`)
	theMetrics = regexp.MustCompile(`,"metrics":\{[^{}]*\}`)
	randomIDs  = regexp.MustCompile(`(cmpl-)[-0-9a-z]+|("created":)[0-9]+`)
)

// checkStraight: but for one inserted member, and vLLM's metrics that make place for it, the client receives what it would
// have received without the proxy, though vLLM was asked for usage where the client did not ask. Two runs of vLLM differ
// in the answer's id and time.
func checkStraight(t *testing.T, rec *recording, got []byte) {
	t.Helper()
	if n := len(ourTimings.FindAll(got, -1)); n != 1 {
		t.Errorf("%d timings", n)
	}
	same := func(b []byte) string { return string(randomIDs.ReplaceAll(b, []byte("$1$2"))) }
	want := same(theMetrics.ReplaceAll(rec.body, nil))
	if diff := cmp.Diff(want, same(ourTimings.ReplaceAll(got, nil))); diff != "" {
		t.Errorf("not what straight vLLM sends: %s", diff)
	}
}

// TestGoldenPlacement: timings stand on the usage event where the client asked for usage, else on the finish event.
func TestGoldenPlacement(t *testing.T) {
	for _, version := range versions {
		all := loadRecordings(t, version)
		for name, on := range map[string]string{
			"chat_stream": `"finish_reason":"length"`, "completion_stream": `"finish_reason":"length"`,
			"chat_stream_usage": `"choices":[],`, "completion_stream_usage": `"choices":[],`,
			"chat_stream_usage_continuous": `"choices":[],`, "chat_stream_maxtokens1": `"choices":[],`,
		} {
			got := steady(all[name], func() []byte {
				cfg := Config{Sources: timings.Sources{timings.Window}}
				return piecewise(t, newPlayer(t, version, all, all[name]), cfg, sizes(1<<20), bigBuffer)
			})
			for event := range bytes.SplitSeq(got, []byte("\n\n")) {
				has, should := bytes.Contains(event, []byte(`"timings":{`)), bytes.Contains(event, []byte(on))
				if has != should {
					t.Errorf("%s of %s: timings: %v, in %s", name, version, has, event)
				}
			}
		}
	}
}

// TestKeepMetrics: with --keep-metrics nothing but timings is new.
func TestKeepMetrics(t *testing.T) {
	all := loadRecordings(t, "0.32.0")
	for _, name := range []string{"chat_nonstream", "chat_stream_usage", "completion_nonstream", "completion_stream_usage"} {
		cfg := Config{Sources: timings.Sources{timings.Native}, KeepMetrics: true}
		got := piecewise(t, newPlayer(t, "0.32.0", all, all[name]), cfg, sizes(1<<20), bigBuffer)
		if !ourTimings.Match(got) {
			t.Errorf("%s: no timings", name)
		}
		if diff := cmp.Diff(string(all[name].body), string(ourTimings.ReplaceAll(got, nil))); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestUsageAlways: with --usage always the client that did not ask receives what one that asked does.
func TestUsageAlways(t *testing.T) {
	for _, version := range versions {
		all := loadRecordings(t, version)
		for _, name := range []string{"chat_stream", "completion_stream"} {
			if version == "0.19.1" && name == "completion_stream" {
				continue // the two runs cut their tokens into events differently
			}
			cfg := Config{Sources: timings.Sources{timings.Window}, UsageAlways: true}
			got := steady(all[name], func() []byte {
				return piecewise(t, newPlayer(t, version, all, all[name]), cfg, sizes(3, 1000), bigBuffer)
			})
			checkStraight(t, all[name+"_usage"], got)
		}
	}
}

// patched puts the timings of a patched vLLM into its usage event, or its JSON answer.
func patched(r *recording, member string) *recording {
	with := *r
	i := bytes.LastIndex(r.body, []byte(`,"usage":{`))
	with.body = slices.Concat(r.body[:i], []byte(member), r.body[i:])
	if with.header = r.header.Clone(); !r.isStream() {
		with.header.Set("Content-Length", strconv.Itoa(len(with.body)))
	}
	return &with
}

// TestUpstreamTimings: a patched vLLM's own timings are never changed, only moved where they would be lost.
func TestUpstreamTimings(t *testing.T) {
	const member = `,"timings": {"prompt_n" :1e0, "x":[{}]}`
	for _, version := range versions {
		all := loadRecordings(t, version)
		for _, name := range []string{"chat_stream", "chat_stream_usage", "chat_nonstream", "completion_stream_usage"} {
			served := maps.Clone(all)
			asked := all[name]
			if name == "chat_stream" {
				served["chat_stream_usage"] = patched(all["chat_stream_usage"], member)
			} else {
				asked = patched(asked, member)
				served[name] = asked
			}
			got := piecewise(t, newPlayer(t, version, served, asked), Config{}, sizes(1, 200), bigBuffer)
			if n := strings.Count(string(got), `"timings"`); n != 1 {
				t.Errorf("%s of %s: %d timings", name, version, n)
			}
			want := asked.body
			if name == "chat_stream" {
				without := bytes.Replace(got, []byte(member), nil, 1)
				got, want = randomIDs.ReplaceAll(without, nil), randomIDs.ReplaceAll(asked.body, nil)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s of %s: %s", name, version, diff)
			}
		}
	}
}

package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// versions are the vLLMs whose answers are in testdata/wire.
var versions = []string{"0.11.2", "0.19.1", "0.32.0"}

// recording is one answer of a real vLLM, as `curl -i` printed it, and the request that it belongs to.
type recording struct {
	name         string
	method, path string
	request      []byte
	status       int
	header       http.Header
	body         []byte
}

func loadRecordings(t testing.TB, version string) map[string]*recording {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", "wire", version, "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings of %s: %v", version, err)
	}
	all := map[string]*recording{}
	for _, file := range files {
		raw := readFile(t, file)
		r := &recording{name: strings.TrimSuffix(filepath.Base(file), ".txt"), header: http.Header{}}
		head, body, ok := bytes.Cut(raw, []byte("\r\n\r\n"))
		lines := strings.Split(string(head), "\r\n")
		if _, err := fmt.Sscanf(lines[0], "HTTP/1.1 %d", &r.status); err != nil || !ok {
			t.Fatalf("%s: not an HTTP answer: %v", file, err)
		}
		for _, line := range lines[1:] {
			// The chunks are undone in the recording.
			if name, value, _ := strings.Cut(line, ": "); !strings.EqualFold(name, "transfer-encoding") {
				r.header.Add(name, value)
			}
		}
		r.body = body
		if req, err := os.ReadFile(strings.TrimSuffix(file, ".txt") + ".req.json"); err == nil {
			// vLLM never sees that member, and does nothing with it where it does: see pertoken_test.go.
			r.request = bytes.ReplaceAll(req, []byte(`, "timings_per_token": true`), nil)
		}
		r.method, r.path = target(r)
		all[r.name] = r
	}
	return all
}

func readFile(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// target tells from a recording's name what was asked.
func target(r *recording) (method, path string) {
	switch name := strings.TrimPrefix(strings.TrimPrefix(r.name, "text_"), "unknown_fields_"); {
	case name == "err_get_chat":
		return http.MethodGet, string(chat)
	case name == "chat_options":
		return http.MethodOptions, string(chat)
	case name == "err_404":
		return http.MethodPost, "/v1/nope"
	case name == "messages_count_tokens":
		return http.MethodPost, "/v1/messages/count_tokens"
	case strings.HasPrefix(name, "messages"):
		return http.MethodPost, "/v1/messages"
	case strings.HasPrefix(name, "responses"):
		return http.MethodPost, "/v1/responses"
	case name == "inference_v1_generate":
		return http.MethodPost, "/inference/v1/generate"
	case name == "embeddings":
		return http.MethodPost, "/v1/embeddings"
	case name == "tokenize":
		return http.MethodPost, "/tokenize"
	case name == "models":
		return http.MethodGet, "/v1/models"
	case r.request == nil: // health, ping, version, load
		return http.MethodGet, "/" + name
	case gjson.GetBytes(r.request, "prompt").Exists():
		return http.MethodPost, string(completions)
	}
	return http.MethodPost, string(chat)
}

func (r *recording) isStream() bool { return isStream(r.header.Get("Content-Type")) }

// getsTimings reports whether the answer is one that gets timings. The endpoints that do are here and nowhere else in
// these tests.
func (r *recording) getsTimings() bool {
	ours := r.method == http.MethodPost && slices.Contains([]endpoint{chat, completions, responses, messages}, endpoint(r.path))
	several := strings.Contains(r.name, "_n2")
	return ours && r.status == http.StatusOK && !several && !bytes.Contains(r.body, []byte(`"error":`))
}

// usage returns the token counts of the answer, zero if there are none.
func (r *recording) usage() (prompt, completion, cached int) {
	all := regexp.MustCompile(`"usage":(\{.*)`).FindAllSubmatch(r.body, -1)
	if len(all) == 0 {
		return 0, 0, 0
	}
	u := gjson.ParseBytes(all[len(all)-1][1])
	sum := func(names ...string) (n int) {
		for _, name := range names {
			n += int(u.Get(name).Int())
		}
		return n
	}
	return sum("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
		sum("completion_tokens", "output_tokens"),
		sum("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens", "cache_read_input_tokens")
}

// events cuts the body of a recorded stream, which has LF line ends.
func (r *recording) events() [][]byte {
	events := bytes.SplitAfter(r.body, []byte("\n\n"))
	if len(events[len(events)-1]) == 0 {
		events = events[:len(events)-1]
	}
	return events
}

// last returns where in the body the last token comes: vLLM has recorded the request in its metrics before.
func (r *recording) last() int {
	if !r.isStream() {
		return 0
	}
	if i := bytes.LastIndex(r.body, []byte(`"finish_reason":"`)); i >= 0 {
		return bytes.LastIndex(r.body[:i], []byte("\n\n")) + 2
	}
	return 0
}

// player is a vLLM that answers with recordings, and whose metrics move with each by 12.5 ms of prefill and 40 ms of
// decode.
type player struct {
	t       testing.TB
	version string
	all     map[string]*recording
	asked   *recording // that whose request the client sends

	mu   sync.Mutex
	sums map[string]float64
}

func newPlayer(t testing.TB, version string, all map[string]*recording, asked *recording) *player {
	return &player{t: t, version: version, all: all, asked: asked, sums: map[string]float64{}}
}

// find returns the answer to a request of the proxy, which may have edited what the client sent.
func (p *player) find(method, path string, body []byte) *recording {
	if method != http.MethodPost {
		for _, r := range p.all {
			if r.method == method && r.path == path {
				return r
			}
		}
	}
	got := meaning(body)
	if method != p.asked.method || path != p.asked.path {
		p.t.Errorf("vLLM was asked for %s %s, not %s %s", method, path, p.asked.method, p.asked.path)
	}
	if !p.asked.getsTimings() && p.asked.status != http.StatusOK || got == meaning(p.asked.request) {
		return p.asked // an error is the same however it was asked for
	}
	if bytes.HasPrefix(p.asked.body, []byte(`data: {"error"`)) {
		return p.asked
	}
	names := make([]string, 0, len(p.all))
	for name, r := range p.all {
		if r.path == path && got == meaning(r.request) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		p.t.Errorf("no recording answers %s", body)
		return p.asked
	}
	slices.Sort(names)
	r := p.all[names[0]]
	with := *r
	with.header = p.asked.header // the date
	if p.asked.isStream() && len(r.events()) != len(p.asked.events())+1 {
		// The other run had its tokens cut into events differently: take this one's, and the other's usage event.
		events, usage := p.asked.events(), r.events()
		events = slices.Insert(events, len(events)-1, usage[len(usage)-2])
		with.body = bytes.Join(events, nil)
	}
	return &with
}

// meaning gives a request body in one form for all that mean the same to vLLM.
func meaning(body []byte) string {
	var doc any
	if json.Unmarshal(body, &doc) != nil {
		return string(body)
	}
	b, err := json.Marshal(doc)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// finished moves the metrics by an answer.
func (p *player) finished(r *recording) {
	if r.method != http.MethodPost || r.status != http.StatusOK {
		return
	}
	prompt, completion, cached := r.usage()
	if completion == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, by := range map[string]float64{
		"request_prefill_time_seconds": 0.0125, "request_decode_time_seconds": 0.04, "request_queue_time_seconds": 0.001,
		"request_prompt_tokens": float64(prompt), "request_generation_tokens": float64(completion),
		"request_prefill_kv_computed_tokens": float64(prompt - cached),
	} {
		p.sums[name+"_sum"] += by
		p.sums[name+"_count"]++
	}
	p.sums["prefix_cache_queries_total"] += float64(prompt)
	p.sums["prefix_cache_hits_total"] += float64(cached)
	p.sums["generation_tokens_total"] += float64(completion)
}

// page is the answer of /metrics/ to a query with name[].
func (p *player) page(names []string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var page strings.Builder
	for _, name := range names {
		short := strings.TrimPrefix(name, "vllm:")
		switch {
		case name == "process_start_time_seconds":
			page.WriteString("process_start_time_seconds 1.79596224685e+09\n")
		case p.version == "0.11.2" && strings.Contains(name, "computed"), strings.Contains(name, "spec_decode"):
			// 0.11.2 lacks the first, and none of the recordings was made with speculative decoding.
		default:
			page.WriteString(name + `{engine="0",model_name="tiny"} ` + strconv.FormatFloat(p.sums[short], 'g', -1, 64) + "\n")
		}
	}
	return page.String()
}

// ServeHTTP answers over the network, as vLLM does: event by event.
func (p *player) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/metrics/" {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = io.WriteString(w, p.page(r.URL.Query()["name[]"]))
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		p.t.Errorf("request body: %v", err)
	}
	rec := p.find(r.Method, r.URL.Path, body)
	for name, values := range rec.header {
		w.Header()[name] = values
	}
	w.WriteHeader(rec.status)
	if !rec.isStream() {
		p.finished(rec)
		_, _ = w.Write(rec.body)
		return
	}
	flush := http.NewResponseController(w).Flush
	_ = flush() // vLLM sends the headers before it gives the request to the engine
	at, last := 0, rec.last()
	for _, event := range rec.events() {
		if at == last {
			p.finished(rec)
		}
		at += len(event)
		_, _ = w.Write(event)
		_ = flush()
	}
}

// inPieces is an http.RoundTripper that gives the player's answers in pieces as size says, without a network.
type inPieces struct {
	*player
	size func() int
}

func (p inPieces) RoundTrip(r *http.Request) (*http.Response, error) {
	resp := &http.Response{StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, ContentLength: -1, Request: r}
	var body []byte
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		_ = r.Body.Close()
		body = b
	}
	if r.URL.Path == "/metrics/" {
		resp.Header.Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		resp.Body = io.NopCloser(strings.NewReader(p.page(r.URL.Query()["name[]"])))
		return resp, nil
	}
	rec := p.find(r.Method, r.URL.Path, body)
	resp.StatusCode, resp.Header = rec.status, rec.header.Clone()
	if n, err := strconv.Atoi(rec.header.Get("Content-Length")); err == nil {
		resp.ContentLength = int64(n)
	}
	size := p.size
	if rec != p.asked && r.Method != http.MethodPost {
		size = sizes(1 << 20) // the proxy's own question, at any time
	}
	resp.Body = &pieces{left: rec.body, size: size, last: rec.last(), finished: func() { p.finished(rec) }}
	return resp, nil
}

// pieces is a body that comes in pieces.
type pieces struct {
	left     []byte
	size     func() int
	last     int // bytes that go out before finished is called
	finished func()
}

func (b *pieces) Read(p []byte) (int, error) {
	if len(b.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, b.left[:min(len(b.left), b.size())])
	if b.last -= n; b.last < 0 && b.finished != nil {
		b.finished()
		b.finished = nil
	}
	b.left = b.left[n:]
	return n, nil
}

func (b *pieces) Close() error { return nil }

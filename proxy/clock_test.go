package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/vllm-timings/vllm-timings/metrics"
)

// This file is about what takes long, by a simulated clock.

// pipes is a network in memory: a simulated clock runs on while its readers wait.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	a, b := net.Pipe()
	p.conns <- b
	return a, nil
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{} }

// simulated calls do with a client of a sidecar before vllm, all of them in a bubble of synctest.
func simulated(t *testing.T, vllm *http.Server, do func(t *testing.T, client *http.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// Nothing listens at its socket, so that what it asks by itself is answered at once.
		p, err := New(Config{
			Upstream: &url.URL{Scheme: "http", Host: "vllm"}, Socket: "/no/such/socket",
			Collectors: metrics.NewCollectors(prometheus.NewRegistry(), metrics.Build{}),
		})
		if err != nil {
			t.Fatal(err)
		}
		p.stop()
		p.wg.Wait()
		synctest.Wait()
		up, down := newPipes(), newPipes()
		p.transport.DialContext = up.dial
		sidecar := &http.Server{Handler: p, ReadHeaderTimeout: 30 * time.Second} // as the program has it
		go func() { _ = vllm.Serve(up) }()
		go func() { _ = sidecar.Serve(down) }()
		transport := &http.Transport{DialContext: down.dial}
		defer func() {
			transport.CloseIdleConnections()
			_ = sidecar.Close()
			p.Close()
			_ = vllm.Close()
		}()
		do(t, &http.Client{Transport: transport})
	})
}

// slowly is a request body that takes ten minutes to come.
type slowly struct {
	io.Reader
	begun bool
}

func (s *slowly) Read(b []byte) (int, error) {
	if !s.begun {
		s.begun = true
		time.Sleep(10 * time.Minute)
	}
	return s.Reader.Read(b)
}

// TestNoDeadline: a request that takes ten minutes to come, an answer whose headers come after ten more, and one that takes
// an hour, are waited for, at every endpoint.
func TestNoDeadline(t *testing.T) {
	const figures = `,"timings":{"prompt_n":9,"prompt_ms":1000,"prompt_per_token_ms":111.111,"prompt_per_second":9,"predicted_n":61,"predicted_ms":3600000,` +
		`"predicted_per_token_ms":59016.393,"predicted_per_second":0.017,"estimated":true}`
	const usage = `"usage":{"input_tokens":9,"output_tokens":61}`
	stream := func(event, end string) []string {
		return append(strings.SplitAfter(strings.Repeat(event, 60), "\n\n")[:60], end)
	}
	delta := "data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n"
	block := "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n"
	for name, test := range map[string]struct {
		path, request, content string
		answer                 []string // the first comes a second after the headers, each of the others after a minute
		want                   string   // "" is the answer
	}{
		"chat": {string(chat), `{"stream":true}`, "text/event-stream", stream(tokenEvent, finishEvent+observed(61)),
			strings.Repeat(tokenEvent, 60) + strings.Replace(finishEvent, "}\n\n", figures+"}\n\n", 1) + doneEvent},
		"responses": {string(responses), `{"stream":true}`, "text/event-stream", stream(delta, `data: {"type":"response.completed","response":{`+usage+"}}\n\n"),
			strings.Repeat(delta, 60) + `data: {"type":"response.completed","response":{` + usage + "}" + figures + "}\n\n"},
		"messages": {string(messages), `{"stream":true}`, "text/event-stream", stream(block, `data: {"type":"message_delta",`+usage+"}\n\n"+messageStop),
			strings.Repeat(block, 60) + `data: {"type":"message_delta",` + usage + figures + "}\n\n" + messageStop},
		"chat, whole":       {string(chat), `{}`, "application/json", inPiecesOf(`{"choices":[`+strings.Repeat(" ", 47)+`]}`, 1), ""},
		"two choices":       {string(chat), `{"stream":true,"n":2}`, "text/event-stream", stream(tokenEvent, doneEvent), ""},
		"transcription":     {"/v1/audio/transcriptions", "form", "text/event-stream", stream(tokenEvent, doneEvent), ""},
		"embeddings, whole": {"/v1/embeddings", `{}`, "application/json", inPiecesOf(`{"data":[`+strings.Repeat(" ", 50)+`]}`, 1), ""},
	} {
		t.Run(name, func(t *testing.T) {
			vllm := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != test.path {
					t.Errorf("asked for %s", r.URL.Path)
				}
				_, _ = io.Copy(io.Discard, r.Body)
				time.Sleep(10 * time.Minute)
				w.Header().Set("Content-Type", test.content)
				flush := http.NewResponseController(w).Flush
				_ = flush()
				time.Sleep(time.Second)
				for i, piece := range test.answer {
					if i > 0 {
						time.Sleep(time.Minute)
					}
					_, _ = io.WriteString(w, piece)
					_ = flush()
				}
			})}
			simulated(t, vllm, func(t *testing.T, client *http.Client) {
				start := time.Now()
				resp, err := client.Post("http://sidecar"+test.path, "application/json", &slowly{Reader: strings.NewReader(test.request)})
				if err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took != 20*time.Minute && isStream(test.content) || resp.StatusCode != http.StatusOK {
					t.Errorf("headers after %v, status %d", took, resp.StatusCode)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if took := time.Since(start); took != 80*time.Minute+time.Second || err != nil {
					t.Errorf("the end after %v, %v", took, err)
				}
				want := test.want
				if want == "" {
					want = strings.Join(test.answer, "")
				}
				if string(body) != want {
					t.Errorf("got %q, want %q", body, want)
				}
			})
		})
	}
}

// TestIdleConnectionsInTime: uvicorn closes a connection that was idle for 5 s. It is never used at that moment, whatever is
// between two requests.
func TestIdleConnectionsInTime(t *testing.T) {
	for _, path := range []string{string(chat), "/v1/embeddings", "/v1/audio/transcriptions"} {
		for _, body := range []string{`{}`, `{"stream":true}`, strings.Repeat(" ", 3*maxAtOnce)} {
			vllm := &http.Server{IdleTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				_, _ = io.WriteString(w, "ok")
			})}
			simulated(t, vllm, func(t *testing.T, client *http.Client) {
				for _, gap := range []time.Duration{0, time.Second, 2*time.Second - 1, 2 * time.Second, 2*time.Second + 1, 5*time.Second - 1, 5 * time.Second, 5*time.Second + 1, time.Hour} {
					for range 10 {
						time.Sleep(gap)
						resp, err := client.Post("http://sidecar"+path, "application/json", strings.NewReader(body))
						if err != nil {
							t.Fatalf("%s, %v apart: %v", path, gap, err)
						}
						got, err := io.ReadAll(resp.Body)
						resp.Body.Close()
						if resp.StatusCode != http.StatusOK || string(got) != "ok" || err != nil {
							t.Errorf("%s, %v apart: %d %q, %v", path, gap, resp.StatusCode, got, err)
						}
					}
				}
			})
		}
	}
}

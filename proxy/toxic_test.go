package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// toxic is a network between the sidecar and vLLM in which something is wrong.
type toxic struct {
	t *testing.T
	*toxiproxy.Proxy
}

// startToxic starts one before the upstream. Toxics are JSON, as Toxiproxy's API has them.
func startToxic(t *testing.T, upstream string, toxics ...string) *toxic {
	t.Helper()
	x := &toxic{t, toxiproxy.NewProxy(toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop()), t.Name(), "127.0.0.1:0", strings.TrimPrefix(upstream, "http://"))}
	if err := x.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.Stop)
	for _, text := range toxics {
		x.add(text)
	}
	return x
}

func (x *toxic) url() string { return "http://" + x.Listen }

func (x *toxic) add(text string) {
	x.t.Helper()
	if _, err := x.Toxics.AddToxicJson(strings.NewReader(text)); err != nil {
		x.t.Fatal(err)
	}
}

// TestToxicNetwork: however slowly and in whatever pieces vLLM's answer comes, it comes whole and with its timings, and
// requests do too.
func TestToxicNetwork(t *testing.T) {
	const question, asked = `{"messages":[],"stream":true}`, `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`
	straight, sent := timed(tokenEvent, tokenEvent)
	for name, toxics := range map[string][]string{
		"latency":        {`{"type":"latency","attributes":{"latency":60}}`},
		"jitter":         {`{"type":"latency","attributes":{"latency":20,"jitter":20}}`, `{"type":"slicer","attributes":{"average_size":20,"size_variation":10}}`},
		"latency of all": {`{"type":"latency","stream":"upstream","attributes":{"latency":30}}`, `{"type":"latency","attributes":{"latency":30}}`},
		"1 KB/s":         {`{"type":"bandwidth","attributes":{"rate":1}}`},
		"1 KB/s up":      {`{"type":"bandwidth","stream":"upstream","attributes":{"rate":1}}`},
		"byte by byte":   {`{"type":"slicer","attributes":{"average_size":1}}`, `{"type":"slicer","stream":"upstream","attributes":{"average_size":1}}`},
		"slow close":     {`{"type":"slow_close","attributes":{"delay":3600000}}`, `{"type":"slow_close","stream":"upstream","attributes":{"delay":3600000}}`},
	} {
		t.Run(name, func(t *testing.T) {
			m := startMeter(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.RawQuery == "whole" {
					whole(codedAnswer)(w, r)
					return
				}
				w.Header().Set("Content-Type", "text/event-stream")
				for event := range strings.SplitAfterSeq(sent, "\n\n") {
					_, _ = io.WriteString(w, event)
					_ = http.NewResponseController(w).Flush()
				}
			})
			x := startToxic(t, m.url, toxics...)
			r := newRig(t, x.url())
			a := r.send(http.MethodPost, string(chat), question)
			if plain := strings.Replace(a.body, backgroundFigures, "", 1); a.status != http.StatusOK || a.err != nil || plain != straight || plain == a.body {
				t.Errorf("%d %q, %v", a.status, a.body, a.err)
			}
			if got := m.last(); got != asked {
				t.Errorf("vLLM was asked %s", got)
			}
			a = r.send(http.MethodPost, string(chat)+"?whole", "{}")
			if a.status != http.StatusOK || a.err != nil {
				t.Errorf("%d %q, %v", a.status, a.body, a.err)
			}
			wantMember(t, name, a.body, codedPlain, backgroundFigures)
			r.quiet()
			r.wantMetric(0, "upstream_errors_total")
			x.Stop() // with it end the connections that do not by themselves
		})
	}
}

// TestVanishes: a vLLM of which nothing is heard any more, not even that its connection is closed, does not end its answers,
// and what they hold here is let go when their clients leave.
func TestVanishes(t *testing.T) {
	for _, stream := range []string{streamed, "{}"} {
		for _, begun := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, begun %v", stream, begun), func(t *testing.T) {
				g, left := newGate(t), newGate(t)
				up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
					if notAVLLM(w, r) {
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					w.Header().Set("Content-Type", "text/event-stream")
					if begun {
						_, _ = io.WriteString(w, tokenEvent)
						_ = http.NewResponseController(w).Flush()
					}
					g.pass(r.Context())
					_, _ = io.WriteString(w, finishEvent+doneEvent)
					_ = http.NewResponseController(w).Flush()
					left.arrived <- struct{}{}
				})
				x := startToxic(t, up.URL)
				r := newRig(t, x.url())
				r.learned()
				l := r.start(string(chat), stream)
				if begun {
					l.until(t, "data: ")
				}
				g.reached(t)
				x.add(`{"type":"timeout","attributes":{"timeout":0}}`)
				g.open()
				left.reached(t) // all was sent, and is lost
				if n := r.metric("in_flight_requests"); n != 1 {
					t.Errorf("%v requests in flight", n)
				}
				l.leave()
				for line := range l.lines {
					if strings.Contains(line, "stop") || strings.Contains(line, "DONE") {
						t.Errorf("an end that was lost has come: %s", line)
					}
				}
				if begun {
					r.wantLeft(http.StatusOK)
				} else {
					r.wantLeft(statusClientLeft)
				}
				x.Stop()
			})
		}
	}
}

// cutter answers each request with as many bytes of one of its answers as the query says, and then closes the connection
// (how=close) or resets it.
type cutter map[string]string

func (c cutter) start(t *testing.T) string {
	t.Helper()
	return "http://" + acceptConns(t, c.serve)
}

func (c cutter) serve(conn *net.TCPConn) {
	defer conn.Close()
	r, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	q := r.URL.Query()
	answer, ok := c[q.Get("answer")]
	if !ok {
		_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		return
	}
	n, _ := strconv.Atoi(q.Get("n"))
	_, _ = io.WriteString(conn, answer[:n])
	if q.Get("how") == "reset" {
		delivered(conn)
		_ = conn.SetLinger(0)
	}
}

// chunksOf is a body in chunks.
func chunksOf(pieces ...string) string {
	var b strings.Builder
	for _, p := range pieces {
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(p), p)
	}
	return b.String() + "0\r\n\r\n"
}

// bodyOf returns what of a body is in the beginning of an answer. ok is false where its head is not whole.
func bodyOf(part string) (body string, ok bool) {
	head, rest, ok := strings.Cut(part, "\r\n\r\n")
	if !ok || !strings.Contains(head, "chunked") {
		return rest, ok
	}
	for {
		size, after, ok := strings.Cut(rest, "\r\n")
		n, _ := strconv.ParseInt(size, 16, 32)
		if !ok || n == 0 {
			return body, true
		}
		if len(after) < int(n)+2 {
			return body + after[:min(len(after), int(n))], true
		}
		body, rest = body+after[:n], after[n+2:]
	}
}

// TestCutAtEveryByte: wherever vLLM's answer breaks off, the client has all of it that came, as edited, and a body that has
// no end.
func TestCutAtEveryByte(t *testing.T) {
	const token = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
	const finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	usage := `data: {"choices":[],` + codedUsage + `,` + nativeMember + "}\n\n"
	json := strings.Replace(codedAnswer, "é", "e", 1)
	const ok = "HTTP/1.1 200 OK\r\n"
	c := cutter{
		"stream":  ok + "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunksOf(token, finish, usage, doneEvent),
		"pieces":  ok + "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunksOf(token[:20], token[20:]+finish+usage[:30], usage[30:]+doneEvent),
		"length":  ok + "Content-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(json)) + "\r\n\r\n" + json,
		"chunked": ok + "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + chunksOf(json[:50], json[50:]),
		// Its request streams through and cannot be sent again, so that its connection must not be taken for the next one.
		"text": ok + "Content-Type: text/plain\r\nConnection: close\r\nContent-Length: 11\r\n\r\nhello world",
	}
	timedEnd := strings.Replace(finish, "}\n\n", backgroundFigures+"}\n\n", 1)
	r := newRig(t, c.start(t))
	r.learned()
	for name, answer := range c {
		for _, how := range []string{"close", "reset"} {
			t.Run(name+", "+how, func(t *testing.T) {
				path, question := string(chat), "{}"
				switch name {
				case "stream", "pieces":
					question = `{"messages":[],"stream":true}`
				case "text":
					path = "/v1/embeddings"
				}
				cut := func(n int) {
					got := r.send(http.MethodPost, path+"?"+url.Values{"answer": {name}, "n": {strconv.Itoa(n)}, "how": {how}}.Encode(), question)
					want, begun := bodyOf(answer[:n])
					whole := n == len(answer)
					switch {
					case !begun:
						kind := strings.Contains(got.body, "(connection closed)") || strings.Contains(got.body, "("+badAnswer+")") // a part of a line may be none
						if got.status != http.StatusBadGateway || !kind || got.err != nil {
							t.Errorf("after %d bytes: %d %s, %v", n, got.status, got.body, got.err)
						}
						return
					case strings.Contains(want, usage):
						want = strings.Replace(strings.Replace(want, usage, "", 1), finish, timedEnd, 1)
					case whole && name != "text":
						want = strings.Replace(strings.Replace(json, ","+nativeMember, "", 1), codedUsage, codedUsage+backgroundFigures, 1)
					}
					if got.status != http.StatusOK || got.body != want || whole != (got.err == nil) || !whole && !errors.Is(got.err, io.ErrUnexpectedEOF) {
						t.Errorf("after %d bytes: %d %v\n%q, want\n%q", n, got.status, got.err, got.body, want)
					}
				}
				for n := 0; n <= len(answer) && !t.Failed(); n++ {
					cut(n)
				}
			})
		}
	}
	r.quiet()
	r.wantMetric(0, "client_disconnects_total")
}

// nameServer answers for one name, as told.
type nameServer struct {
	mu   sync.Mutex
	code byte // of the answers, 0 for an address; 3 is "no such name", 2 "I failed"
}

func (s *nameServer) set(code byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.code = code
}

// answer makes the answer to a question (RFC 1035, section 4).
func (s *nameServer) answer(q []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := 12
	for end < len(q) && q[end] != 0 {
		end += int(q[end]) + 1
	}
	end += 5 // the last label, type, class
	if len(q) < end {
		return nil
	}
	a := append([]byte{q[0], q[1], 0x84 | q[2]&1, 0x80 | s.code, 0, 1, 0, 0, 0, 0, 0, 0}, q[12:end]...)
	if isA := q[end-4] == 0 && q[end-3] == 1; s.code == 0 && isA {
		a[7] = 1
		a = append(a, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 127, 0, 0, 1)
	}
	return a
}

// TestNameGone: vLLM's name is looked up for each new connection. Where it is gone for a while, requests are told so, and those
// after that are well again.
func TestNameGone(t *testing.T) {
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	names := &nameServer{}
	go func() {
		q := make([]byte, 1<<10)
		for {
			n, from, err := socket.ReadFrom(q)
			if err != nil {
				return
			}
			if a := names.answer(q[:n]); a != nil {
				_, _ = socket.WriteTo(a, from)
			}
		}
	}()
	system := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", socket.LocalAddr().String())
	}}
	t.Cleanup(func() { net.DefaultResolver = system })
	vllm := startEngine(t)
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(vllm.URL, "http://"))
	r := newRig(t, "http://vllm.example.test.:"+port)
	r.warm()
	vllm.check(t, r.chat(true, 5))
	for _, code := range []byte{3, 2} {
		names.set(code)
		r.transport.CloseIdleConnections()
		r.direct.idle.drop()
		for _, stream := range []bool{true, false} {
			if a := r.chat(stream, 5); a.status != http.StatusBadGateway || !strings.Contains(a.body, "name not found") || !strings.Contains(a.body, "vllm.example.test.") {
				t.Errorf("code %d: %d %s", code, a.status, a.body)
			}
		}
		names.set(0)
		eventually(t, "vLLM answers", func() bool { return r.send(http.MethodGet, "/health", "").status == http.StatusOK })
		r.warm()
		vllm.check(t, r.chat(true, 5))
		vllm.check(t, r.chat(false, 5))
	}
	if n := r.metric("upstream_errors_total", "kind", "name not found"); n < 4 {
		t.Errorf("%v errors are counted", n)
	}
}

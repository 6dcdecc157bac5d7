package proxy

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/timings"
)

// script is what an upstream sends: these pieces, each in a write of its own.
type script struct {
	pieces [][]byte
	closes bool // the connection behind them
}

// scripted is an upstream that sends the bytes that it is told to.
type scripted struct {
	listener net.Listener
	next     chan script
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]bool
	closed   bool
}

func startScripted(t testing.TB) *scripted {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{listener: l, next: make(chan script, 1), conns: map[net.Conn]bool{}}
	s.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil || !s.keep(conn) {
				return
			}
			s.wg.Go(func() { s.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		s.mu.Lock()
		s.closed = true
		for conn := range s.conns {
			_ = conn.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s
}

// keep has the connection closed at the end of the test.
func (s *scripted) keep(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = conn.Close()
		return false
	}
	s.conns[conn] = true
	return true
}

func (s *scripted) serve(conn net.Conn) {
	defer func() {
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
		_ = conn.Close()
	}()
	in := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if req.Header.Get("User-Agent") == "vllm-timings" {
			_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		sends := <-s.next
		for _, p := range sends.pieces {
			if _, err := conn.Write(p); err != nil {
				return
			}
		}
		if sends.closes {
			return
		}
	}
}

// How the end of an answer is told.
const (
	byLength = iota
	byChunks
	byClosing
	lengthBroken // the connection ends before the answer does
	chunksBroken
	framings
)

// newScript makes an answer of a body, which is sent, and if need be chunked, in pieces of sizes.
func newScript(status int, contentType string, body, sizes []byte, framing int) script {
	head := fmt.Sprintf("HTTP/1.1 %d Some\r\nContent-Type: %s\r\n", status, contentType)
	switch framing {
	case byLength:
		head += fmt.Sprintf("Content-Length: %d\r\n", len(body))
	case lengthBroken:
		head += fmt.Sprintf("Content-Length: %d\r\n", len(body)+1)
	case byChunks, chunksBroken:
		head += "Transfer-Encoding: chunked\r\n"
	case byClosing:
		head += "Connection: close\r\n"
	}
	s := script{[][]byte{[]byte(head + "\r\n")}, framing >= byClosing}
	for at := 0; len(body) > 0; at++ {
		n := len(body)
		if len(sizes) > 0 {
			n = min(n, 1+int(sizes[at%len(sizes)]))
		}
		piece := body[:n]
		if framing == byChunks || framing == chunksBroken {
			piece = fmt.Appendf(nil, "%x\r\n%s\r\n", n, piece)
		}
		s.pieces = append(s.pieces, piece)
		body = body[n:]
	}
	if framing == byChunks {
		s.pieces = append(s.pieces, []byte("0\r\n\r\n"))
	}
	return s
}

// untouched are requests to whose answers nothing may be added, nor anything taken away, if there is no source.
var untouched = []struct{ method, path, body string }{
	{http.MethodGet, "/v1/models", ""},
	{http.MethodPost, string(chat), `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`},
	{http.MethodPost, string(chat), `{"messages":[]}`},
	{http.MethodPost, string(chat), `{"messages":[],"stream":true,"n":2}`},
	{http.MethodPost, string(chat), `{"messages":[],"stream":`},
	{http.MethodPost, string(completions), `{"prompt":"a","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
	{http.MethodPost, string(responses), `{"input":"a","stream":true}`},
	{http.MethodGet, string(responses) + "/resp_1", ""},
	{http.MethodPost, string(messages), `{"messages":[],"stream":true}`},
	{http.MethodPost, string(invocations), `{"messages":[]}`},
	{http.MethodPost, "/tokenize", `{"prompt":"a"}`},
}

var contentTypes = []string{"text/event-stream; charset=utf-8", "application/json", "text/plain"}

// FuzzExchange: a whole exchange, through sockets. Where nothing may be edited, the client has every byte that the upstream
// sent, however they were cut, and an answer that broke off is a broken one. What is edited is the straight answer with one
// member more.
func FuzzExchange(f *testing.F) {
	whole := `{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":4,"completion_tokens":2},"metrics":{"time_to_first_token_ms":1,"generation_time_ms":2}}`
	for i, body := range []string{
		"", "a", whole, whole[:len(whole)/2], "data: [DONE]\n\n", "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\r\n\r\ndata:",
		"event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":1,\"output_tokens\":1}}\n\n",
		"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}\n\n",
		"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":1,\"output_tokens\":1}}}\n\n",
	} {
		for framing := range byte(framings) {
			f.Add([]byte(body), []byte{byte(7 * i), 1}, byte(i)+framing, byte(0), framing, i%2 == 0)
			f.Add([]byte(body), []byte{}, byte(i)+2*framing, byte(i)%3, framing, i%2 == 1)
		}
	}
	up := startScripted(f)
	quiet := func(c *Config) { c.Log = slog.New(slog.DiscardHandler) }
	without := newRig(f, "http://"+up.listener.Addr().String(), quiet, func(c *Config) { c.Sources = timings.Sources{} })
	with := newRig(f, "http://"+up.listener.Addr().String(), quiet, func(c *Config) { c.Sources = timings.Sources{timings.Native} })
	for _, r := range []*rig{without, with} {
		r.http.Timeout = 15 * time.Second
	}
	// exchange returns what a client gets of what the upstream sends.
	exchange := func(t *testing.T, r *rig, method, path, request string, s script) (*http.Response, string, error) {
		up.next <- s
		req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, strings.NewReader(request))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		return resp, string(got), err
	}
	f.Fuzz(func(t *testing.T, body, sizes []byte, which, contentType, framing byte, edited bool) {
		kind := int(framing) % framings
		if edited {
			if kind >= lengthBroken {
				kind = byChunks
			}
			fuzzEdited(t, body, which, func(stream bool, request, answer string) (string, error) {
				content := contentTypes[0]
				if !stream {
					content = contentTypes[1]
				}
				_, got, err := exchange(t, with, http.MethodPost, string(chat), request, newScript(http.StatusOK, content, []byte(answer), sizes, kind))
				return got, err
			})
			return
		}
		request := untouched[int(which)%len(untouched)]
		status := http.StatusOK
		if contentType >= 200 {
			status = http.StatusServiceUnavailable
		}
		content := contentTypes[int(contentType)%len(contentTypes)]
		resp, got, err := exchange(t, without, request.method, request.path, request.body, newScript(status, content, body, sizes, kind))
		var want error
		if kind >= lengthBroken {
			want = io.ErrUnexpectedEOF
		}
		if got != string(body) || !errors.Is(err, want) {
			t.Fatalf("%s %s: %q became %q, %v, want %v", request.method, request.path, body, got, err, want)
		}
		if resp.StatusCode != status || resp.Header.Get("Content-Type") != content {
			t.Fatalf("%d %v", resp.StatusCode, resp.Header)
		}
	})
}

// fuzzEdited sends valid answers whose texts are those given, streamed and whole, with usage asked for and not.
func fuzzEdited(t *testing.T, text []byte, which byte, exchange func(stream bool, request, answer string) (string, error)) {
	const (
		member  = `,"timings":{"cache_n":3,"prompt_n":6,"prompt_ms":5,`
		metrics = `,"metrics":{"time_to_first_token_ms":5,"generation_time_ms":7}`
	)
	eol := []string{"\n", "\r\n", "\r"}[int(which)%3]
	straight, asked := chunks(eol, strings.SplitAfter(string(text), " ")...)
	request, answer, stream := `{"messages":[],"stream":true}`, asked, true
	switch which / 3 % 3 {
	case 1:
		request = `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`
		straight = strings.Replace(asked, metrics, "", 1)
	case 2:
		request, stream = `{"messages":[]}`, false
		quoted, _ := json.Marshal(string(text)) // a string cannot fail
		straight = `{"choices":[{"message":{"content":` + string(quoted) + `}}],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}`
		answer, straight = straight+metrics+"}", straight+"}"
	}
	got, err := exchange(stream, request, answer)
	if err != nil {
		t.Fatal(err)
	}
	before, after, ok := strings.Cut(got, member)
	_, after, _ = strings.Cut(after, "}")
	if !ok || before+after != straight {
		t.Fatalf("got %q, want one member more in %q", got, straight)
	}
}

package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/timings"
)

// endless is an answer that has begun and never ends. Its reads give the pieces in turn.
type endless struct {
	head   []byte
	pieces [][]byte
	at     int
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.head) > 0 {
		n := copy(p, e.head)
		e.head = e.head[n:]
		return n, nil
	}
	n := copy(p, e.pieces[e.at])
	e.at = (e.at + 1) % len(e.pieces)
	return n, nil
}

func (e *endless) Close() error { return nil }

// tokenEvents are those of one token that vLLM sends.
var tokenEvents = map[string]string{
	"chat":       `data: {"id":"chatcmpl-8c1ad26a75eb22fc","object":"chat.completion.chunk","created":1795962720,"model":"tiny","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n",
	"completion": `data: {"id":"cmpl-85fac410988350d5","object":"text_completion","created":1795962431,"model":"tiny","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}],"usage":null}` + "\n\n",
}

// cuts are the ways in which events arrive.
var cuts = map[string]func(event []byte) [][]byte{
	"one a read":   func(b []byte) [][]byte { return [][]byte{b} },
	"four a read":  func(b []byte) [][]byte { return [][]byte{bytes.Repeat(b, 4)} },
	"in two reads": func(b []byte) [][]byte { return [][]byte{b[:99], b[99:]} },
	"across reads": func(b []byte) [][]byte {
		all := bytes.Repeat(b, 7)
		return [][]byte{all[:150], all[150:700], all[700:701], all[701:]}
	},
	"a byte a read": func(b []byte) [][]byte { return bytes.SplitAfter(b, nil) },
}

// running returns a stream whose first tokens are through.
func running(tb testing.TB, event string, cut func([]byte) [][]byte, show bool) (s *stream, buf []byte) {
	tb.Helper()
	answer := &endless{head: []byte(strings.Repeat(event, 3)), pieces: cut([]byte(event))}
	s = newStream(testExchange(plan{endpoint: chat, showUsage: show}, timings.AllSources...), answer, 0)
	buf = make([]byte, bigBuffer)
	for range 100 { // its buffers have their size
		if _, err := s.Read(buf); err != nil {
			tb.Fatal(err)
		}
	}
	return s, buf
}

// TestPassingOnAllocatesNothing: an event that is only passed on costs no allocation, however it arrives.
func TestPassingOnAllocatesNothing(t *testing.T) {
	for kind, event := range tokenEvents {
		for name, cut := range cuts {
			for _, show := range []bool{false, true} {
				s, buf := running(t, event, cut, show)
				n := testing.AllocsPerRun(1000, func() {
					if _, err := s.Read(buf); err != nil {
						t.Fatal(err)
					}
				})
				if n != 0 {
					t.Errorf("%s, %s, usage shown %v: %v allocations a read", kind, name, show, n)
				}
			}
		}
	}
}

// TestWholeWayAllocatesNothing: nor does the way from vLLM's connection to the client's, chunks and system calls included.
func TestWholeWayAllocatesNothing(t *testing.T) {
	for kind, event := range tokenEvents {
		for _, show := range []bool{false, true} {
			vllm, near := tcpPair(t)
			server, client := tcpPair(t)
			answer := &directAnswer{conn: newConn(near), ctx: t.Context(), chunked: &chunked{}}
			body := newStream(testExchange(plan{endpoint: chat, showUsage: show}, timings.AllSources...), answer, 0)
			to := &detached{conn: server, ctx: t.Context(), header: http.Header{}}
			chunk := fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event)
			got := make([]byte, bigBuffer)
			pass := func() {
				if _, err := vllm.Write(chunk); err != nil {
					t.Fatal(err)
				}
				body.wait()
				if err := passOnce(to, body); err != nil {
					t.Fatal(err)
				}
				if n, err := client.Read(got); err != nil || !bytes.HasSuffix(got[:n], chunk) {
					t.Fatalf("%q came, %v", got[:n], err)
				}
			}
			for range 100 { // buffers have their size, and the head is sent
				pass()
			}
			if n := testing.AllocsPerRun(1000, pass); n != 0 {
				t.Errorf("%s, usage shown %v: %v allocations an event", kind, show, n)
			}
		}
	}
}

func BenchmarkStream(b *testing.B) {
	for name, cut := range cuts {
		b.Run(name, func(b *testing.B) {
			s, buf := running(b, tokenEvents["chat"], cut, false)
			b.ReportAllocs()
			read := 0
			for b.Loop() {
				n, err := s.Read(buf)
				if err != nil {
					b.Fatal(err)
				}
				read += n
			}
			b.SetBytes(int64(read / b.N))
		})
	}
}

// BenchmarkWholeStream is an answer of 100 tokens from its first byte to its last, timings included.
func BenchmarkWholeStream(b *testing.B) {
	_, asked := chunks("\n", make([]string, 100)...)
	buf := make([]byte, bigBuffer)
	b.ReportAllocs()
	for b.Loop() {
		s := newStream(testExchange(plan{endpoint: chat}, timings.Native), io.NopCloser(strings.NewReader(asked)), 0)
		for {
			if _, err := s.Read(buf); err != nil {
				break
			}
		}
	}
}

// TestLargestPieceIsOneWrite: the most that one read gives goes to the client in one write, as its coding fits around it.
func TestLargestPieceIsOneWrite(t *testing.T) {
	to, body := &counted{}, &endless{pieces: [][]byte{make([]byte, bigBuffer)}}
	d := &detached{conn: to, ctx: t.Context(), header: http.Header{}}
	d.Flush() // the head
	pass := func() {
		if err := passOnce(d, body); err != nil {
			t.Fatal(err)
		}
	}
	to.writes = 0
	if n := testing.AllocsPerRun(100, pass); n != 0 || to.writes != 101 { // AllocsPerRun begins with one that does not count
		t.Errorf("%v allocations a piece, %d writes of 101 pieces", n, to.writes)
	}
	if want := fmt.Sprintf("%x\r\n", bigBuffer-maxChunkFrame); !bytes.HasPrefix(to.last, []byte(want)) || len(to.last) > bigBuffer {
		t.Errorf("%d bytes that begin with %q, want %q", len(to.last), to.last[:len(want)], want)
	}
}

// counted is a connection that takes everything.
type counted struct {
	net.Conn
	writes int
	last   []byte
}

func (c *counted) Write(p []byte) (int, error) {
	c.writes++
	c.last = append(c.last[:0], p...)
	return len(p), nil
}

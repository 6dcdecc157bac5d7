//go:build unix

package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// lateConn writes what is behind the head of a request only when the other end has closed the connection.
type lateConn struct {
	*net.TCPConn
	writes int
	closed <-chan struct{}
}

func (c *lateConn) Write(p []byte) (int, error) {
	if c.writes++; c.writes <= 1 {
		return c.TCPConn.Write(p)
	}
	<-c.closed
	for { // the first write after that succeeds, and is answered with a reset
		if _, err := c.TCPConn.Write(p); err != nil {
			return 0, err
		}
	}
}

// An answer that comes before the request is written, on a connection that is closed behind it, is the client's, and the
// request is not sent again.
func TestEarlyAnswerToShortRequest(t *testing.T) {
	const refused = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"
	for _, reused := range []bool{false, true} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("reused=%v/stream=%v", reused, stream), func(t *testing.T) {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				var posts atomic.Int64
				closed := make(chan struct{})
				go func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						go func() {
							defer c.Close()
							from := bufio.NewReader(c)
							for {
								r, err := http.ReadRequest(from)
								switch {
								case err != nil:
									return
								case r.Method == http.MethodGet:
									_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
									continue
								case r.Header.Get("X-First") != "":
									_, _ = io.Copy(io.Discard, r.Body)
									_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
									continue
								}
								_, _ = io.WriteString(c, refused)
								c.Close()
								if posts.Add(1) == 1 {
									close(closed)
								}
								return
							}
						}()
					}
				}()
				r := newRig(t, "http://"+l.Addr().String())
				r.learned()
				late := make(chan *lateConn, 9)
				r.direct.transport = &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
					c, err := (&net.Dialer{}).DialContext(ctx, network, address)
					if err != nil {
						return nil, err
					}
					x := &lateConn{TCPConn: c.(*net.TCPConn), closed: closed}
					if reused {
						x.writes = -2 // those of the first
					}
					late <- x
					return x, nil
				}}
				if reused {
					if a := r.send(http.MethodPost, string(chat), `{"messages":[]}`, "X-First", "1"); a.status != http.StatusOK {
						t.Fatal(a.status)
					}
					r.quiet()
					(<-late).writes = 0
				}
				a := r.send(http.MethodPost, string(chat), fmt.Sprintf(`{"stream":%v,"messages":[%s]}`, stream, strings.Repeat(" ", maxAtOnce/2)))
				if a.status != http.StatusServiceUnavailable || a.body != "busy" || posts.Load() != 1 {
					t.Errorf("sent %d times: %d %s %v", posts.Load(), a.status, a.body, a.err)
				}
			})
		}
	}
}

// A body may be closed more than once, as net/http's may. Its connection is then there for one request, not for two.
func TestAnswerClosedTwice(t *testing.T) {
	near, _ := tcpPair(t)
	var idle idleConns
	defer idle.close()
	a := &directAnswer{conn: newConn(near), idle: &idle, ctx: t.Context(), release: func() bool { return true }, resp: &http.Response{}}
	a.ended(io.EOF)
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	if one := idle.get(); one == nil || idle.get() != nil {
		t.Error("not one connection")
	}
}

type tripper func(*http.Request) (*http.Response, error)

func (t tripper) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// relayed gives an answer of a Transport's, as for an upstream with TLS, to a client.
func relayed(t *testing.T, next tripper) (d *detached, got string) {
	t.Helper()
	r := newRig(t, "http://127.0.0.1:1")
	r.direct.next = next
	near, far := net.Pipe()
	all := make(chan string)
	go func() {
		b, _ := io.ReadAll(far)
		all <- string(b)
	}()
	ex := r.begin(chat, mustRequest(t))
	d = &detached{conn: near, ctx: t.Context(), gone: func() {}, header: http.Header{}}
	req := mustRequest(t)
	r.relay(d, req.WithContext(context.WithValue(req.Context(), exchangeKey{}, ex)))
	d.end()
	near.Close()
	r.report(ex)
	return d, <-all
}

func mustRequest(t *testing.T) *http.Request {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://x"+string(chat), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A Transport reads in a goroutine of its own, and may find an interim answer when RoundTrip is over.
func TestInterimAfterAnswer(t *testing.T) {
	d, got := relayed(t, func(r *http.Request) (*http.Response, error) {
		trace := httptrace.ContextClientTrace(r.Context())
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"X-Is": {"1"}}, ContentLength: -1, Request: r, Body: io.NopCloser(readerFunc(func([]byte) (int, error) {
			_ = trace.Got1xxResponse(http.StatusEarlyHints, textproto.MIMEHeader{"X-Late": {"1"}})
			return 0, io.EOF
		}))}, nil
	})
	if d.header.Get("X-Is") == "" || !strings.Contains(got, "X-Is: 1\r\n") || strings.Contains(got, "103") {
		t.Errorf("header %v, %q", d.header, got)
	}
}

// An upgrade that nobody asked for is no answer.
func TestSwitchUnasked(t *testing.T) {
	_, got := relayed(t, func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusSwitchingProtocols, Header: http.Header{}, Request: r, Body: http.NoBody}, nil
	})
	if !strings.HasPrefix(got, "HTTP/1.1 502 ") {
		t.Errorf("%q", got)
	}
}

// A header that means nothing in an answer does not come back behind those that are taken away.
func TestTeInAnswer(t *testing.T) {
	_, got := relayed(t, func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Te": {"trailers"}}, Request: r, Body: http.NoBody}, nil
	})
	if strings.Contains(got, "Te:") {
		t.Errorf("%q", got)
	}
}

// A request without a body is sent again as it was.
func TestEmptyRequestAgain(t *testing.T) {
	var got []string
	ex := &exchange{body: newReplayable(nil)}
	d := &direct{}
	defer d.idle.close()
	near, far := tcpPair(t)
	d.idle.put(newConn(near))
	go func() { // the one that is stale
		_, _ = http.ReadRequest(bufio.NewReader(far))
		far.Close()
	}()
	second, end := tcpPair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if r, err := http.ReadRequest(bufio.NewReader(end)); err == nil {
			got = append(r.TransferEncoding, r.Header.Get("Content-Length"))
			_, _ = io.WriteString(end, "HTTP/1.1 204 No Content\r\n\r\n")
		}
	}()
	d.transport = &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return second, nil }}
	r := mustRequest(t)
	resp, err := d.RoundTrip(r.WithContext(context.WithValue(r.Context(), exchangeKey{}, ex)))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	<-done
	if len(got) != 1 || got[0] != "0" {
		t.Errorf("%q", got)
	}
}

// What has a status below 100 is no answer, and no interim one.
func TestStatusBelow100(t *testing.T) {
	for _, stream := range []bool{false, true} {
		up := startRepeater(t, "HTTP/1.1 099 x\r\nConnection: close\r\n\r\n", false)
		r := newRig(t, up.url)
		r.learned()
		if a := r.send(http.MethodPost, string(chat), fmt.Sprintf(`{"stream":%v,"messages":[]}`, stream)); a.status != http.StatusBadGateway {
			t.Errorf("stream %v: %d %q %v", stream, a.status, a.body, a.err)
		}
	}
}

// A client that sends no more counts as one that left. If it still reads, it does not get an empty answer with status 200.
func TestHalfClosedClient(t *testing.T) {
	for _, stream := range []bool{false, true} {
		g := newGate(t)
		up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
			if notAVLLM(w, r) {
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			g.pass(r.Context())
		})
		r := newRig(t, up.URL)
		r.learned()
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		body := fmt.Sprintf(`{"stream":%v,"messages":[]}`, stream)
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chat, len(body), body)
		g.reached(t)
		_ = conn.(*net.TCPConn).CloseWrite()
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		if all, err := io.ReadAll(conn); err != nil || strings.HasPrefix(string(all), "HTTP/1.1 200") {
			t.Errorf("stream %v: %q, %v", stream, all, err)
		}
	}
}

// A chunk's lines end in CRLF, as net/http has it.
func TestChunkLineFeeds(t *testing.T) {
	for _, raw := range []string{"1\na\r\n0\r\n\r\n", "1;x\na\r\n0\r\n\r\n", "1\r\na\n0\r\n\r\n", "1\r\na\r\n0\n\r\n"} {
		resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+raw)), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, want := io.ReadAll(resp.Body)
		if _, _, _, err := dechunk(raw, len(raw), 9); (err == io.EOF) != (want == nil) {
			t.Errorf("%q: %v, net/http %v", raw, err, want)
		}
	}
}

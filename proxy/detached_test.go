package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// raw sends a request over a connection of its own and returns all bytes that come until it is closed.
func raw(t *testing.T, url, version, headers, body string) string {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST %s HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", chat, version, headers, len(body), body)
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	all, err := io.ReadAll(conn)
	if err != nil {
		t.Fatalf("after %q: %v", all, err)
	}
	return string(all)
}

const streamed = `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`

// startOneEvent starts an upstream whose answers are streams of one event.
func startOneEvent(t *testing.T) *httptest.Server {
	return startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: a\n\n")
	})
}

// sendStreamed sends a streamed chat request over a connection of its own, with more behind it.
func sendStreamed(t *testing.T, url, headers, more string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.(*net.TCPConn).SetReadBuffer(64 << 10) // so that not all of a long answer is there at once
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s%s", chat, headers, len(streamed), streamed, more)
	return conn
}

// What a client gets of a streamed answer that has left net/http's server, byte for byte.
func TestDetachedBytes(t *testing.T) {
	const date = "Sun, 29 Nov 2026 14:31:59 GMT"
	for name, tt := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"chunks, as they come": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header()["X-Twice"] = []string{"a", "b"}
			_, _ = io.WriteString(w, "data: a\n\n")
		}, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nDate: " + date + "\r\nX-Twice: a\r\nX-Twice: b\r\n" +
			"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n9\r\ndata: a\n\n\r\n0\r\n\r\n"},
		"an error with its length": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "2")
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, "{}")
		}, "HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nContent-Type: application/json\r\nDate: " + date + "\r\nConnection: close\r\n\r\n{}"},
		"nothing": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
		}, "HTTP/1.1 204 No Content\r\nDate: " + date + "\r\nConnection: close\r\n\r\n"},
		"trailers": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Trailer", "X-Sum")
			_, _ = io.WriteString(w, "a")
			w.Header().Set("X-Sum", "1")
			w.Header().Set(http.TrailerPrefix+"X-Late", "2")
		}, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nDate: " + date + "\r\nTrailer: X-Sum\r\n" +
			"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n1\r\na\r\n0\r\nX-Late: 2\r\nX-Sum: 1\r\n\r\n"},
		"an interim answer": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "</a>")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			w.Header().Set("Content-Length", "1")
			_, _ = io.WriteString(w, "a")
		}, "HTTP/1.1 103 Early Hints\r\nDate: " + date + "\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Type: text/plain; charset=utf-8\r\nDate: " + date + "\r\nConnection: close\r\n\r\na"},
	} {
		t.Run(name, func(t *testing.T) {
			up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if notAVLLM(w, r) {
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Date", date)
				tt.answer(w, r)
			})
			r := newRig(t, up.URL)
			r.learned()
			if diff := cmp.Diff(tt.want, raw(t, r.url, "1.1", "", streamed)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A client that does not know chunks gets none, and what is not streamed stays with the server and its connection.
func TestNotDetached(t *testing.T) {
	r := newRig(t, startOneEvent(t).URL)
	r.learned()
	if got := raw(t, r.url, "1.0", "", streamed); !strings.HasPrefix(got, "HTTP/1.0 200 OK\r\n") || !strings.HasSuffix(got, "\r\n\r\ndata: a\n\n") {
		t.Errorf("%q", got)
	}
	resp, err := r.http.Post(r.url+string(chat), "application/json", strings.NewReader(`{"messages":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.Close {
		t.Error("the connection of an answer that comes whole is closed")
	}
}

// An answer that breaks off has no end, and one whose next request is there already is not cut.
func TestDetachedEnds(t *testing.T) {
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: a\n\n")
		if r.Header.Get("X-Break") != "" {
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
	})
	r := newRig(t, up.URL)
	r.learned()
	if got := raw(t, r.url, "1.1", "X-Break: 1\r\n", streamed); !strings.HasSuffix(got, "9\r\ndata: a\n\n\r\n") {
		t.Errorf("broken off: %q", got)
	}
	conn := sendStreamed(t, r.url, "", "POST "+string(chat)+" HTTP/1.1\r\nHost: x\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "data: a\n\n" || !resp.Close {
		t.Errorf("with another request behind it: %q, %v, close %v", body, err, resp.Close)
	}
}

// A client has its answer with the last byte of it. One that left before did not get that, whatever its socket still took.
func TestDetachedGiven(t *testing.T) {
	for name, test := range map[string]struct {
		status int
		length string
		given  []bool // after each of: the head, half of the body, the other half, the end
	}{
		"chunked":      {http.StatusOK, "", []bool{false, false, false, true}},
		"its length":   {http.StatusOK, "4", []bool{false, false, true, true}},
		"empty":        {http.StatusOK, "0", []bool{true}},
		"no content":   {http.StatusNoContent, "", []bool{true}},
		"not modified": {http.StatusNotModified, "4", []bool{true}},
	} {
		for leaves := range len(test.given) + 1 { // before that step
			conn, client := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, client) }()
			ctx, leave := context.WithCancel(t.Context())
			d := &detached{conn: conn, ctx: ctx, gone: leave, header: http.Header{}}
			if test.length != "" {
				d.header.Set("Content-Length", test.length)
			}
			d.WriteHeader(test.status)
			for i, do := range []func(){d.Flush, func() { _, _ = d.Write([]byte("ab")) }, func() { _, _ = d.Write([]byte("cd")) }, d.end}[:len(test.given)] {
				if i == leaves {
					leave()
				}
				do()
				left := i >= leaves && (leaves == 0 || !test.given[leaves-1])
				if got, want := d.given(), test.given[i] && !left; got != want {
					t.Errorf("%s, the client leaves at %d, after step %d: given %v", name, leaves, i, got)
				}
			}
			leave()
			conn.Close()
		}
	}
}

// Streams are counted until they end, and Cut ends them.
func TestWaitAndCut(t *testing.T) {
	g := newGate(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: a\n\n")
		_ = http.NewResponseController(w).Flush()
		g.pass(r.Context())
	})
	r := newRig(t, up.URL)
	r.learned()
	if err := r.Wait(t.Context()); err != nil || r.Open() != 0 {
		t.Errorf("%d open, %v", r.Open(), err)
	}
	l := r.start(string(chat), streamed)
	l.until(t, "data: a")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := r.Wait(ctx); err != context.DeadlineExceeded || r.Open() != 1 {
		t.Errorf("%d open, %v", r.Open(), err)
	}
	r.Drain()
	r.Cut()
	if err := r.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	r.wantMetric(0, "client_disconnects_total")
}

// A stream without pauses comes in big pieces, whole and in order, and nothing of it waits while vLLM pauses.
func TestBurstIsWholeAndAtOnce(t *testing.T) {
	g := newGate(t)
	var first, second strings.Builder
	for i := range 20_000 {
		b := &first
		if i >= 10_000 {
			b = &second
		}
		fmt.Fprintf(b, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%d\"},\"finish_reason\":null}]}\n\n", i)
	}
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for event := range strings.SplitAfterSeq(first.String(), "\n\n") {
			_, _ = io.WriteString(w, event)
		}
		_ = http.NewResponseController(w).Flush()
		g.pass(r.Context())
		_, _ = io.WriteString(w, second.String())
	})
	r := newRig(t, up.URL)
	r.learned()
	resp, err := r.http.Post(r.url+string(chat), "application/json", strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got := make([]byte, first.Len())
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != first.String() {
		t.Fatalf("the first half, before vLLM goes on: %v", err)
	}
	g.open()
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != second.String() {
		t.Errorf("the second half: %d bytes, want %d, %v", len(rest), second.Len(), err)
	}
}

// A client that has sent something behind its request, and leaves, has left.
func TestDetachedLeavesWithMoreSent(t *testing.T) {
	asked, left := make(chan struct{}), make(chan struct{}, 3)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		asked <- struct{}{}
		<-r.Context().Done()
		left <- struct{}{}
	})
	r := newRig(t, up.URL)
	r.learned()
	for _, more := range []string{"", "\n", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"} {
		conn := sendStreamed(t, r.url, "", more)
		<-asked
		conn.Close()
		select {
		case <-left:
		case <-time.After(20 * time.Second):
			t.Fatalf("vLLM is not told that a client left that had sent %q", more)
		}
	}
}

// What a client sends while its answer comes, or when it has ended, does not cost it the rest of that: what comes to a
// connection that is closed, or was not read before, resets that, and what is still on its way is lost.
func TestDetachedWithNextRequest(t *testing.T) {
	answer := strings.Repeat("data: "+strings.Repeat("a", 1000)+"\n\n", 3000)
	short := answer[:len(answer)/10] // the sockets' buffers take it
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		if r.Header.Get("X-Short") != "" {
			_, _ = io.WriteString(w, short)
			return
		}
		_, _ = io.WriteString(w, answer)
	})
	r := newRig(t, up.URL)
	r.linger = time.Minute
	r.learned()
	next := "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, test := range map[string]struct{ head, with, behind, after string }{
		"with it":        {"", strings.Repeat(next, 200), "", ""},
		"while it comes": {"", "", next, ""},
		"when it ended":  {"X-Short: 1\r\n", "", "", next},
	} {
		t.Run(name, func(t *testing.T) {
			want := answer
			if test.head != "" {
				want = short
			}
			before := len(r.log.requests(t, slog.LevelInfo))
			conn := sendStreamed(t, r.url, test.head, test.with)
			defer conn.Close()
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.WriteString(conn, test.behind)
			if test.after != "" {
				eventually(t, "the answer has ended", func() bool { return len(r.log.requests(t, slog.LevelInfo)) > before && r.Open() == 0 })
				_, _ = io.WriteString(conn, test.after)
			}
			if body, err := io.ReadAll(resp.Body); err != nil || string(body) != want {
				t.Errorf("%d of %d bytes, %v", len(body), len(want), err)
			}
		})
	}
}

// A client that does not close its connection when the answer has ended is waited for, but not by Cut.
func TestCutEndsLinger(t *testing.T) {
	r := newRig(t, startOneEvent(t).URL)
	r.linger = time.Minute
	r.learned()
	conn := sendStreamed(t, r.url, "", "")
	if all, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(all), "0\r\n\r\n") {
		t.Fatalf("%q, %v", all, err)
	}
	eventually(t, "nothing is counted as not answered", func() bool { return r.Open() == 0 })
	if n := r.detached.count(); n != 1 {
		t.Errorf("%d connections, want the one that the client has open", n)
	}
	r.Cut()
	if err := r.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// descriptors returns how many files and sockets this process has open; 0 where that cannot be known.
func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Log("descriptors are not counted here: ", err)
	}
	return len(entries)
}

// TestIdleConnections: 5,000 connections on which nothing happens, some of them after a request, most before any, are in
// nobody's way, and nothing is left of them when they are closed.
func TestIdleConnections(t *testing.T) {
	const n = 5000
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	r.quietReadings()
	r.http.CloseIdleConnections()
	r.transport.CloseIdleConnections()
	goroutines, files := runtime.NumGoroutine(), descriptors(t)
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	var dialer net.Dialer
	for len(conns) < n {
		conn, err := dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			needs.Unable(t, "needs ", 2*n, " descriptors (ulimit -n): ", err)
		}
		conns = append(conns, conn)
		if len(conns)%10 != 0 {
			continue
		}
		_, _ = io.WriteString(conn, "GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 512), nil); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("connection %d: %v, %v", len(conns), resp, err)
		}
	}
	for i := range 6 {
		vllm.check(t, r.chat(i%2 == 0, 5))
	}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	if per := before.HeapAlloc / n; per > 64<<10 {
		t.Errorf("%d bytes for each of them", per)
	}
	for _, conn := range conns {
		conn.Close()
	}
	conns = nil
	r.http.CloseIdleConnections()
	r.transport.CloseIdleConnections()
	eventually(t, "goroutines are back where they were", func() bool { return runtime.NumGoroutine() <= goroutines+4 })
	eventually(t, "descriptors are back where they were", func() bool { return descriptors(t) <= files+4 })
}

// TestStuckClients: clients that do not read slow their own answers down, whose vLLM must wait, and nothing else: no memory
// fills, and other answers come as ever.
func TestStuckClients(t *testing.T) {
	const clients, chunk, most = 4, 64 << 10, 1000 // 64 MB for each
	event := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("a", chunk) + `"},"finish_reason":null}]}` + "\n\n"
	vllm := startEngine(t)
	taken := make(chan int, clients)
	g := newGate(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "flood" {
			vllm.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		n := 0
		for ; n < most; n++ {
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			if _, err := io.WriteString(w, event); err != nil {
				break // it is not taken any more
			}
		}
		taken <- n
		g.pass(r.Context())
	})
	r := newRig(t, up.URL)
	r.warm()
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range clients {
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
		body := streamed
		if i%4 == 3 {
			body = `{"messages":[],"stream":true,"n":2}` // as a response that stays with net/http's server
		}
		fmt.Fprintf(conn, "POST %s?flood HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chat, len(body), body)
	}
	var wg sync.WaitGroup
	wg.Go(func() { // while vLLM is being held up
		for i := range 10 {
			if a := r.chat(i%2 == 0, 5); a.status != http.StatusOK || a.err != nil || !a.timings.Exists() {
				t.Errorf("another answer: %d %s, %v", a.status, a.body, a.err)
			}
		}
	})
	for range clients {
		if n := <-taken; n >= most/2 {
			t.Errorf("%d MB of %d were taken for a client that reads none", n*chunk>>20, most*chunk>>20)
		}
	}
	wg.Wait()
	vllm.check(t, r.chat(true, 7))
	runtime.GC()
	runtime.ReadMemStats(&during)
	if held := int64(during.HeapAlloc) - int64(before.HeapAlloc); held > clients*256<<10 {
		t.Errorf("%d bytes are held for %d clients", held, clients)
	}
}

// TestClientResets: a client that resets its connection has left, whatever it was doing.
func TestClientResets(t *testing.T) {
	for _, body := range []string{streamed, "{}"} {
		t.Run(body, func(t *testing.T) {
			g := newGate(t)
			left := make(chan struct{})
			up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if notAVLLM(w, r) {
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, tokenEvent)
				_ = http.NewResponseController(w).Flush()
				if !g.pass(r.Context()) {
					close(left)
				}
			})
			r := newRig(t, up.URL)
			r.learned()
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chat, len(body), body)
			g.reached(t)
			_, _ = conn.Read(make([]byte, 1))
			_ = conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
			select {
			case <-left:
			case <-time.After(10 * time.Second):
				t.Error("vLLM does not see that the client left")
			}
			r.wantLeft(http.StatusOK)
		})
	}
}

package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// clientPair returns a client's connection as the server has it, and the client's end.
func clientPair(t *testing.T) (*client, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = far.Close() })
	near, err := Clients{l}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = near.Close() })
	return near.(*client), far
}

// TestClientWrites: what is kept of an answer is sent with what is written next, and nothing is kept of which no more will
// come.
func TestClientWrites(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
	long := strings.Repeat("x", 2*bigBuffer)
	for name, test := range map[string]struct {
		body   int
		writes []string
		kept   int // of them
	}{
		"whole":              {10, []string{head + "0123456789"}, 0},
		"two":                {10, []string{head + "01234", "56789"}, 1},
		"head alone":         {10, []string{head, "0123456789"}, 1},
		"three":              {10, []string{head + "0", "1234", "56789"}, 1},
		"much behind":        {len(long), []string{head + "0", long}, 1},
		"much before":        {10 + len(long), []string{head + long, "0123456789"}, 0},
		"part of a head":     {10, []string{head[:20], head[20:] + "0123456789"}, 0},
		"nothing is said":    {0, []string{head + "0", "123456789"}, 0},
		"no body":            {0, []string{head}, 0},
		"more than was said": {5, []string{head + "01234", "56789"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			near, far := clientPair(t)
			for range 2 { // as a connection is used again
				gather(ConnContext(context.Background(), near), test.body)
				want := ""
				for i, w := range test.writes {
					if n, err := near.Write([]byte(w)); n != len(w) || err != nil {
						t.Fatalf("%d of %d were written: %v", n, len(w), err)
					}
					if want += w; i < test.kept {
						if near.held == nil || near.size != len(want) {
							t.Errorf("write %d was not kept", i)
						}
						continue
					}
					if near.held != nil {
						t.Errorf("write %d was kept", i)
					}
					got := make([]byte, len(want))
					if _, err := io.ReadFull(far, got); err != nil || string(got) != want {
						t.Fatalf("%q came, want %q: %v", got, want, err)
					}
					want = ""
				}
			}
		})
	}
}

// TestClientWriteFails: of what was kept nothing is counted as written later.
func TestClientWriteFails(t *testing.T) {
	near, _ := clientPair(t)
	gather(ConnContext(context.Background(), near), 100)
	if n, err := near.Write([]byte("HTTP/1.1 200 OK\r\n\r\n")); n != 19 || err != nil {
		t.Fatal(n, err)
	}
	_ = near.CloseWrite()
	if n, err := near.Write([]byte("x")); n != 0 || err == nil {
		t.Errorf("%d, %v", n, err)
	}
}

// TestAnswerInOneWrite: an answer that net/http would send in pieces comes in one, and what has come of another does not
// wait for its end.
func TestAnswerInOneWrite(t *testing.T) {
	text := strings.Repeat("x", 4000)
	answer := `{"choices":[{"index":0,"message":{"content":"` + text + `"}}],` + codedUsage + "," + nativeMember + "}"
	const begun = 1000
	release := newGate(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
		if r.URL.Path == string(chat) {
			_, _ = io.WriteString(w, answer)
			return
		}
		_, _ = io.WriteString(w, answer[:begun])
		_ = http.NewResponseController(w).Flush()
		release.pass(r.Context())
		_, _ = io.WriteString(w, answer[begun:])
	})
	r := newRig(t, up.URL)
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	ask := func(path string) {
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", path)
	}
	for range 3 {
		ask(string(chat))
		piece := make([]byte, 2*len(answer))
		n, err := conn.Read(piece)
		if got := piece[:n]; err != nil || !bytes.Contains(got, []byte(text)) || !bytes.Contains(got, []byte(`"timings"`)) || !bytes.HasSuffix(got, []byte("}}")) {
			t.Fatalf("%q, %v", got, err)
		}
	}
	ask("/v1/embeddings")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(answer))
	if _, err := io.ReadFull(resp.Body, got[:begun]); err != nil {
		t.Fatal(err)
	}
	release.open()
	if _, err := io.ReadFull(resp.Body, got[begun:]); err != nil || string(got) != answer {
		t.Errorf("%q, %v", got, err)
	}
}

package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// echoUpstream answers with what it was asked: request line, host, header, body.
func echoUpstream(t *testing.T) string {
	return startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		body, _ := io.ReadAll(r.Body)
		w.Header()["X-Twice"] = []string{"a", "b"}
		w.Header().Set("Keep-Alive", "timeout=5") // hop by hop
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "%s %s %s\n", r.Method, r.RequestURI, r.Host)
		_ = r.Header.Write(w)
		fmt.Fprintf(w, "\n%s", body)
	}).URL
}

func TestTargetsGoThrough(t *testing.T) {
	upstream := echoUpstream(t)
	for _, prefix := range []string{"", "/vllm", "/a%2Fb/"} {
		r := newRig(t, upstream+prefix)
		for _, target := range []string{"/", "/v1/models/a%2Fb", "/?a;b", "/x?%zz", "/x?a=1&a=2&b=%20+c", "/x?", "//double//slash", "/a/../b", "/%E4%F6", "/x?q=\u00e4"} {
			for _, method := range []string{"GET", "PUT", "DELETE", "OPTIONS", "PROPFIND", "PATCH", "POST"} {
				conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: some.host:1234\r\nConnection: close\r\n\r\n", method, target)
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				line, _ := bufio.NewReader(resp.Body).ReadString('\n')
				conn.Close()
				want := fmt.Sprintf("%s %s %s\n", method, strings.TrimSuffix(prefix, "/")+target, "some.host:1234")
				if resp.StatusCode != http.StatusTeapot || line != want {
					t.Errorf("status %d, %q, want %q", resp.StatusCode, line, want)
				}
			}
		}
	}
}

func TestHeadersGoThrough(t *testing.T) {
	r := newRig(t, echoUpstream(t))
	for _, path := range []string{"/x", string(chat)} {
		a := r.send(http.MethodPost, path, "body", "X-Twice", "1", "X-Twice", "2", "X-Forwarded-For", "192.0.2.1", "Forwarded", "for=192.0.2.1",
			"Connection", "X-Hop", "X-Hop", "1", "Keep-Alive", "5", "Authorization", "Bearer k", "User-Agent", "")
		head, body, _ := strings.Cut(a.body, "\r\n\n")
		if body != "body" || a.status != http.StatusTeapot {
			t.Errorf("%d %q", a.status, a.body)
		}
		for _, want := range []string{"X-Twice: 1\r\nX-Twice: 2\r\n", "X-Forwarded-For: 192.0.2.1\r\n", "\nForwarded: for=192.0.2.1\r\n", "Authorization: Bearer k\r\n", "Content-Length: 4\r\n"} {
			if !strings.Contains(head+"\r\n", want) {
				t.Errorf("%s: %q lacks %q", path, head, want)
			}
		}
		for _, not := range []string{"X-Hop", "Keep-Alive", "User-Agent", "X-Forwarded-Host", "X-Forwarded-Proto", "Accept-Encoding", "Via"} {
			if strings.Contains(head, not) {
				t.Errorf("%s: %q has %s", path, head, not)
			}
		}
		if got := a.header["X-Twice"]; !slices.Equal(got, []string{"a", "b"}) || a.header.Get("X-Hop") != "" || a.header.Get("Keep-Alive") != "" {
			t.Errorf("%s: %v", path, a.header)
		}
	}
	if a := r.send(http.MethodGet, "/x", ""); strings.Contains(a.body, "Forwarded") {
		t.Errorf("a header was added: %q", a.body)
	}
}

func TestAnswersGoThrough(t *testing.T) {
	var z bytes.Buffer
	gz := gzip.NewWriter(&z)
	_, _ = io.WriteString(gz, `{"choices":[{}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	_ = gz.Close()
	r := newRig(t, startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/gzip", string(chat):
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(z.Bytes())
		case "/redirect":
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		case "/hints":
			w.Header().Set("Link", "</a>")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusNoContent)
		case "/trailers":
			w.Header().Set("Trailer", "X-Said")
			_, _ = io.WriteString(w, "body")
			w.Header().Set("X-Said", "1")
			w.Header().Set(http.TrailerPrefix+"X-Unsaid", "2")
		case "/head":
			w.Header().Set("Content-Length", "1234")
		default:
			http.NotFound(w, r)
		}
	}).URL)
	for _, path := range []string{"/gzip", string(chat)} {
		if a := r.send(http.MethodPost, path, "{}", "Accept-Encoding", "gzip"); a.body != z.String() || a.header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%s: %q %v", path, a.body, a.header)
		}
	}
	if a := r.send(http.MethodGet, "/redirect", ""); a.status != http.StatusTemporaryRedirect || a.header.Get("Location") != "/elsewhere" {
		t.Errorf("%d %v", a.status, a.header)
	}
	if a := r.send(http.MethodGet, "/trailers", ""); a.body != "body" || a.trailer.Get("X-Said") != "1" || a.trailer.Get("X-Unsaid") != "2" {
		t.Errorf("%q %v", a.body, a.trailer)
	}
	if a := r.send(http.MethodHead, "/head", ""); a.status != http.StatusOK || a.header.Get("Content-Length") != "1234" {
		t.Errorf("%d %v", a.status, a.header)
	}
	var hints []string
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		hints = append(hints, fmt.Sprint(code, h.Get("Link")))
		return nil
	}}
	req, _ := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, r.url+"/hints", nil)
	if a := r.do(req); a.status != http.StatusNoContent || !slices.Equal(hints, []string{"103</a>"}) {
		t.Errorf("%d, %v", a.status, hints)
	}
}

// An upload goes on to vLLM while it comes: vLLM has its first part before the client sends the last.
func TestUploadStreams(t *testing.T) {
	first := make(chan string, 1)
	r := newRig(t, startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		parts, err := r.MultipartReader()
		if err != nil {
			t.Error(err)
			return
		}
		for {
			part, err := parts.NextPart()
			if err != nil {
				break
			}
			content := make([]byte, 5)
			_, _ = io.ReadFull(part, content)
			select {
			case first <- string(content):
			default:
			}
			fmt.Fprintf(w, "%s=%s\n", part.FormName(), content)
		}
	}).URL)
	body, pipe := io.Pipe()
	form := multipart.NewWriter(pipe)
	go func() {
		defer pipe.Close()
		part, _ := form.CreateFormField("first")
		_, _ = io.WriteString(part, "audio")
		part, _ = form.CreateFormField("second") // its head ends the first part
		select {
		case got := <-first:
			if got != "audio" {
				t.Errorf("%q", got)
			}
		case <-time.After(5 * time.Second):
			t.Error("vLLM has nothing while the client has more to send")
		}
		_, _ = io.WriteString(part, "model")
		_ = form.Close()
	}()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/audio/transcriptions", body)
	req.Header.Set("Content-Type", form.FormDataContentType())
	if a := r.do(req); a.body != "first=audio\nsecond=model\n" || a.err != nil {
		t.Errorf("%q, %v", a.body, a.err)
	}
}

// idleCloser closes its idle connections when told to, as uvicorn does after 5 s.
type idleCloser struct {
	mu   sync.Mutex
	idle map[net.Conn]bool
}

func (c *idleCloser) state(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s == http.StateIdle {
		c.idle[conn] = true
	} else {
		delete(c.idle, conn)
	}
}

func (c *idleCloser) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.idle {
		_ = conn.Close()
		delete(c.idle, conn)
	}
}

// vLLM may close an idle connection at the moment at which a request is sent on it. The client must not see that.
func TestIdleConnectionsClosed(t *testing.T) {
	closer := &idleCloser{idle: map[net.Conn]bool{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	up := &http.Server{Handler: http.HandlerFunc(atOnce), ConnState: closer.state, ReadHeaderTimeout: time.Minute}
	go func() { _ = up.Serve(listener) }()
	t.Cleanup(func() { _ = up.Close() })
	r := newRig(t, "http://"+listener.Addr().String())
	r.learned()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { // at any moment
		for n := 0; ctx.Err() == nil; n++ {
			closer.close()
			time.Sleep(time.Duration(n%7) * 100 * time.Microsecond)
		}
	})
	failed := 0
	for range 1000 {
		a := r.send(http.MethodPost, string(chat), chatRequest(false, 1, "x"))
		if a.status != http.StatusOK {
			failed++
		}
		closer.close() // and just before the next is sent
	}
	stop()
	wg.Wait()
	if failed > 0 {
		t.Errorf("%d of 1000 answers failed", failed)
	}
}

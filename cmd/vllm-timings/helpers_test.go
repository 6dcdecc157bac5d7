package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

var scratch string // a folder for this run

func TestMain(m *testing.M) {
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); strings.HasPrefix(name, envPrefix+"_") {
			os.Unsetenv(name)
		}
	}
	var err error
	if scratch, err = os.MkdirTemp("", "vllm-timings-cmd-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(scratch)
		os.Exit(code)
	}))
}

// serveSocket serves a simulated vLLM at a unix socket.
func serveSocket(t *testing.T, path string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(startSim(t))
	s.Listener.Close()
	s.Listener = listener
	s.Start()
	t.Cleanup(s.Close)
}

// binary builds the program once.
var binary = sync.OnceValues(func() (string, error) {
	file := filepath.Join(scratch, "vllm-timings")
	out, err := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", file, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return file, nil
})

// client keeps no connections, so that none is left over.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}

// console collects output and can wait for it.
type console struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed by the next write

	hookText string // what a write must contain for hookDo to be called, once, before it returns
	hookDo   func()
}

func newConsole() *console { return &console{more: make(chan struct{})} }

func (c *console) hook(text string, do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hookText, c.hookDo = text, do
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	if do := c.hookDo; do != nil && bytes.Contains(p, []byte(c.hookText)) {
		c.hookDo = nil
		c.mu.Unlock()
		do()
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	close(c.more)
	c.more = make(chan struct{})
	return c.text.Write(p)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String()
}

// await waits for a text that matches and returns its submatches.
func (c *console) await(t *testing.T, pattern string) []string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	end := time.After(patience)
	for {
		c.mu.Lock()
		found, more := re.FindStringSubmatch(c.text.String()), c.more
		c.mu.Unlock()
		if found != nil {
			return found
		}
		select {
		case <-more:
		case <-end:
			t.Fatalf("no %q in:\n%s", pattern, c)
		}
	}
}

const servingLine = `msg=serving listen=(http://\S+)`

// process is a running Main, in this process or in its own.
type process struct {
	url  string
	log  *console
	code chan int
	stop func() // what the first SIGTERM does
	cmd  *exec.Cmd
}

// wait waits for the exit code.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	select {
	case code := <-p.code:
		return code
	case <-time.After(patience):
		t.Fatalf("it does not end:\n%s", p.log)
		return -1
	}
}

// patient is a flag for figures that are exact on a busy machine too, where a reading may take longer than the default.
const patient = "--metrics-deadline=3s"

// start runs serve in this process until stop.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{log: newConsole(), code: make(chan int, 1), stop: cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.code <- Main(ctx, append([]string{"serve", patient}, args...), io.Discard, p.log)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	p.serves(t)
	return p
}

// serves waits until it does, and notes where.
func (p *process) serves(t *testing.T) {
	t.Helper()
	m := p.log.await(t, `(?:`+servingLine+`|"msg":"serving","listen":"([^"]+)")`)
	p.url = cmp.Or(m[1], m[2])
}

// startBinary runs serve as a process of its own.
func startBinary(t *testing.T, args ...string) *process {
	t.Helper()
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{log: newConsole(), code: make(chan int, 1), cmd: exec.Command(file, append([]string{"serve", patient}, args...)...)}
	p.cmd.Stderr = p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.cmd.Wait() // ProcessState has the outcome
		p.code <- p.cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-done
	})
	p.serves(t)
	return p
}

// gated is an upstream whose streams send one event and the rest when the gate opens.
type gated struct {
	*httptest.Server
	gate chan struct{}
	once sync.Once
}

func (g *gated) open() { g.once.Do(func() { close(g.gate) }) }

const (
	firstEvent = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	lastEvents = `data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
)

func newGated(t *testing.T) *gated {
	t.Helper()
	g := &gated{gate: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, firstEvent)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-g.gate:
			_, _ = io.WriteString(w, lastEvents)
		case <-r.Context().Done():
		}
	})
	// An upgraded connection gives back what it gets.
	mux.HandleFunc("GET /upgrade", func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(conn, rw)
	})
	// An answer without end.
	mux.HandleFunc("GET /flood", func(w http.ResponseWriter, _ *http.Request) {
		block := make([]byte, 64<<10)
		for err := error(nil); err == nil; {
			_, err = w.Write(block)
		}
	})
	g.Server = httptest.NewServer(mux)
	t.Cleanup(func() {
		g.open()
		g.Close()
	})
	return g
}

// openStream begins a streamed answer and returns the rest of it after the first event.
func openStream(t *testing.T, url string) *bufio.Reader {
	t.Helper()
	resp := post(t, url+"/v1/chat/completions", `{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}`)
	t.Cleanup(func() { resp.Body.Close() })
	r := bufio.NewReader(resp.Body)
	got := make([]byte, len(firstEvent))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != firstEvent {
		t.Fatalf("the stream begins with %q, %v", got, err)
	}
	return r
}

func post(t *testing.T, url, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer secret-key")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// readAll returns a body and closes it.
func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// dial opens a connection to the host of a URL.
func dial(t *testing.T, url string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// awaitRefused returns when no connection is accepted any more.
func awaitRefused(t *testing.T, url string) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			return
		}
		conn.Close()
	}
	t.Fatal("connections are still accepted")
}

// run runs a command line to its end.
func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = Main(context.Background(), args, &out, &errs)
	return code, out.String(), errs.String()
}

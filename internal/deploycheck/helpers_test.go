package deploycheck

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/deploycheck/live"
)

const (
	root     = "../.." // the top of the repository
	patience = 60 * time.Second
)

var scratch string // a folder for this run

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); strings.HasPrefix(name, "VLLM_TIMINGS_") {
			os.Unsetenv(name)
		}
	}
	var err error
	if scratch, err = os.MkdirTemp("", "vllm-timings-deploy-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratch)
	return m.Run()
}

// read gives the text of a file of the repository. Go's test cache notices when such a file changes, but not what only
// another program reads: so tests read each file here and hand out copies.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// write makes a file.
func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// binary builds the program once.
var binary = sync.OnceValues(func() (string, error) {
	// A look at each source file, for the test cache.
	for _, dir := range []string{"cmd", "metrics", "patch", "proxy", "sse", "timings"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err == nil && filepath.Ext(path) == ".go" {
				_, err = os.Stat(path)
			}
			return err
		})
		if err != nil {
			return "", err
		}
	}
	file := filepath.Join(scratch, "vllm-timings")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", file, "./cmd/vllm-timings")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return file, nil
})

// console collects what a program prints.
type console struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.Write(p)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String()
}

// start starts a program that runs until the test ends, and waits until it prints what matches. It returns the first
// submatch, and what ends it before.
func start(t *testing.T, pattern, name string, args ...string) (found string, stop func()) {
	t.Helper()
	out := &console{}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-done
			t.Errorf("%s does not end with SIGTERM", filepath.Base(name))
		}
		if t.Failed() {
			text := out.String()
			t.Logf("%s printed at last:\n%s", filepath.Base(name), text[max(0, len(text)-3000):])
		}
	})
	t.Cleanup(stop)
	re := regexp.MustCompile(pattern)
	live.Wait(t, "the line of "+filepath.Base(name), func() error {
		if m := re.FindStringSubmatch(out.String()); m != nil {
			found = m[1]
			return nil
		}
		select {
		case <-done:
			t.Fatalf("%s ended", filepath.Base(name))
		default:
		}
		return fmt.Errorf("nothing matches %s", pattern)
	})
	return found, stop
}

// sidecar starts the program before a vLLM and returns its address.
func sidecar(t *testing.T, upstream string) string {
	t.Helper()
	program, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	url, _ := start(t, `msg=serving listen=(http://\S+)`, program, "serve", "--listen", "127.0.0.1:0", "--upstream", upstream)
	return url
}

// get gives a page.
func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s %v\n%s", url, resp.Status, err, body)
	}
	return string(body)
}

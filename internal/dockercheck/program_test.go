package dockercheck

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// program builds the program, as it runs here and not in an image.
func program(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "vllm-timings")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", binary, "./cmd/vllm-timings")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return binary
}

// serve starts a program with no environment but env. stop interrupts it; ending otherwise than well fails the test.
func serve(t *testing.T, env []string, binary string, args ...string) (stop func()) {
	t.Helper()
	var log bytes.Buffer
	cmd := exec.Command(binary, args...)
	cmd.Env = env
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("%v\n%s", err, &log)
		}
	})
	t.Cleanup(stop)
	return stop
}

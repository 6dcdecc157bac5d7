//go:build unix

package main

import (
	"bytes"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// console signals the process once the server says where it listens.
type console struct {
	bytes.Buffer
	t *testing.T
}

func (c *console) Write(p []byte) (int, error) {
	n, err := c.Buffer.Write(p)
	if url := strings.TrimSpace(string(p)[strings.Index(string(p), "http://"):]); url != "" {
		resp, err := http.Get(url + "/version")
		if err != nil || resp.StatusCode != http.StatusOK {
			c.t.Error(url, err)
		} else {
			resp.Body.Close()
		}
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
			c.t.Error(err)
		}
	}
	return n, err
}

func TestRun(t *testing.T) {
	out := &console{t: t}
	if code := run([]string{"--listen", "127.0.0.1:0", "--version", "0.19.1", "--decode-step=-1s", "--no-filtered-metrics"}, out, out); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if !strings.HasPrefix(out.String(), "simulated vLLM 0.19.1 listening on http://127.0.0.1:") {
		t.Error(out.String())
	}
}

func TestBadFlags(t *testing.T) {
	for code, args := range map[int][]string{2: {"--nonsense"}, 1: {"--listen", "nowhere.invalid:1"}} {
		var out bytes.Buffer
		if got := run(args, &out, &out); got != code || out.Len() == 0 {
			t.Errorf("%v: exit code %d, want %d: %s", args, got, code, &out)
		}
	}
}

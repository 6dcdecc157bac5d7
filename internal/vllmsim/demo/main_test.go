//go:build unix

package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// The test binary is the sidecar, too: it asks the upstream for its health
// and ends as its first argument says.
func TestMain(m *testing.M) {
	if os.Getenv("DEMO_CHILD") == "" {
		os.Exit(m.Run())
	}
	upstream := os.Args[len(os.Args)-1]
	resp, err := http.Get(upstream + "/health")
	if err != nil || resp.StatusCode != http.StatusOK || os.Args[len(os.Args)-2] != "--upstream" {
		fmt.Println("bad upstream", os.Args, err)
		os.Exit(99)
	}
	if os.Args[1] == "wait" {
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		// The signal that the demo forwards: sent from here to the demo, so
		// that it cannot come before Notify.
		if err := syscall.Kill(os.Getppid(), syscall.SIGTERM); err != nil {
			os.Exit(98)
		}
		<-c
	}
	fmt.Println("child ran", os.Args[1:])
	os.Exit(7)
}

func TestRun(t *testing.T) {
	t.Setenv("DEMO_CHILD", "1")
	for _, mode := range []string{"serve", "wait"} {
		var out bytes.Buffer
		if code := run([]string{"--", os.Args[0], mode, "--listen", ":9999"}, &out, &out); code != 7 {
			t.Errorf("%s: exit code %d: %s", mode, code, &out)
		}
		lines := strings.Split(out.String(), "\n")
		if len(lines) != 4 || !strings.HasPrefix(lines[0], "Simulated vLLM 0.32.0 listens on http://127.0.0.1:") ||
			!strings.HasPrefix(lines[1], "Try: curl -N http://127.0.0.1:9999/v1/chat/completions") {
			t.Errorf("%s: %s", mode, &out)
		}
	}
}

func TestCannotStart(t *testing.T) {
	for code, args := range map[int][]string{2: {"--"}, 1: {"/does/not/exist"}} {
		if got := run(args, io.Discard, io.Discard); got != code {
			t.Errorf("%v: exit code %d, want %d", args, got, code)
		}
	}
}

func TestListenAddress(t *testing.T) {
	for args, want := range map[string]string{
		"serve":                           "127.0.0.1:8010",
		"serve --listen=0.0.0.0:1":        "127.0.0.1:1",
		"serve --listen 10.0.0.1:2":       "10.0.0.1:2",
		"serve --listen [::1]:3 --x 1":    "[::1]:3",
		"serve --listen nonsense --quiet": "nonsense",
	} {
		if got := listenAddress(strings.Fields(args)); got != want {
			t.Errorf("%s: %s, want %s", args, got, want)
		}
	}
}

//go:build unix

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestDrain(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
	stream := openStream(t, p.url)
	// The line about it comes when /-/ready tells already, and before connections are refused.
	var ready string
	p.log.hook("msg=\"stopping: ", func() {
		resp, err := client.Get(p.url + "/-/ready")
		if err != nil {
			ready = err.Error()
			return
		}
		ready = resp.Status
		resp.Body.Close()
	})
	p.stop()
	p.log.await(t, `msg="stopping: .* in_flight=1 drain_timeout=30s`)
	if ready != "503 Service Unavailable" {
		t.Errorf("/-/ready when it stops: %s", ready)
	}
	awaitRefused(t, p.url)
	upstream.open()
	if rest, err := io.ReadAll(stream); err != nil || string(rest) != lastEvents {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	p.log.await(t, "msg=stopped")
	if strings.Contains(p.log.String(), "cut off") {
		t.Error(p.log)
	}
}

func TestDrainTimeout(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL, "--drain-timeout", "20ms")
	stream := openStream(t, p.url)
	began := time.Now()
	p.stop()
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it ended after %s", took)
	}
	if rest, err := io.ReadAll(stream); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream that was cut off ends with %q, %v", rest, err)
	}
	p.log.await(t, `level=WARN msg="answers were cut off.*in_flight=1`)
}

// TestDrainTimeoutStuckClient: a client that reads no more cannot keep the process either.
func TestDrainTimeoutStuckClient(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL, "--drain-timeout", "20ms")
	conn := dial(t, p.url)
	fmt.Fprint(conn, "GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := io.ReadFull(conn, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	p.stop()
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	p.log.await(t, "answers were cut off")
}

// upgrade opens a connection that is no HTTP any more.
func upgrade(t *testing.T, url string) (io.ReadWriteCloser, *bufio.Reader) {
	t.Helper()
	conn := dial(t, url)
	fmt.Fprint(conn, "GET /upgrade HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", resp, err)
	}
	return conn, r
}

// TestDrainUpgraded: http.Server knows nothing of upgraded connections, but they are drained too.
func TestDrainUpgraded(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
	conn, r := upgrade(t, p.url)
	p.stop()
	awaitRefused(t, p.url)
	fmt.Fprint(conn, "still here\n")
	if line, err := r.ReadString('\n'); err != nil || line != "still here\n" {
		t.Errorf("%q %v", line, err)
	}
	conn.Close()
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestDrainTimeoutUpgraded(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL, "--drain-timeout", "20ms")
	_, r := upgrade(t, p.url)
	p.stop()
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if rest, err := io.ReadAll(r); len(rest) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%q %v", rest, err)
	}
	p.log.await(t, "answers were cut off")
}

func TestProcessDrains(t *testing.T) {
	upstream := newGated(t)
	p := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
	stream := openStream(t, p.url)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.log.await(t, "msg=\"stopping: ")
	awaitRefused(t, p.url)
	upstream.open()
	if rest, err := io.ReadAll(stream); err != nil || string(rest) != lastEvents {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.log)
	}
}

func TestProcessSecondSignal(t *testing.T) {
	for _, second := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		upstream := newGated(t)
		p := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
		stream := openStream(t, p.url)
		for _, sig := range []syscall.Signal{syscall.SIGINT, second} {
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			p.log.await(t, "msg=\"stopping: ")
		}
		p.wait(t)
		if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != second {
			t.Errorf("it ended with %s, not by %s", p.cmd.ProcessState, second)
		}
		if _, err := io.ReadAll(stream); err == nil {
			t.Error("the stream ended as if it were whole")
		}
	}
}

func TestProcessPortTaken(t *testing.T) {
	first := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:9")
	address := strings.TrimPrefix(first.url, "http://")
	for _, args := range [][]string{{"serve", "--listen", address}, {"serve", "--listen=" + address, "--log-format=json"}} {
		code, stdout, stderr := run(args...)
		want := "vllm-timings: --listen " + address + " is in use by another process: stop that or choose another port\n"
		if code != exitFailed || stdout != "" || stderr != want {
			t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
		}
	}
	if err := first.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := first.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

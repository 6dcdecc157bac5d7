package proxy

import (
	"bufio"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// startSimserver runs a simulated vLLM as a process of its own.
func startSimserver(t *testing.T, program, address string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program, "--listen", address, "--decode-step", "2ms")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, address) {
		t.Fatalf("the simulated vLLM says %q, %v", line, err)
	}
	return cmd
}

// TestKilled: a vLLM that is killed (kill -9) in the midst of answers breaks them off, and the one that comes after it at the
// same address is found without any restart here. Its counters begin anew: no figure is made of both.
func TestKilled(t *testing.T) {
	program := filepath.Join(t.TempDir(), "simserver")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", program, "../internal/vllmsim/simserver").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	address := freeAddress(t)
	first := startSimserver(t, program, address)
	r := newRig(t, "http://"+address)
	r.warm()
	if a := r.chat(true, 5); !a.exact() {
		t.Errorf("%s", a.body)
	}
	var inFlight []*leaver
	for range 3 {
		l := r.start(string(chat), chatRequest(true, 30_000, "broken off"))
		l.until(t, `"content":" `)
		inFlight = append(inFlight, l)
	}
	whole := make(chan answer)
	go func() { whole <- r.send(http.MethodPost, string(chat), chatRequest(false, 30_000, "whole")) }()
	eventually(t, "all are with vLLM", func() bool { return r.inFlight.Load() == 4 })
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, l := range inFlight {
		for {
			select {
			case line, ok := <-l.lines:
				if ok && (strings.Contains(line, "DONE") || strings.Contains(line, "timings")) {
					t.Errorf("an answer that broke off ends in %s", line)
				}
				if ok {
					continue
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the answer does not end")
			}
			break
		}
	}
	if a := <-whole; a.status != http.StatusBadGateway || !strings.Contains(a.body, "connection ") { // it may have been sent once more
		t.Errorf("an answer that had not begun: %d %s", a.status, a.body)
	}
	r.wantMetric(4, "upstream_errors_total")
	wantBadGateway(t, r.chat(true, 5), address, "s3cret")

	startSimserver(t, program, address)
	eventually(t, "vLLM answers", func() bool { return r.send(http.MethodGet, "/health", "").status == http.StatusOK })
	r.warm()
	for i := range 4 {
		if a := r.chat(i%2 == 0, 5); a.status != http.StatusOK || a.err != nil || !a.exact() || a.timings.Get("predicted_n").Int() != 5 || a.timings.Get("predicted_ms").Num > 10_000 {
			t.Errorf("%d %s, %v", a.status, a.body, a.err)
		}
	}
	r.wantMetric(0, "client_disconnects_total")
}

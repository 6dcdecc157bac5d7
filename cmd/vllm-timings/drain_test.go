//go:build unix

package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// held lets a simulated vLLM's answers begin, and holds the rest of them at a gate.
type held struct {
	http.ResponseWriter
	first bool
	gate  <-chan struct{}
}

func (h *held) Unwrap() http.ResponseWriter { return h.ResponseWriter }

func (h *held) Write(p []byte) (int, error) {
	if !h.first {
		h.first = true
		n, err := h.ResponseWriter.Write(p)
		_ = http.NewResponseController(h.ResponseWriter).Flush()
		return n, err
	}
	<-h.gate
	return h.ResponseWriter.Write(p)
}

// TestProcessDrains200: SIGTERM under 200 streams loses none of them, nor any part of one, and refuses new connections at once.
func TestProcessDrains200(t *testing.T) {
	const streams = 200
	cfg := vllmsim.Default()
	cfg.DecodeStep, cfg.PrefillTokensPerSecond = -1, -1
	sim := vllmsim.New(cfg)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			w = &held{ResponseWriter: w, gate: gate}
		}
		sim.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		open()
		sim.Close()
		up.Close()
	})
	p := startBinary(t, "--listen", "127.0.0.1:0", "--upstream", up.URL)
	p.log.await(t, "found vLLM")

	var begun, done sync.WaitGroup
	begun.Add(streams)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	patient := &http.Client{Transport: transport, Timeout: 3 * patience}
	for i := range streams {
		done.Go(func() {
			body := fmt.Sprintf(`{"model":"tiny","max_tokens":%d,"ignore_eos":true,"stream":true,"messages":[{"role":"user","content":"%d"}]}`, 20+i%7, i)
			resp, err := patient.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
				begun.Done()
				return
			}
			defer resp.Body.Close()
			r := bufio.NewReader(resp.Body)
			first, err := r.ReadString('\n')
			begun.Done()
			if err != nil || !strings.HasPrefix(first, "data: ") {
				t.Errorf("stream %d begins with %q, %v", i, first, err)
				return
			}
			rest, err := io.ReadAll(r)
			words := strings.Count(string(rest), `"content":" `) // all tokens but the first, which has no space before it
			if err != nil || words != 20+i%7-1 || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
				t.Errorf("stream %d: %v, %d words, it ends with %.100q", i, err, words, rest[max(0, len(rest)-100):])
			}
		})
	}
	begun.Wait()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.log.await(t, fmt.Sprintf(`msg="stopping: .* in_flight=%d `, streams))
	awaitRefused(t, p.url)
	open()
	done.Wait()
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d\n%s", code, p.log)
	}
	if log := p.log.String(); strings.Contains(log, "cut off") || strings.Contains(log, "client_left") || strings.Count(log, "status=200") != streams {
		t.Errorf("%d answers are in the log:\n%s", strings.Count(log, "status=200"), log)
	}
}

// TestDrainKeptConnection: who has a connection is told that the process is not ready any more, before new ones are refused.
func TestDrainKeptConnection(t *testing.T) {
	upstream := newGated(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", upstream.URL)
	conn := dial(t, p.url)
	reader := bufio.NewReader(conn)
	ready := func() string {
		fmt.Fprint(conn, "GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(reader, nil)
		if err != nil {
			return err.Error()
		}
		body, err := io.ReadAll(resp.Body)
		return fmt.Sprint(resp.StatusCode, " ", string(body), err)
	}
	if got := ready(); got != "200 ok\n<nil>" {
		t.Fatal(got)
	}
	stream := openStream(t, p.url)
	var kept string
	var accepts error
	p.log.hook("msg=\"stopping: ", func() { // connections are accepted still
		kept = ready()
		var resp *http.Response
		if resp, accepts = client.Get(p.url + "/-/healthy"); accepts == nil {
			resp.Body.Close()
		}
	})
	p.stop()
	p.log.await(t, "msg=\"stopping: ")
	if kept != "503 draining\n<nil>" || accepts != nil {
		t.Errorf("on a kept connection: %s; a new one: %v", kept, accepts)
	}
	awaitRefused(t, p.url)
	if rest, err := io.ReadAll(reader); err != nil || len(rest) > 0 { // and the kept one is closed, as it is idle
		t.Errorf("%q, %v", rest, err)
	}
	upstream.open()
	if rest, err := io.ReadAll(stream); err != nil || string(rest) != lastEvents {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
	if code := p.wait(t); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

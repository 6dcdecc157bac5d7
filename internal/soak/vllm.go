package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// dieHeader has vLLM break the connection in the midst of its nth write of an answer. A streamed answer has one for each
// event, another has one in all.
const dieHeader = "X-Soak-Die"

// step is how often each request gets a token.
const step = 50 * time.Millisecond

// vllm is a simulated vLLM with two endpoints more, and answers that break off.
type vllm struct{ sim *vllmsim.Sim }

// newVLLM starts one. Every other life has vLLM's own figures in its answers, so that the sidecar needs the windows for
// the ones between.
func newVLLM(life int) *vllm {
	cfg := vllmsim.Default()
	cfg.DecodeStep = step
	cfg.PerRequestMetrics, cfg.PromptTokensDetails = life%2 == 1, life%2 == 1
	return &vllm{vllmsim.New(cfg)}
}

// vllmMain serves a vLLM until it is killed.
func vllmMain(addr, life string) error {
	n, err := strconv.Atoi(life)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:           newVLLM(n),
		ReadHeaderTimeout: time.Minute,
		IdleTimeout:       5 * time.Second, // uvicorn's
		ErrorLog:          log.New(io.Discard, "", 0),
	}
	return server.Serve(l)
}

func (v *vllm) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if n, err := strconv.Atoi(r.Header.Get(dieHeader)); err == nil {
		w = &dying{ResponseWriter: w, left: n}
	}
	var d *dialect
	switch r.URL.Path {
	case "/v1/messages":
		d = &dialect{turns: messagesTurns{}}
	case "/v1/responses":
		d = &dialect{turns: &responsesTurns{}}
	case "/invocations":
	default:
		v.sim.ServeHTTP(w, r)
		return
	}
	inner := r.Clone(r.Context())
	inner.URL.Path = "/v1/chat/completions"
	if d != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		asked := d.turns.ask(body)
		inner.Body, inner.ContentLength = io.NopCloser(strings.NewReader(asked)), int64(len(asked))
		d.ResponseWriter = w
		w = d
	}
	v.sim.ServeHTTP(w, inner)
}

// dying is an answer that breaks off.
type dying struct {
	http.ResponseWriter
	left int // writes that are still to come, the last one only in part
}

func (d *dying) Write(p []byte) (int, error) {
	if d.left--; d.left > 0 {
		return d.ResponseWriter.Write(p)
	}
	_, _ = d.ResponseWriter.Write(p[:len(p)/2])
	_ = http.NewResponseController(d.ResponseWriter).Flush()
	panic(http.ErrAbortHandler)
}

// Unwrap is for http.ResponseController.
func (d *dying) Unwrap() http.ResponseWriter { return d.ResponseWriter }

// lives is a vLLM that is killed and started again, at the same address.
type lives struct {
	self string // this program
	addr string
	now  *process
	gaps []gap // in which there was none
}

// gap is a time without vLLM.
type gap struct{ from, to time.Time }

// begin starts the first life.
func (l *lives) begin(ctx context.Context) (err error) {
	l.now, err = start(ctx, l.addr, "/health", l.self, "vllm", l.addr, fmt.Sprint(len(l.gaps)))
	return err
}

// again kills vLLM, waits, and starts the next one.
func (l *lives) again(ctx context.Context, pause time.Duration) error {
	g := gap{from: time.Now()}
	l.now.kill()
	time.Sleep(pause)
	l.gaps = append(l.gaps, g)
	err := l.begin(ctx)
	l.gaps[len(l.gaps)-1].to = time.Now()
	return err
}

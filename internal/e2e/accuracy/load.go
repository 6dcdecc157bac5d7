//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// lengths are the least and most completion tokens of a request.
var lengths = map[string][2]int{
	"short":     {4, 120}, // many requests end together: harder than a real load
	"realistic": {200, 600},
}

// load is a closed loop: each of the clients sends its next request when the last one is answered. Prompts have 3 to some
// 350 words, of which a third begin with 150 that others share, so that vLLM has them in its prefix cache.
type load struct {
	url         string
	lengths     [2]int
	stream      bool
	concurrency int
	requests    int
	seed        uint64
}

// result is one answer, as far as it is compared.
type result struct {
	timings, metrics, usage gjson.Result
}

// run sends the load and returns its results, in no particular order.
func (l load) run(ctx context.Context) ([]result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	transport := &http.Transport{MaxIdleConnsPerHost: l.concurrency}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 10 * time.Minute}

	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	var results []result
	for range l.concurrency {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(l.requests) || ctx.Err() != nil {
					return
				}
				r, err := send(ctx, client, l.url, l.body(uint64(i)))
				if err != nil {
					cancel(fmt.Errorf("request %d: %w", i, err))
					return
				}
				mu.Lock()
				results = append(results, r)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return results, nil
}

// body makes request number i: the same one for the same seed, whatever ran before.
func (l load) body(i uint64) []byte {
	rnd := rand.New(rand.NewPCG(l.seed, i))
	var prompt strings.Builder
	if rnd.IntN(3) == 0 {
		// One of four long beginnings that others share: mostly from vLLM's prefix cache.
		words(&prompt, rand.New(rand.NewPCG(l.seed, 1<<32+rnd.Uint64N(4))), 150)
	}
	words(&prompt, rnd, 2+rnd.IntN(200))
	body := map[string]any{
		"model":      stack.Model,
		"messages":   []map[string]string{{"role": "user", "content": prompt.String()}},
		"max_tokens": l.lengths[0] + rnd.IntN(l.lengths[1]-l.lengths[0]+1),
		"ignore_eos": true, "temperature": 0,
	}
	if l.stream {
		body["stream"] = true
		body["stream_options"] = map[string]bool{"include_usage": true} // that is where vLLM puts its metrics
	}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings, numbers and booleans only
	}
	return b
}

// beside sends one request after the other until stop is called, which tells how many were answered.
func (l load) beside(ctx context.Context) (stop func() (answers int, err error)) {
	ctx, cancel := context.WithCancel(ctx)
	transport := &http.Transport{}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Minute}
	done := make(chan error, 1)
	n := 0
	go func() {
		defer transport.CloseIdleConnections()
		for {
			if _, err := send(ctx, client, l.url, l.body(uint64(n))); err != nil {
				if ctx.Err() != nil {
					err = nil
				}
				done <- err
				return
			}
			n++
		}
	}()
	return func() (int, error) {
		cancel()
		err := <-done
		return n, err
	}
}

func words(b *strings.Builder, rnd *rand.Rand, n int) {
	vocabulary := strings.Fields("the server reads a prompt and writes one token after another while the clock counts milliseconds of prefill decode queue")
	for range n {
		b.WriteString(vocabulary[rnd.IntN(len(vocabulary))])
		b.WriteByte(' ')
	}
}

// send posts one chat completion and picks out of the answer what is compared.
func send(ctx context.Context, client *http.Client, base string, body []byte) (result, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return result{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return result{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return result{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return result{}, fmt.Errorf("%s: %.500s", resp.Status, answer)
	}
	var r result
	for line := range bytes.Lines(answer) {
		doc, _ := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: ")) // a JSON answer is one line
		if !gjson.ValidBytes(doc) {
			continue // an empty line or [DONE]
		}
		for name, value := range map[string]*gjson.Result{"timings": &r.timings, "metrics": &r.metrics, "usage": &r.usage} {
			if v := gjson.GetBytes(doc, name); v.IsObject() {
				*value = v
			}
		}
	}
	if !r.metrics.Exists() || !r.usage.Exists() {
		return result{}, errors.New("vLLM's answer has no `metrics` or no `usage`: start it with " + strings.Join(stack.ExactFlags, " "))
	}
	return r, nil
}

// warmUp lets vLLM do what it does only once.
func warmUp(ctx context.Context, url string) error {
	for _, stream := range []bool{true, false} {
		l := load{url: url, lengths: lengths["short"], stream: stream, concurrency: 4, requests: 8, seed: 1 << 40}
		if _, err := l.run(ctx); err != nil {
			return fmt.Errorf("warm-up: %w", err)
		}
	}
	return nil
}

func vllmVersion(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/version", nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	return gjson.GetBytes(body, "version").String(), nil
}

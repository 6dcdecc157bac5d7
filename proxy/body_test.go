package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestAnswersShareNoMemory: of many answers at once, each client gets its own, however long it and the others are, and
// also while others leave in the midst of theirs.
func TestAnswersShareNoMemory(t *testing.T) {
	const clients, each = 16, 15
	content := func(name string) string {
		size := 0
		for _, c := range name {
			size = size*31 + int(c)
		}
		return strings.Repeat(name+" ", 1+size%20_000)
	}
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		answer := fmt.Sprintf(`{"choices":[{"message":{"content":%q}}],"usage":{"prompt_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}},"metrics":{"time_to_first_token_ms":1,"generation_time_ms":2}}`,
			content(r.Header.Get("X-Name")))
		if len(answer)%2 == 0 { // else in chunks, if it is long
			w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		}
		_, _ = io.WriteString(w, answer)
	})
	r := newRig(t, up.URL)
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			for j := range each {
				name := fmt.Sprintf("%d-%d", i, j)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions", strings.NewReader(chatRequest(false, 2, name)))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Name", name)
				if i%4 == 0 && j%2 == 0 {
					if resp, err := r.http.Do(req); err == nil {
						_, _ = io.ReadFull(resp.Body, make([]byte, 100))
						resp.Body.Close()
					}
					continue
				}
				a := r.do(req)
				if want := fmt.Sprintf(`{"choices":[{"message":{"content":%q}}],"usage":`, content(name)); !strings.HasPrefix(a.body, want) {
					t.Errorf("%s: an answer of %d bytes is not its own", name, len(a.body))
				}
				if a.timings.Get("predicted_n").Int() != 2 {
					t.Errorf("%s: timings %s", name, a.timings.Raw)
				}
			}
		})
	}
	all.Wait()
}

// TestBufferGivenBackOnce: the buffer of an answer that is closed more than once is given back once.
func TestBufferGivenBackOnce(t *testing.T) {
	for range 100 { // with the race detector a pool forgets some
		buf := new(bytes.Buffer)
		answer := &lent{io.NopCloser(nil), buf}
		for range 2 {
			if err := answer.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if a, b := wholeAnswers.Get(), wholeAnswers.Get(); a == b {
			t.Fatal("two answers have one buffer")
		}
	}
}

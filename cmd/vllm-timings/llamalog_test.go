package main

import (
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestLogFormatLlama: the numbers of a request stand behind its line as llama.cpp prints them, and all else is as ever.
func TestLogFormatLlama(t *testing.T) {
	sim := startSim(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL, "--log-format", "llama")
	p.log.await(t, `level=INFO msg="found vLLM 0\.32\.0: `)
	ask(t, p)
	const number = ` *\d+\.\d\d`
	p.log.await(t, `(?m)^time=\S+ level=INFO msg=request method=POST path=/v1/chat/completions status=200 duration_ms=\S+ model=tiny stream=false source=window estimated=false cache_n=0 overhead_ms=\S+
prompt eval time = `+number+` ms / +\d+ tokens \(`+number+` ms per token, `+number+` tokens per second\)
       eval time = `+number+` ms / +5 tokens \(`+number+` ms per token, `+number+` tokens per second\)
      total time = `+number+` ms / +\d+ tokens$`)
}

// TestLlamaLines: what is not known has no line, and nothing is divided by zero.
func TestLlamaLines(t *testing.T) {
	prompt := []any{"prompt_n", 14, "prompt_ms", 105.02, "prompt_per_second", 133.3}
	for _, c := range []struct {
		name, msg string
		attrs     []any
		want      string
	}{
		{"both", "request", append(prompt, "cache_n", 128, "predicted_n", 64, "predicted_ms", 1051.67, "predicted_per_second", 60.85), `level=INFO msg=request a=1 cache_n=128 overhead_ms=0.5
prompt eval time =     105.02 ms /    14 tokens (    7.50 ms per token,   133.31 tokens per second)
       eval time =    1051.67 ms /    64 tokens (   16.43 ms per token,    60.86 tokens per second)
      total time =    1156.69 ms /    78 tokens
`},
		{"one token", "request", append(prompt, "predicted_n", 1, "predicted_ms", 0.0, "predicted_per_second", 0.0), `level=INFO msg=request a=1 overhead_ms=0.5
prompt eval time =     105.02 ms /    14 tokens (    7.50 ms per token,   133.31 tokens per second)
       eval time =       0.00 ms /     1 tokens (    0.00 ms per token,     0.00 tokens per second)
      total time =     105.02 ms /    15 tokens
`},
		{"all cached", "request", []any{"prompt_n", 0, "prompt_ms", 2.5, "predicted_n", 3}, `level=INFO msg=request a=1 predicted_n=3 overhead_ms=0.5
prompt eval time =       2.50 ms /     0 tokens (    0.00 ms per token,     0.00 tokens per second)
`},
		{"none", "request", []any{"no_timings", "no_source"}, "level=INFO msg=request a=1 no_timings=no_source overhead_ms=0.5\n"},
		{"another line", "found", prompt, "level=INFO msg=found a=1 prompt_n=14 prompt_ms=105.02 prompt_per_second=133.3 overhead_ms=0.5\n"},
	} {
		var out strings.Builder
		log := slog.New(newLlamaLog(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		log.Info(c.msg, append(append([]any{"a", 1}, c.attrs...), "overhead_ms", 0.5)...)
		if out.String() != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, &out, c.want)
		}
	}
}

// TestLlamaLogWrites: all lines of a request are one write, so that nothing comes in between.
func TestLlamaLogWrites(t *testing.T) {
	r, w := io.Pipe()
	log := slog.New(newLlamaLog(w, nil)).With("x", 1).WithGroup("g")
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			if i%2 == 0 {
				log.Info("other", "at", time.Now())
				return
			}
			log.Info("request", "prompt_n", 3, "prompt_ms", 1.5)
		})
	}
	go func() {
		wg.Wait()
		w.Close()
	}()
	buf := make([]byte, 4096)
	whole := regexp.MustCompile(`^time=\S+ level=INFO (msg=other x=1 g\.at=\S+\n|msg=request x=1\nprompt eval time = [^\n]*\n)$`)
	n := 0
	for ; ; n++ {
		read, err := r.Read(buf)
		if err != nil {
			break
		}
		if !whole.Match(buf[:read]) {
			t.Errorf("%q", buf[:read])
		}
	}
	if n != 4 {
		t.Errorf("%d writes", n)
	}
}

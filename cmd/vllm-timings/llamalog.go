package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// llamaLog is a text log in which the numbers of a request stand behind its line, as users of llama.cpp know them.
type llamaLog struct {
	slog.Handler // writes to lines
	lines        *trailed
}

// trailed adds something to a line, in the same write. The lock is held for a whole record.
type trailed struct {
	mu   sync.Mutex
	to   io.Writer
	more string
}

func (t *trailed) Write(line []byte) (int, error) {
	if _, err := t.to.Write(append(line[:len(line):len(line)], t.more...)); err != nil {
		return 0, err
	}
	return len(line), nil
}

func newLlamaLog(w io.Writer, opts *slog.HandlerOptions) *llamaLog {
	lines := &trailed{to: w}
	return &llamaLog{slog.NewTextHandler(lines, opts), lines}
}

// Handle implements slog.Handler.
func (l *llamaLog) Handle(ctx context.Context, r slog.Record) error {
	more := ""
	if r.Message == "request" {
		r, more = numbersOut(r)
	}
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	l.lines.more = more
	return l.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (l *llamaLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &llamaLog{l.Handler.WithAttrs(attrs), l.lines}
}

// WithGroup implements slog.Handler.
func (l *llamaLog) WithGroup(name string) slog.Handler {
	return &llamaLog{l.Handler.WithGroup(name), l.lines}
}

// numbersOut takes the numbers of the phases that are known out of the record of a request, and returns them as lines.
func numbersOut(r slog.Record) (slog.Record, string) {
	numbers := map[string]float64{}
	r.Attrs(func(a slog.Attr) bool {
		switch v := a.Value; v.Kind() {
		case slog.KindInt64:
			numbers[a.Key] = float64(v.Int64())
		case slog.KindFloat64:
			numbers[a.Key] = v.Float64()
		}
		return true
	})
	var lines strings.Builder
	var totalMS, totalTokens float64
	phases := map[string]bool{}
	for _, p := range []struct{ member, title string }{{"prompt", "prompt eval time"}, {"predicted", "eval time"}} {
		tokens := numbers[p.member+"_n"]
		ms, ok := numbers[p.member+"_ms"]
		if !ok {
			continue
		}
		phases[p.member] = true
		totalMS, totalTokens = totalMS+ms, totalTokens+tokens
		fmt.Fprintf(&lines, "%16s = %10.2f ms / %5.0f tokens (%8.2f ms per token, %8.2f tokens per second)\n",
			p.title, ms, tokens, ratio(ms, tokens), ratio(1000*tokens, ms))
	}
	if len(phases) == 2 {
		fmt.Fprintf(&lines, "%16s = %10.2f ms / %5.0f tokens\n", "total time", totalMS, totalTokens)
	}
	rest := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool {
		for _, member := range []string{"_n", "_ms", "_per_second"} {
			if phase, ok := strings.CutSuffix(a.Key, member); ok && phases[phase] {
				return true
			}
		}
		rest.AddAttrs(a)
		return true
	})
	return rest, lines.String()
}

// ratio is 0 where there is nothing to divide by: no token, or no time for a single one.
func ratio(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

// Package timings is the model of what vllm-timings tells about a request: the figures, their arithmetic and JSON,
// where they come from, and how the sums of a metrics window are attributed to the requests that ended in it.
//
// It does no I/O and never asks the clock: times are given to it.
package timings

import (
	"math"
	"strconv"
	"time"
)

// Opt is a value that may be unknown, which is not the same as zero.
type Opt[T any] struct {
	Value T
	Known bool
}

// Some returns a known value.
func Some[T any](v T) Opt[T] { return Opt[T]{v, true} }

// Draft counts the tokens of speculative decoding.
type Draft struct {
	Proposed int // tokens that the draft proposed
	Accepted int // of those, tokens that the model accepted
}

// Usage is what an answer itself says about its tokens.
type Usage struct {
	Prompt     int      // prompt tokens, cached ones included
	Completion int      // generated tokens
	Cached     Opt[int] // prompt tokens taken from the prefix cache
}

// Phases are the two durations that an engine spends on a request. Queue time is in neither.
type Phases struct {
	Prefill Opt[time.Duration] // first scheduled to first token
	Decode  Opt[time.Duration] // first token to last token
}

// Figures are all that is known of one request when it ends.
type Figures struct {
	Usage
	Phases
	Draft     Opt[Draft]
	Source    Source
	Estimated bool // some member is an estimate, not the engine's own figure
}

// Useful reports whether the figures say more than the answer's usage already did. llama-swap shows a speed that is
// missing in `timings` as 0, and one of an answer without `timings` as unknown, so an object without any is worse than none.
func (f *Figures) Useful() bool { return f.Prefill.Known || f.Decode.Known }

// Computed returns the prompt tokens that were really computed: all of them where the cached ones are unknown.
func (f *Figures) Computed() int {
	if f.Cached.Known {
		return max(0, f.Prompt-f.Cached.Value)
	}
	return f.Prompt
}

// PromptPerSecond is the prefill speed in tokens/s.
func (f *Figures) PromptPerSecond() Opt[float64] { return rate(f.Computed(), f.Prefill) }

// PredictedPerSecond is the decode speed in tokens/s.
func (f *Figures) PredictedPerSecond() Opt[float64] { return rate(f.Completion, f.Decode) }

// rate returns n/d in 1/s. Nothing is divided by zero: an answer of one token has a decode time of 0 and the rate 0.
func rate(n int, d Opt[time.Duration]) Opt[float64] {
	if !d.Known {
		return Opt[float64]{}
	}
	if d.Value <= 0 {
		return Some(0.0)
	}
	return Some(float64(n) / d.Value.Seconds())
}

// AppendJSON appends the object that llama.cpp's server calls `timings`, with the members of its server_slot's
// result_timings in their order, and ours, `estimated`, where it is true. Unknown members are left out.
// Milliseconds and rates are rounded to three decimals; every number is finite.
func (f *Figures) AppendJSON(dst []byte) []byte {
	o := object{buf: append(dst, '{')}
	if f.Cached.Known {
		o.int("cache_n", f.Cached.Value)
	}
	o.int("prompt_n", f.Computed())
	o.phase("prompt", f.Computed(), f.Prefill)
	o.int("predicted_n", f.Completion)
	o.phase("predicted", f.Completion, f.Decode)
	if f.Draft.Known && f.Draft.Value.Proposed > 0 {
		o.int("draft_n", f.Draft.Value.Proposed)
		o.int("draft_n_accepted", f.Draft.Value.Accepted)
	}
	if f.Estimated {
		o.name("estimated")
		o.buf = append(o.buf, "true"...)
	}
	return append(o.buf, '}')
}

// object writes the members of a JSON object.
type object struct{ buf []byte }

func (o *object) name(parts ...string) {
	if o.buf[len(o.buf)-1] != '{' {
		o.buf = append(o.buf, ',')
	}
	o.buf = append(o.buf, '"')
	for _, p := range parts {
		o.buf = append(o.buf, p...)
	}
	o.buf = append(o.buf, '"', ':')
}

func (o *object) int(name string, n int) {
	o.name(name)
	o.buf = strconv.AppendInt(o.buf, int64(n), 10)
}

func (o *object) float(phase, member string, x float64) {
	o.name(phase, member)
	o.buf = strconv.AppendFloat(o.buf, math.Round(x*1000)/1000, 'f', -1, 64)
}

// phase writes the three members of one phase of n tokens that took d.
func (o *object) phase(name string, n int, d Opt[time.Duration]) {
	if !d.Known {
		return
	}
	ms := float64(d.Value) / float64(time.Millisecond)
	o.float(name, "_ms", ms)
	perToken := 0.0
	if n > 0 {
		perToken = ms / float64(n)
	}
	o.float(name, "_per_token_ms", perToken)
	o.float(name, "_per_second", rate(n, d).Value)
}

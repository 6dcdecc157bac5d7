//go:build unix

package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
)

// tolerance is how far a figure that is not marked as an estimate may be from vLLM's own, in ms: both are the same
// number, but the histograms' sums are differences of growing floating-point sums.
const tolerance = 0.01

const tableHead = `| lengths | source | at once | answers | requests | exact | largest error, ms | largest error, tokens | prefill within 10 % | decode within 1 % | estimated | no durations | prefill error p50, p95 | decode error p50, p95 | cached tokens unknown or wrong |
|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
`

const tableNotes = `exact: without ` + "`estimated`" + `; the two columns after it are the largest difference of these from vLLM's own figures in the same answer.
within: of all answers, exact ones included. estimated: marked so and with both durations; the errors are theirs, relative to vLLM's
own. no durations: ` + "`timings`" + ` without prefill or decode time, or none at all. The last column counts the answers that are not exact.
`

// nearPrefill and nearDecode are relative errors that are small.
const nearPrefill, nearDecode = 0.10, 0.01

// summary is one row.
type summary struct {
	requests, exact, estimated, withoutDurations int

	// Of the exact ones.
	maxMs     float64
	maxTokens int64
	// Of the estimated ones, relative.
	prefill, decode []float64
	cachedWrong     int
	// Of all.
	prefillNear, decodeNear int

	predictedWrong int // generated tokens are never an estimate
}

func summarise(results []result) summary {
	s := summary{requests: len(results)}
	for _, r := range results {
		s.add(r)
	}
	return s
}

func (s *summary) add(r result) {
	prompt, generated := r.usage.Get("prompt_tokens").Int(), r.usage.Get("completion_tokens").Int()
	cached := r.usage.Get("prompt_tokens_details.cached_tokens").Int() +
		r.usage.Get("hidden_tokens_details.cached_tokens").Int()
	prefill, decode := r.metrics.Get("time_to_first_token_ms").Float(), r.metrics.Get("generation_time_ms").Float()
	t := r.timings

	cachedOff := math.Abs(float64(t.Get("cache_n").Int() - cached))
	if !t.Get("cache_n").Exists() {
		cachedOff = math.Max(1, float64(cached)) // an exact answer knows it
	}
	if t.Exists() && t.Get("predicted_n").Int() != generated {
		s.predictedWrong++
	}
	s.prefillNear += near(t.Get("prompt_ms"), prefill, nearPrefill)
	s.decodeNear += near(t.Get("predicted_ms"), decode, nearDecode)
	durations := t.Get("prompt_ms").Exists() && t.Get("predicted_ms").Exists()
	if t.Exists() && !t.Get("estimated").Exists() {
		s.exact++
		if !durations {
			s.maxMs = math.Inf(1)
		}
		s.maxMs = max(s.maxMs, off(t.Get("prompt_ms"), prefill), off(t.Get("predicted_ms"), decode))
		s.maxTokens = max(s.maxTokens, int64(cachedOff),
			abs(t.Get("prompt_n").Int()-(prompt-cached)), abs(t.Get("predicted_n").Int()-generated))
		return
	}
	if cachedOff != 0 {
		s.cachedWrong++
	}
	if !durations {
		s.withoutDurations++
		return
	}
	s.estimated++
	if prefill > 0 {
		s.prefill = append(s.prefill, off(t.Get("prompt_ms"), prefill)/prefill)
	}
	if decode > 0 {
		s.decode = append(s.decode, off(t.Get("predicted_ms"), decode)/decode)
	}
}

// correct reports whether everything that claims to be exact is.
func (s *summary) correct() bool {
	return s.maxMs <= tolerance && s.maxTokens == 0 && s.predictedWrong == 0
}

// near is 1 if got is there and no farther from want than the limit tells, else 0.
func near(got gjson.Result, want, limit float64) int {
	if got.Exists() && off(got, want) <= max(tolerance, limit*want) {
		return 1
	}
	return 0
}

func (s *summary) row(r row) string {
	maxMs, maxTokens := "-", "-"
	if s.exact > 0 {
		maxMs, maxTokens = fmt.Sprintf("%.4f", s.maxMs), fmt.Sprint(s.maxTokens)
	}
	if s.predictedWrong > 0 {
		maxTokens += fmt.Sprintf(" (predicted_n wrong in %d)", s.predictedWrong)
	}
	columns := []string{
		r.lengths, r.source, r.atOnce(), r.answers, fmt.Sprint(s.requests), s.share(s.exact), maxMs, maxTokens,
		s.share(s.prefillNear), s.share(s.decodeNear), s.share(s.estimated), s.share(s.withoutDurations),
		quantiles(s.prefill), quantiles(s.decode), fmt.Sprint(s.cachedWrong),
	}
	return "| " + strings.Join(columns, " | ") + " |\n"
}

func (s *summary) share(n int) string {
	return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(s.requests))
}

// quantiles gives the median and the 95th percentile of relative errors, in percent.
func quantiles(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	slices.Sort(v)
	at := func(q float64) float64 { return 100 * v[min(len(v)-1, int(q*float64(len(v))))] }
	return fmt.Sprintf("%.2f %%, %.2f %%", at(0.5), at(0.95))
}

func off(got gjson.Result, want float64) float64 { return math.Abs(got.Float() - want) }

func abs(n int64) int64 { return max(n, -n) }

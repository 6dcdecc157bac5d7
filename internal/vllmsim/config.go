package vllmsim

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// Config says how a simulated vLLM is set up. It is read once, by [New].
// Numbers and strings left at zero get the values of [Default]; switches keep
// the value they have.
type Config struct {
	// Version is the vLLM version whose answers are imitated, such as
	// "0.32.0". Versions below 0.16 answer like 0.11.2, those below 0.25 like
	// 0.19.1, all others like 0.32.0.
	Version string

	// Models are the served model names. The first one is the model_name label
	// on /metrics, whatever name a request used.
	Models []string

	// PrefillTokensPerSecond is the speed at which a request's uncached prompt
	// tokens are computed. Requests do not slow one another down. A negative
	// number means that prefill takes no time.
	PrefillTokensPerSecond float64

	// DecodeStep is the duration of an engine step: every running request gets
	// one token a step. A negative number means steps without pause; then a
	// streamed answer is at most [maxLead] tokens ahead of what was written.
	DecodeStep time.Duration

	// MaxRunning is the number of requests that run at once; others queue.
	MaxRunning int

	// PrefixCacheBlock is the number of tokens in a block of the prefix cache.
	PrefixCacheBlock int

	// MaxModelLen is the largest number of prompt and completion tokens.
	MaxModelLen int

	// PerRequestMetrics puts `metrics` into answers, as
	// --enable-per-request-metrics does. Versions below 0.25 ignore it.
	PerRequestMetrics bool

	// PromptTokensDetails puts prompt_tokens_details into usage, as
	// --enable-prompt-tokens-details does.
	PromptTokensDetails bool

	// ForceIncludeUsage sends usage in every stream, as
	// --enable-force-include-usage does.
	ForceIncludeUsage bool

	// DisableLogStats leaves out every vllm: sample on /metrics, as
	// --disable-log-stats does.
	DisableLogStats bool

	// FilteredMetrics makes /metrics/?name[]=... answer only the samples with
	// these names, as prometheus_client >= 0.23.1 does. Without it the whole
	// page is answered.
	FilteredMetrics bool

	// APIKey, when not empty, is asked for (as a bearer token) below /v1.
	APIKey string

	// DevMode serves /sleep, /wake_up, /is_sleeping and a few more, as
	// VLLM_SERVER_DEV_MODE=1 does.
	DevMode bool

	// SleepMode is --enable-sleep-mode. Without it vLLM seems to sleep, and
	// keeps its memory.
	SleepMode bool

	// WakeTime is how long /wake_up takes.
	WakeTime time.Duration

	// OnEnd, when set, is called once for each engine request that ends. See
	// [Record]. It runs inside the engine: it must be quick, and must not call
	// the [Sim].
	OnEnd func(Record)
}

// Default returns the setup of a vLLM of today without special flags:
// 10,000 prompt tokens per second, 20 ms a step.
func Default() Config {
	return Config{
		Version:                "0.32.0",
		Models:                 []string{"tiny"},
		PrefillTokensPerSecond: 10_000,
		DecodeStep:             20 * time.Millisecond,
		MaxRunning:             1024,
		PrefixCacheBlock:       16,
		MaxModelLen:            32_768,
		FilteredMetrics:        true,
	}
}

// withDefaults fills what was left at zero.
func (c Config) withDefaults() Config {
	d := Default()
	if c.Version == "" {
		c.Version = d.Version
	}
	if len(c.Models) == 0 {
		c.Models = d.Models
	}
	if c.PrefillTokensPerSecond == 0 {
		c.PrefillTokensPerSecond = d.PrefillTokensPerSecond
	}
	if c.DecodeStep == 0 {
		c.DecodeStep = d.DecodeStep
	}
	if c.MaxRunning <= 0 {
		c.MaxRunning = d.MaxRunning
	}
	if c.PrefixCacheBlock <= 0 {
		c.PrefixCacheBlock = d.PrefixCacheBlock
	}
	if c.MaxModelLen <= 0 {
		c.MaxModelLen = d.MaxModelLen
	}
	return c
}

// prefillTime is how long computing n prompt tokens takes.
func (c *Config) prefillTime(n int) time.Duration {
	if c.PrefillTokensPerSecond < 0 || math.IsInf(c.PrefillTokensPerSecond, 1) {
		return 0
	}
	return time.Duration(float64(n) / c.PrefillTokensPerSecond * float64(time.Second))
}

// era is a range of versions whose answers look alike.
type era int

const (
	era011 era = iota // up to 0.15, recorded with 0.11.2
	era019            // up to 0.24, recorded with 0.19.1
	era032            // recorded with 0.32.0
)

// eraOf returns the era of a version. What cannot be read counts as new.
func eraOf(version string) era {
	majorText, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minorText, _, _ := strings.Cut(rest, ".")
	major, err1 := strconv.Atoi(majorText)
	minor, err2 := strconv.Atoi(minorText)
	switch {
	case err1 != nil || err2 != nil || major > 0 || minor >= 25:
		return era032
	case minor >= 16:
		return era019
	default:
		return era011
	}
}

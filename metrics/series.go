package metrics

import "time"

// Series is one engine's cumulative figures at one reading. vLLM has one per
// engine (data parallel rank) and served model. The histograms behind it move
// only when a request finishes; the counters (prefix cache, generated tokens,
// drafts) move while requests run.
type Series struct {
	// Key is the engine and model_name labels as vLLM wrote them, stable
	// between readings: `engine="0",model_name="tiny"`.
	Key string

	// Count is how many requests have finished:
	// vllm:request_prefill_time_seconds_count.
	Count float64

	// Prefill and Decode are seconds summed over the finished requests:
	// first scheduled to first token, first token to last token.
	Prefill, Decode float64
	// Queue is the seconds that finished requests waited to be scheduled.
	Queue    float64
	HasQueue bool

	// PromptTokens and GenerationTokens are summed over the finished requests.
	// Cached prompt tokens are in PromptTokens.
	PromptTokens, GenerationTokens float64

	// ComputedTokens are the prompt tokens of finished requests that were
	// really computed, so PromptTokens - ComputedTokens came from the prefix
	// cache. vLLM 0.11.2 lacks the family, 0.16 has it.
	ComputedTokens float64
	HasComputed    bool

	// Running is how many requests were in the engine's last step.
	Running    float64
	HasRunning bool

	// PrefixQueries and PrefixHits are prompt tokens looked up and found in the
	// prefix cache. They move when a request is scheduled, not when it finishes.
	PrefixQueries, PrefixHits float64
	HasPrefixCache            bool

	// Generated counts tokens with every engine step:
	// vllm:generation_tokens_total.
	Generated    float64
	HasGenerated bool

	// DraftTokens and AcceptedTokens are those of speculative decoding. They
	// move with every engine step. vLLM has the families only when it
	// speculates.
	DraftTokens, AcceptedTokens float64
	HasDraft                    bool

	// Consistent is true when all the _count samples of this series are equal.
	// A page that is merged over API server processes is read file by file
	// while they write, and can show a request in one histogram and not yet in
	// the next; differences from such a page mean nothing.
	Consistent bool
}

// Reading is what one answer of /metrics said. Whoever gets one shares it:
// it is not to be changed.
type Reading struct {
	// Began is when the request for the page was sent, Ended when the page had
	// been read whole. The figures are those of some instant between them.
	Began, Ended time.Time

	// ProcessStart is process_start_time_seconds, in seconds since 1970. It is
	// 0 when the page lacks it: one merged over several processes does.
	ProcessStart float64

	// Series are sorted by Key.
	Series []Series
}

// Duration is how long the page took.
func (r Reading) Duration() time.Duration { return r.Ended.Sub(r.Began) }

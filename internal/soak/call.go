package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// fate is what becomes of a request.
type fate int

const (
	ends   fate = iota // it is answered
	leaves             // its client leaves before it is
	dies               // vLLM's connection breaks off in the midst of its answer
)

// fewest and most tokens of an answer.
const (
	fewest = 8
	most   = 72
)

// kind is an endpoint.
type kind struct {
	path string
	body string // with the text of the prompt and the number of tokens
	// openAI: an answer in events ends with [DONE], and has usage where it was asked for.
	openAI bool
	// Where events have things.
	token, last, usage string
	// Where a whole answer has its text and, for the prompt, its counts: they are added up.
	text, predicted string
	prompt          []string
}

var kinds = []kind{chatKind("/v1/chat/completions"), chatKind("/invocations"), {
	path: "/v1/completions", body: `{"model":"tiny","prompt":%q,"max_tokens":%d,"ignore_eos":true`,
	openAI: true, token: "choices.0.text", usage: "usage",
	text: "choices.0.text", predicted: "completion_tokens", prompt: []string{"prompt_tokens"},
}, {
	path: "/v1/messages", body: `{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":%d`,
	token: "delta.text", last: "message_delta", usage: "usage",
	text: "content.0.text", predicted: "output_tokens", prompt: []string{"input_tokens", "cache_read_input_tokens"},
}, {
	path: "/v1/responses", body: `{"model":"tiny","input":%q,"max_output_tokens":%d`,
	token: "delta", last: "response.completed", usage: "response.usage",
	text: "output.0.content.0.text", predicted: "output_tokens", prompt: []string{"input_tokens"},
}}

func chatKind(path string) kind {
	return kind{
		path: path, body: `{"model":"tiny","messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true`,
		openAI: true, token: "choices.0.delta.content", usage: "usage",
		text: "choices.0.message.content", predicted: "completion_tokens", prompt: []string{"prompt_tokens"},
	}
}

// longestPrompt is more than the tokens of any prompt.
const longestPrompt = 400

// call is a request.
type call struct {
	*kind
	stream bool
	usage  bool // asked for
	tokens int
	prompt string
	fate   fate
	after  int // events, or steps of a whole answer, until its fate comes
}

// shortest is how long vLLM takes for the whole answer at least: it makes a token a step, and the first may come at once.
func (c *call) shortest() time.Duration { return time.Duration(c.tokens-1) * step }

// newCall makes up a request: three of four are streams, one of a hundred clients leaves, one of a hundred answers breaks.
func newCall(r *rand.Rand) *call {
	c := &call{
		kind:   &kinds[r.IntN(len(kinds))],
		stream: r.IntN(4) > 0,
		tokens: fewest + r.IntN(most-fewest+1),
		// Of some prompts the beginning is in the cache.
		prompt: strings.Repeat(fmt.Sprintf("common beginning %d ", r.IntN(8)), 20+r.IntN(20)) + fmt.Sprint("and ", r.Uint64()),
	}
	c.usage = c.stream && c.openAI && r.IntN(2) == 0
	switch n := r.IntN(100); {
	case n == 0:
		// Early enough that the answer is far from its end.
		c.fate, c.after = leaves, r.IntN(c.tokens/2)
		c.tokens = max(c.tokens, most/2)
	case n == 1:
		c.fate, c.after = dies, 1
		if c.stream {
			c.after += r.IntN(c.tokens)
		}
	}
	return c
}

func (c *call) request() string {
	body := fmt.Sprintf(c.body, c.prompt, c.tokens)
	if c.stream {
		body += `,"stream":true`
	}
	if c.usage {
		body += `,"stream_options":{"include_usage":true}`
	}
	return body + "}"
}

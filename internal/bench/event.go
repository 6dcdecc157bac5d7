package main

import (
	"bytes"
	"fmt"
	"strconv"
	"time"
)

// The answers are those of vLLM 0.32.0 (started with --enable-per-request-metrics --enable-prompt-tokens-details), with
// the time of sending as the text of a token, so that whoever receives it knows how long it took.
const (
	model   = "Qwen/Qwen3-30B-A3B-Instruct-2507"
	opening = `data: {"id":"chatcmpl-99050f283ac062f2","object":"chat.completion.chunk","created":1795962720,"model":"` + model + `","choices":[`
	figures = `"metrics":{"time_to_first_token_ms":6.9902350001029845,"generation_time_ms":22.41016299990406,"queue_time_ms":0.016340000001946464,"mean_itl_ms":4.482032599980812,"tokens_per_second":204.078869952664}`

	streamHead = "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:31:59 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	jsonHead   = "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:31:59 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
	// promptTokens and wholeTokens are what usage tells of each request, and of an answer that is no stream.
	promptTokens = 16
	wholeTokens  = 6
	// stampWidth is that of nanoseconds since 1970.
	stampWidth = 19
)

var (
	roleEvent   = chunk(opening + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}` + "\n\n")
	finishEvent = chunk(opening + `{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}` + "\n\n")
	doneEvent   = chunk("data: [DONE]\n\n")
	lastChunk   = []byte("0\r\n\r\n")
	// stampKey comes before the time, in whatever order a proxy that makes its own events puts what is around it.
	stampKey = []byte(`"content":"`)
)

// chunk frames s as HTTP/1.1 does. uvicorn sends each event as a chunk of its own.
func chunk(s string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(s), s) }

// token is the event of a token and where in it the time stands.
type token struct {
	bytes []byte
	at    int
}

func newToken() token {
	b := chunk(opening + `{"index":0,"delta":{` + string(stampKey) + string(bytes.Repeat([]byte("0"), stampWidth)) + `"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	return token{b, bytes.Index(b, stampKey) + len(stampKey)}
}

// stamped returns the event as it is to be sent now. It is valid until the next call.
func (t *token) stamped() []byte {
	strconv.AppendInt(t.bytes[t.at:t.at], time.Now().UnixNano(), 10)
	return t.bytes
}

// stampOf returns the time in an event, false if it is not that of a token.
func stampOf(event []byte) (int64, bool) {
	at := bytes.Index(event, stampKey)
	if at < 0 || len(event) < at+len(stampKey)+stampWidth {
		return 0, false
	}
	var v int64
	for _, c := range event[at+len(stampKey):][:stampWidth] {
		if c < '0' || c > '9' {
			return 0, false
		}
		v = 10*v + int64(c-'0')
	}
	return v, true
}

// usageEvent is what follows the finish event where usage was asked for. Bare is that of a vLLM without flags.
func usageEvent(tokens int, bare bool) []byte {
	details, more := `,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}`, ","+figures
	if bare {
		details, more = "", ""
	}
	return chunk(fmt.Sprintf(`%s],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%s},"system_fingerprint":"vllm-0.32.0-ab8ff72c"%s}`,
		opening, promptTokens, promptTokens+tokens, tokens, details, more) + "\n\n")
}

// jsonAnswer returns a whole answer whose body has size bytes, or as few as it can have. text is how many of them are text,
// which every proxy leaves as it is.
func jsonAnswer(size int, bare bool) (answer []byte, text int) {
	const before = `{"id":"chatcmpl-b55a23ae89a07490","object":"chat.completion","created":1795962719,"model":"` + model + `","choices":[{"index":0,"message":{"role":"assistant","content":"`
	details, more := `{"cached_tokens":0,"created_cache_tokens":0,"multimodal_tokens":null}`, ","+figures
	if bare {
		details, more = "null", ""
	}
	after := fmt.Sprintf(`","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-ab8ff72c","usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%s,"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null%s}`,
		promptTokens, promptTokens+wholeTokens, wholeTokens, details, more)
	text = max(0, size-len(before)-len(after))
	body := before + string(bytes.Repeat([]byte("word "), text/5+1)[:text]) + after
	return append(fmt.Appendf(nil, jsonHead, len(body)), body...), text
}

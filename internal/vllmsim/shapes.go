package vllmsim

import (
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"strings"
)

// answerID is the id of an answer. A client can choose what comes after the
// prefix, by header or in the body.
func (s *Sim) answerID(k kind, header, body string) string {
	prefix := "chatcmpl-"
	if k == kindText {
		prefix = "cmpl-"
	}
	switch {
	case header != "":
		return prefix + header
	case body != "":
		return prefix + body
	}
	return prefix + s.randomHex()
}

// randomHex is a random id, of the length that the version uses.
func (s *Sim) randomHex() string {
	const digits = "0123456789abcdef"
	b := make([]byte, 16)
	if s.era == era011 {
		b = make([]byte, 32)
	}
	for i := range b {
		b[i] = digits[rand.IntN(len(digits))]
	}
	return string(b)
}

// quote is JSON's form of a string, as vLLM writes it: without HTML escapes.
func quote(text string) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(text) // a string cannot fail
	return strings.TrimSuffix(b.String(), "\n")
}

// fingerprint is the system_fingerprint of the version, as JSON.
func (s *Sim) fingerprint() string {
	if s.era == era032 {
		return `"vllm-` + s.cfg.Version + `-ab8ff72c"`
	}
	return "null"
}

// usage counts an answer's tokens: each prompt once, all choices.
type usage struct{ prompt, completion, cached, created int }

func (u usage) counts() string {
	return `"prompt_tokens":` + strconv.Itoa(u.prompt) +
		`,"total_tokens":` + strconv.Itoa(u.prompt+u.completion) +
		`,"completion_tokens":` + strconv.Itoa(u.completion)
}

// cachedDetail is the first member of prompt_tokens_details, if they are to be
// shown: old versions show them only when something was cached.
func (s *Sim) cachedDetail(u usage) (detail string, ok bool) {
	if !s.cfg.PromptTokensDetails || s.era != era032 && u.cached == 0 {
		return "", false
	}
	return `"cached_tokens":` + strconv.Itoa(u.cached), true
}

// jsonUsage is the usage of an answer that is not streamed.
func (s *Sim) jsonUsage(k kind, u usage) string {
	details := "null"
	if d, ok := s.cachedDetail(u); ok {
		details = "{" + d + "}"
		if s.era == era032 {
			created := "null"
			if k == kindChat {
				created = strconv.Itoa(u.created)
			}
			details = "{" + d + `,"created_cache_tokens":` + created + `,"multimodal_tokens":null}`
		}
	}
	text := "{" + u.counts() + `,"prompt_tokens_details":` + details
	if s.era == era032 {
		text += `,"completion_tokens_details":null`
	}
	return text + "}"
}

// streamUsage is the usage of the last event of a stream.
func (s *Sim) streamUsage(k kind, u usage) string {
	text := "{" + u.counts()
	if d, ok := s.cachedDetail(u); ok {
		if s.era == era032 && k == kindChat {
			d += `,"created_cache_tokens":` + strconv.Itoa(u.created)
		}
		text += `,"prompt_tokens_details":{` + d + "}"
	}
	return text + "}"
}

// metricsJSON is `metrics` of a request; ok is false when there is none. In a
// stream, members without a value are left out; else they are null.
func (s *Sim) metricsJSON(reqs []*request, streamed bool) (text string, ok bool) {
	if !s.cfg.PerRequestMetrics || s.era != era032 || len(reqs) != 1 {
		return "", false
	}
	r := reqs[0]
	ms := func(seconds float64) string { return pyFloat(seconds * 1e3) }
	prefill := r.firstToken.Sub(r.scheduled).Seconds()
	decode := r.lastToken.Sub(r.firstToken).Seconds()
	n := float64(r.produced.Load())

	text = `{"time_to_first_token_ms":` + ms(prefill) +
		`,"generation_time_ms":` + ms(decode) +
		`,"queue_time_ms":` + ms(r.scheduled.Sub(r.queued).Seconds())
	optional := func(name, value string, ok bool) {
		if !ok && !streamed {
			value, ok = "null", true
		}
		if ok {
			text += `,"` + name + `":` + value
		}
	}
	optional("mean_itl_ms", ms(decode/max(1, n-1)), n > 1)
	total := prefill + decode
	optional("tokens_per_second", pyFloat(n/max(total, 1e-9)), total > 0)
	optional("speculative_decoding", "", false)
	return text + "}", true
}

// jsonAnswer is the body of an answer that is not streamed. texts are the
// choices' texts, in JSON's form.
func (s *Sim) jsonAnswer(c *call, created int64, reqs []*request, texts []string, u usage) []byte {
	var b strings.Builder
	object := "chat.completion"
	if c.kind == kindText {
		object = "text_completion"
	}
	b.WriteString(`{"id":` + quote(c.id) + `,"object":"` + object + `","created":` + strconv.FormatInt(created, 10) +
		`,"model":` + quote(c.model) + `,"choices":[`)
	for i, r := range reqs {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(`{"index":` + strconv.Itoa(r.index))
		if c.kind == kindChat {
			b.WriteString(`,"message":{"role":"assistant","content":` + texts[i] +
				`,"refusal":null,"annotations":null,"audio":null,"function_call":null` +
				[...]string{`,"tool_calls":[],"reasoning":null,"reasoning_content":null`, `,"tool_calls":[],"reasoning":null`, `,"reasoning":null`}[s.era] + `}`)
		} else {
			b.WriteString(`,"text":` + texts[i])
		}
		b.WriteString(`,"logprobs":null,"finish_reason":"` + r.reason + `","stop_reason":null,"token_ids":null`)
		if c.kind == kindText {
			b.WriteString(`,"prompt_logprobs":null,"prompt_token_ids":null`)
		}
		if s.era == era032 {
			b.WriteString(`,"routed_experts":null`)
		}
		b.WriteByte('}')
	}
	b.WriteString(`],"service_tier":null,"system_fingerprint":` + s.fingerprint() + `,"usage":` + s.jsonUsage(c.kind, u))
	if c.kind == kindChat {
		b.WriteString(`,"prompt_logprobs":null,"prompt_token_ids":null`)
		if s.era == era032 {
			b.WriteString(`,"prompt_text":null`)
		}
	}
	b.WriteString(`,"kv_transfer_params":null`)
	if s.era == era032 {
		metrics, ok := s.metricsJSON(reqs, false)
		if !ok {
			metrics = "null"
		}
		b.WriteString(`,"ec_transfer_params":null,"metrics":` + metrics)
	}
	b.WriteByte('}')
	return []byte(b.String())
}

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/tidwall/gjson"
)

// dialect is an answer of the simulated vLLM, which knows only OpenAI's older endpoints, on its way into the form of another
// endpoint. The simulated vLLM writes each event, and each whole answer, at once.
type dialect struct {
	http.ResponseWriter
	turns interface {
		ask(body []byte) string          // the request that the simulated vLLM gets
		whole(chat gjson.Result) string  // the whole answer for a whole answer
		event(chat gjson.Result) []entry // the events for an event
		done() []entry                   // those at the end
	}
}

// entry is an event with its name.
type entry struct{ name, data string }

// Unwrap is for http.ResponseController.
func (d *dialect) Unwrap() http.ResponseWriter { return d.ResponseWriter }

var (
	dataField = []byte("data: ")
	doneData  = []byte("[DONE]")
)

func (d *dialect) Write(p []byte) (int, error) {
	data, isEvent := bytes.CutPrefix(bytes.TrimSpace(p), dataField)
	var out []byte
	switch {
	case !isEvent && gjson.GetBytes(p, "error").Exists():
		out = p
	case !isEvent:
		out = []byte(d.turns.whole(gjson.ParseBytes(p)))
		d.Header().Set("Content-Length", strconv.Itoa(len(out)))
	default:
		var entries []entry
		if bytes.Equal(data, doneData) {
			entries = d.turns.done()
		} else {
			entries = d.turns.event(gjson.ParseBytes(data))
		}
		for _, e := range entries {
			out = fmt.Appendf(out, "event: %s\ndata: %s\n\n", e.name, e.data)
		}
	}
	if len(out) == 0 {
		return len(p), nil
	}
	if _, err := d.ResponseWriter.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// asked is a chat request. Usage in each event tells the length of the prompt from the beginning.
func asked(text, tokens string, stream bool) string {
	options := ""
	if stream {
		options = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`
	}
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%s}],"max_tokens":%s,"ignore_eos":true%s}`, text, tokens, options)
}

// cachedOf returns the cached tokens in a usage, if it tells them.
func cachedOf(usage gjson.Result) (int64, bool) {
	cached := usage.Get("prompt_tokens_details.cached_tokens")
	return cached.Int(), cached.Type == gjson.Number
}

func quoted(s string) string {
	b, _ := json.Marshal(s) // a string cannot fail
	return string(b)
}

// messagesTurns is /v1/messages.
type messagesTurns struct{}

func (messagesTurns) ask(body []byte) string {
	r := gjson.ParseBytes(body)
	return asked(r.Get("messages.0.content").Raw, r.Get("max_tokens").Raw, r.Get("stream").Bool())
}

func (messagesTurns) usage(u gjson.Result) string {
	cached, known := cachedOf(u)
	s := fmt.Sprintf(`"input_tokens":%d,"output_tokens":%d`, u.Get("prompt_tokens").Int()-cached, u.Get("completion_tokens").Int())
	if known {
		s += fmt.Sprintf(`,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d`, cached)
	}
	return `{` + s + `}`
}

func (m messagesTurns) whole(chat gjson.Result) string {
	return fmt.Sprintf(`{"id":%s,"type":"message","role":"assistant","content":[{"type":"text","text":%s}],"model":"tiny","stop_reason":"max_tokens","usage":%s}`,
		chat.Get("id").Raw, chat.Get("choices.0.message.content").Raw, m.usage(chat.Get("usage")))
}

func (m messagesTurns) event(chat gjson.Result) []entry {
	delta := chat.Get("choices.0.delta")
	switch {
	case delta.Get("role").Exists():
		return []entry{
			{"message_start", fmt.Sprintf(`{"type":"message_start","message":{"id":%s,"type":"message","role":"assistant","content":[],"model":"tiny","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":0}}}`,
				chat.Get("id").Raw, chat.Get("usage.prompt_tokens").Int())},
			{"content_block_start", `{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}`},
		}
	case delta.Exists():
		return []entry{{"content_block_delta", fmt.Sprintf(`{"type":"content_block_delta","delta":{"type":"text_delta","text":%s},"index":0}`, delta.Get("content").Raw)}}
	}
	return []entry{
		{"content_block_stop", `{"type":"content_block_stop","index":0}`},
		{"message_delta", fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":%s}`, m.usage(chat.Get("usage")))},
	}
}

func (messagesTurns) done() []entry { return []entry{{"message_stop", `{"type":"message_stop"}`}} }

// responsesTurns is /v1/responses.
type responsesTurns struct {
	number int
	text   []byte
}

func (*responsesTurns) ask(body []byte) string {
	r := gjson.ParseBytes(body)
	return asked(r.Get("input").Raw, r.Get("max_output_tokens").Raw, r.Get("stream").Bool())
}

// response is the object in the answer: without usage while it is under way.
func (*responsesTurns) response(chat gjson.Result, text string, finished bool) string {
	status, usage, output, metrics := "in_progress", "null", "", ""
	if finished {
		u := chat.Get("usage")
		status = "incomplete"
		details := ""
		if cached, known := cachedOf(u); known {
			details = fmt.Sprintf(`"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},`, cached)
		}
		usage = fmt.Sprintf(`{"input_tokens":%d,%s"output_tokens":%d,"total_tokens":%d}`,
			u.Get("prompt_tokens").Int(), details, u.Get("completion_tokens").Int(), u.Get("total_tokens").Int())
		output = `{"id":"msg_1","content":[{"annotations":[],"text":` + text + `,"type":"output_text","logprobs":null}],"role":"assistant","status":"completed","type":"message"}`
		if m := chat.Get("metrics"); m.Exists() {
			metrics = `,"metrics":` + m.Raw
		}
	}
	return fmt.Sprintf(`{"id":%s,"object":"response","model":"tiny","background":false,"status":"%s","output":[%s],"usage":%s%s}`,
		chat.Get("id").Raw, status, output, usage, metrics)
}

func (r *responsesTurns) whole(chat gjson.Result) string {
	return r.response(chat, chat.Get("choices.0.message.content").Raw, true)
}

// entry makes an event, which has a number.
func (r *responsesTurns) entry(name, members string) entry {
	e := entry{name, fmt.Sprintf(`{%s,"sequence_number":%d,"type":"%s"}`, members, r.number, name)}
	r.number++
	return e
}

func (r *responsesTurns) event(chat gjson.Result) []entry {
	delta := chat.Get("choices.0.delta")
	switch {
	case delta.Get("role").Exists():
		begun := `"response":` + r.response(chat, "", false)
		return []entry{
			r.entry("response.created", begun),
			r.entry("response.in_progress", begun),
			r.entry("response.output_item.added", `"item":{"id":"msg_1","content":[],"role":"assistant","status":"in_progress","type":"message"},"output_index":0`),
			r.entry("response.content_part.added", `"content_index":0,"item_id":"msg_1","output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]}`),
		}
	case delta.Exists():
		r.text = append(r.text, delta.Get("content").Str...)
		return []entry{r.entry("response.output_text.delta", `"content_index":0,"delta":`+delta.Get("content").Raw+`,"item_id":"msg_1","logprobs":[],"output_index":0`)}
	}
	text := quoted(string(r.text))
	return []entry{
		r.entry("response.output_text.done", `"content_index":0,"item_id":"msg_1","logprobs":[],"output_index":0,"text":`+text),
		r.entry("response.completed", `"response":`+r.response(chat, text, true)),
	}
}

func (*responsesTurns) done() []entry { return nil }

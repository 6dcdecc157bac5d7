package proxy

import (
	"strings"

	"github.com/tidwall/gjson"
)

// dialect is the form of an answer.
type dialect int

const (
	unknownDialect     dialect = iota
	chatDialect                // OpenAI chat completions
	completionsDialect         // OpenAI text completions
	responsesDialect           // OpenAI responses
	messagesDialect            // Anthropic messages
)

// options reports whether requests of d have `stream_options`, without which no usage comes in a stream, and, as in
// llama.cpp, `timings_per_token`.
func (d dialect) options() bool { return d == chatDialect || d == completionsDialect }

// facts are what one event of a streamed answer says.
type facts struct {
	token   bool // it has generated output, if only that of a token that has no text yet
	finish  bool // it says why generation ended
	usage   bool // it has usage
	last    bool // it is there to tell the usage of the whole answer: timings go here, if the client sees it
	several bool // it is of one of several choices
	failed  bool // it says that generation failed
}

// facts reads an event, and keeps what it says about the answer.
func (ex *exchange) facts(o *object) facts {
	ex.upstreamTimings = ex.upstreamTimings || o.has("timings")
	switch ex.dialect {
	case responsesDialect:
		return ex.responsesFacts(o)
	case messagesDialect:
		return ex.messagesFacts(o)
	}
	choices := o.result("choices")
	choice := choices.Get("0")
	f := facts{
		finish:  choice.Get("finish_reason").Type == gjson.String,
		usage:   ex.readUsage(o.result("usage"), o.result("metrics")),
		several: choices.Get("1").Exists() || choice.Get("index").Int() > 0,
		failed:  o.has("error"),
	}
	f.last = f.usage && !choice.Exists()
	f.token = f.finish || ex.isToken(choice)
	return f
}

// isToken reports whether choice has output. The event that opens a chat answer with its role has none, nor has the one
// that repeats the prompt for `echo`.
func (ex *exchange) isToken(choice gjson.Result) bool {
	if choice.Get("text").Exists() {
		return true
	}
	output, text := false, ""
	delta := choice.Get("delta")
	opening := delta.Get("role").Exists()
	delta.ForEach(func(key, value gjson.Result) bool {
		switch key.Str {
		case "content", "reasoning", "reasoning_content":
			output = output || value.Type == gjson.String && (value.Str != "" || !opening)
			text += value.Str
		case "tool_calls":
			output = output || value.Get("0").Exists()
		case "function_call":
			output = output || value.IsObject()
		}
		return true
	})
	if output && ex.echo != "" && text == ex.echo {
		ex.echo = ""
		return false
	}
	return output
}

// responsesFacts reads an event of the Responses API. Its last carries the whole response, as its first does.
func (ex *exchange) responsesFacts(o *object) (f facts) {
	switch kind := o.result("type").Str; {
	case kind == "response.completed" || kind == "response.incomplete":
		response := o.result("response")
		f.usage = ex.readUsage(response.Get("usage"), response.Get("metrics"))
		f.token, f.finish, f.last = true, true, f.usage
	case kind == "response.failed" || kind == "error":
		f.failed = true
	case kind == "response.output_item.added":
		f.token = o.result("item").Get("type").Str == "function_call" // its name is generated
	case strings.HasSuffix(kind, ".delta"):
		f.token = true
	}
	return f
}

// messagesFacts reads an event of the Anthropic API. Usage comes twice: what is known at the start, and all at the end.
func (ex *exchange) messagesFacts(o *object) (f facts) {
	switch o.result("type").Str {
	case "content_block_delta":
		f.token = true
	case "content_block_start":
		f.token = o.result("content_block").Get("type").Str == "tool_use" // its name is generated
	case "message_delta":
		f.usage = ex.readUsage(o.result("usage"), gjson.Result{})
		f.token, f.finish, f.last = true, true, f.usage
	case "error":
		f.failed = true
	}
	return f
}

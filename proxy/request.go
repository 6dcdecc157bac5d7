package proxy

import (
	"bytes"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/sse"
)

// plan is what a request asks for, as far as it matters here, and what of that is changed on the way to vLLM.
type plan struct {
	endpoint endpoint
	dialect  dialect
	known    bool // the body was understood; nothing is edited otherwise, in either direction
	model    string
	stream   bool
	// single is true when one engine request answers it: one choice of one prompt. vLLM's figures, its own per-request
	// metrics among them, mean nothing for several.
	single bool
	// showUsage is true when vLLM's usage event is for the client to see: it asked for it, or vLLM shows it unasked.
	showUsage bool
	// askedRunning is true when usage is asked for in the events of tokens too, ownRunning when it is only for us.
	askedRunning, ownRunning bool
	// perToken is true when every event with output is to carry timings.
	perToken bool
	// nullUsage is true when straight vLLM would have sent `"usage":null` where usage is hidden.
	nullUsage bool
	// echo is the text that a chat answer repeats before its first token, "" if none.
	echo string
}

// maxGrow bounds the memory, in bytes, that a body gets for the length that it is said to have, before any of it is there.
const maxGrow = 1 << 20

// readBody reads up to limit bytes of a request's body. Where there is more, rest is what follows.
func readBody(r *http.Request, limit int64) (body []byte, rest io.ReadCloser, err error) {
	if r.ContentLength > limit {
		return nil, r.Body, nil
	}
	var buf bytes.Buffer
	if r.ContentLength > 0 {
		buf.Grow(int(min(r.ContentLength, maxGrow)) + bytes.MinRead)
	}
	n, err := buf.ReadFrom(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		return nil, nil, err
	case n > limit:
		return nil, struct {
			io.Reader
			io.Closer
		}{io.MultiReader(&buf, r.Body), r.Body}, nil
	}
	return buf.Bytes(), nil, nil
}

// usageDefault says whether vLLM takes `stream_options` without `include_usage` for true: until 0.17, not from 0.18 on.
type usageDefault int

const (
	usageDefaultUnknown usageDefault = iota
	usageDefaultTrue
	usageDefaultFalse
)

// quirks are what differs between versions of vLLM.
type quirks struct {
	omitted usageDefault
	// nullUsage: the events of a streamed text completion that have no usage say so, with `"usage":null` (until 0.20).
	nullUsage bool
}

// planRequest reads the body of a request and returns it as it is to be sent, in the same memory where that has room. The
// body is not changed where any of the members that matter is not as vLLM's API defines it: the error is vLLM's to give.
func planRequest(e endpoint, body []byte, always bool, q quirks) (plan, []byte) {
	p := plan{endpoint: e, dialect: e.dialect()}
	var o object
	if !o.parse(body) {
		return p, body
	}
	r := request{object: o}
	p.model, _ = r.string("model")
	if e == invocations {
		p.dialect = r.dialect()
	}
	p.stream = r.flag("stream")
	if !p.dialect.options() {
		p.known, p.single, p.showUsage = !r.odd && p.dialect != unknownDialect, true, true
		return p, body
	}
	p.single = r.isSingle(p.dialect)
	p.showUsage = !p.stream // whatever comes
	perToken := r.flag("timings_per_token")
	p.perToken = perToken && p.stream && p.single
	options, n := r.get("stream_options")
	hasOptions := n > 0 && !r.isNull(options)
	if n > 1 || hasOptions && !p.stream {
		r.odd = true // vLLM refuses options without streaming
	}
	var splices []sse.Splice
	if p.stream && p.single && !r.odd {
		splices = r.askForUsage(&p, options, hasOptions, always, q.omitted)
	}
	if r.odd {
		return plan{endpoint: e, dialect: p.dialect, model: p.model}, body
	}
	p.known = true
	p.nullUsage = q.nullUsage && p.dialect == completionsDialect
	if p.dialect == chatDialect && r.flag("echo") {
		p.echo = gjson.GetBytes(body, "messages.@reverse.0.content").String()
	}
	if r.has("timings_per_token") {
		// llama.cpp's, not vLLM's. The object has another member, or no dialect would have it.
		body = splice(body, splices)
		o.parse(body)
		splices = o.edit(func(m member) bool { return o.is(m, "timings_per_token") })
	}
	if len(splices) > 0 {
		body = splice(body, splices)
	}
	return p, body
}

// request reads members of a request body. odd is set when one is not of the type that it should be, or stands twice.
type request struct {
	object
	odd bool
}

func (r *request) isNull(m member) bool { return string(r.bytes(m)) == "null" }

// flag returns a boolean; absent and null are false.
func (r *request) flag(key string) bool {
	m, n := r.get(key)
	if n == 0 {
		return false
	}
	v := string(r.bytes(m))
	if n > 1 || v != "true" && v != "false" && v != "null" {
		r.odd = true
	}
	return v == "true"
}

// string returns a copy of a string.
func (r *request) string(key string) (string, bool) {
	m, n := r.get(key)
	if n == 0 || r.raw[m.value] != '"' {
		return "", false
	}
	return strings.Clone(gjson.ParseBytes(r.bytes(m)).String()), true
}

// dialect tells in which form the answer to a body will come, for an endpoint that takes several. vLLM tries them in this
// order too.
func (r *request) dialect() dialect {
	switch {
	case r.has("messages"):
		return chatDialect
	case r.has("prompt"):
		return completionsDialect
	}
	return unknownDialect
}

// isSingle reports whether one engine request will answer.
func (r *request) isSingle(d dialect) bool {
	for _, key := range []string{"n", "best_of"} {
		m, n := r.get(key)
		if n > 0 && !r.isNull(m) && gjson.ParseBytes(r.bytes(m)).Num != 1 {
			return false
		}
	}
	if r.flag("use_beam_search") {
		return false
	}
	if d != completionsDialect {
		return true
	}
	prompts, n := r.get("prompt")
	count := 0
	if n > 0 && !r.isNull(prompts) {
		count += countPrompts(r.bytes(prompts))
	}
	if embeds, n := r.get("prompt_embeds"); n > 0 && !r.isNull(embeds) {
		count += countPrompts(r.bytes(embeds))
	}
	return count <= 1
}

// countPrompts returns how many prompts `prompt` holds: it is a text, a list of texts, a list of token numbers (one
// prompt) or a list of those.
func countPrompts(raw []byte) int {
	if raw[0] != '[' {
		return 1
	}
	count := 0
	gjson.ParseBytes(raw).ForEach(func(_, v gjson.Result) bool {
		if v.Type == gjson.Number {
			count = 1
			return false
		}
		count++
		return count < math.MaxInt32
	})
	return count
}

// askForUsage makes a streamed answer end with its usage, which vLLM sends only when asked, and for timings in every event
// have it in every event.
func (r *request) askForUsage(p *plan, options member, hasOptions, always bool, omitted usageDefault) []sse.Splice {
	p.showUsage, p.askedRunning, p.ownRunning = always, p.perToken, p.perToken
	if !hasOptions {
		asked := `{"include_usage":true}`
		if p.perToken {
			asked = `{"include_usage":true,"continuous_usage_stats":true}`
		}
		if m, n := r.get("stream_options"); n > 0 { // null
			return []sse.Splice{{From: m.value, To: m.end, With: []byte(asked)}}
		}
		return r.edit(nil, []byte(`"stream_options":`+asked))
	}
	sub, ok := r.sub(options)
	if !ok {
		r.odd = true
		return nil
	}
	o := request{object: sub}
	_, n := o.get("include_usage")
	asked, running := o.flag("include_usage"), o.flag("continuous_usage_stats")
	if r.odd = o.odd; r.odd {
		return nil
	}
	p.askedRunning = p.askedRunning || running
	p.ownRunning = p.ownRunning && !running
	p.showUsage = p.showUsage || asked
	if !asked && n == 0 {
		switch omitted {
		case usageDefaultTrue:
			p.showUsage = true
		case usageDefaultUnknown:
			// Nothing is asked for, so that whatever comes is what straight vLLM shows.
			p.showUsage, p.perToken, p.askedRunning, p.ownRunning = true, false, running, false
			return nil
		}
	}
	var splices []sse.Splice
	var add [][]byte
	set := func(key string, is bool) {
		m, n := o.get(key)
		switch {
		case is:
		case n > 0: // false or null
			splices = append(splices, sse.Splice{From: m.value, To: m.end, With: []byte("true")})
		default:
			add = append(add, []byte(`"`+key+`":true`))
		}
	}
	set("include_usage", asked || omitted == usageDefaultTrue && n == 0)
	set("continuous_usage_stats", running || !p.perToken)
	splices = append(splices, o.edit(nil, add...)...)
	slices.SortFunc(splices, func(a, b sse.Splice) int { return a.From - b.From })
	return splices
}

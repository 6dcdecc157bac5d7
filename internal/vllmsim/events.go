package vllmsim

import "strconv"

// doneEvent is the last event of every stream.
const doneEvent = "data: [DONE]\n\n"

// eventWriter builds the events of one stream. What does not change from one
// event to the next is prepared, so that an event costs a few copies. Each
// method appends one whole event to dst.
type eventWriter struct {
	sim    *Sim
	c      *call
	head   string   // up to the choices
	starts []string // per choice: up to its text
	middle string   // after the text, up to the value of finish_reason
	usage  string   // a usage member that is the same in all events
	detail string   // members after the counts in continuous usage
	last   string   // members after usage at a choice's end
}

func (s *Sim) newEventWriter(c *call, created int64, reqs []*request) *eventWriter {
	w := &eventWriter{sim: s, c: c}
	object := "chat.completion.chunk"
	if c.kind == kindText {
		object = "text_completion"
	}
	w.head = `data: {"id":` + quote(c.id) + `,"object":"` + object + `","created":` + strconv.FormatInt(created, 10) +
		`,"model":` + quote(c.model) + `,"choices":[`
	for _, r := range reqs {
		start := w.head + `{"index":` + strconv.Itoa(r.index)
		if c.kind == kindChat {
			start += `,"delta":{"content":"`
		} else {
			start += `,"text":"`
		}
		w.starts = append(w.starts, start)
	}
	switch {
	case c.kind == kindText:
		w.middle = `","logprobs":null,"finish_reason":`
	case s.era == era011:
		w.middle = `","reasoning_content":null},"logprobs":null,"finish_reason":`
	default:
		w.middle = `"},"logprobs":null,"finish_reason":`
	}
	if c.kind == kindText && s.era != era032 && !c.continuousUsage {
		w.usage = `,"usage":null`
	}
	switch {
	case c.kind == kindChat && s.era == era032:
		w.detail = `,"completion_tokens_details":null`
	case c.kind == kindText && s.era != era032:
		w.detail = `,"prompt_tokens_details":null`
	}
	if s.era == era032 && !c.includeUsage {
		w.last = `,"system_fingerprint":` + s.fingerprint()
	}
	return w
}

// appendUsage appends the usage of one choice after its first n tokens.
func (w *eventWriter) appendUsage(dst []byte, r *request, n int) []byte {
	if !w.c.continuousUsage {
		return append(dst, w.usage...)
	}
	dst = append(dst, `,"usage":{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(r.prompt.tokens), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(r.prompt.tokens+n), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(n), 10)
	dst = append(dst, w.detail...)
	return append(dst, '}')
}

// role appends the event that opens a chat's choice.
func (w *eventWriter) role(dst []byte, r *request) []byte {
	dst = append(dst, w.head...)
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(r.index), 10)
	dst = append(dst, `,"delta":{"role":"assistant","content":"`...)
	dst = append(dst, w.middle...)
	dst = append(dst, `null}]`...)
	dst = w.appendUsage(dst, r, 0)
	dst = append(dst, `,"prompt_token_ids":null`...)
	if w.sim.era == era032 {
		dst = append(dst, `,"prompt_text":null`...)
	}
	return append(dst, "}\n\n"...)
}

// token appends the event of token i, which ends the choice when it is the
// last one.
func (w *eventWriter) token(dst []byte, r *request, i int) []byte {
	last := i+1 == r.target
	dst = append(dst, w.starts[r.index]...)
	if i == 0 && w.c.echo {
		escaped := quote(r.prompt.text)
		dst = append(dst, escaped[1:len(escaped)-1]...)
		if r.prompt.text != "" {
			dst = append(dst, ' ')
		}
	}
	dst = r.appendText(dst, i)
	dst = append(dst, w.middle...)
	if last {
		dst = append(dst, '"')
		dst = append(dst, r.reason...)
		dst = append(dst, '"')
	} else {
		dst = append(dst, "null"...)
	}
	switch {
	case w.c.kind == kindText:
		dst = append(dst, `,"stop_reason":null,"prompt_token_ids":null`...)
	case last:
		dst = append(dst, `,"stop_reason":null`...)
	}
	dst = append(dst, `,"token_ids":null}]`...)
	dst = w.appendUsage(dst, r, i+1)
	if last {
		dst = append(dst, w.last...)
	}
	return append(dst, "}\n\n"...)
}

// final appends the usage event.
func (w *eventWriter) final(dst []byte, reqs []*request, u usage) []byte {
	dst = append(dst, w.head...)
	dst = append(dst, `],"usage":`...)
	dst = append(dst, w.sim.streamUsage(w.c.kind, u)...)
	if w.sim.era == era032 {
		dst = append(dst, `,"system_fingerprint":`...)
		dst = append(dst, w.sim.fingerprint()...)
	}
	if metrics, ok := w.sim.metricsJSON(reqs, true); ok {
		dst = append(dst, `,"metrics":`...)
		dst = append(dst, metrics...)
	}
	return append(dst, "}\n\n"...)
}

// appendText appends the text of token i. The end-of-sequence token, which is
// the last one of an answer that stops by itself, has none.
func (r *request) appendText(dst []byte, i int) []byte {
	if i+1 == r.target && r.reason == "stop" {
		return dst
	}
	return appendWord(dst, r.first, i)
}

package vllmsim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// kind is the endpoint of a completion request.
type kind int

const (
	kindChat kind = iota
	kindText
)

// message is one message of a chat, content parts joined.
type message struct{ role, content string }

// call is a completion request, checked and tokenised.
type call struct {
	kind      kind
	id        string // with its prefix
	model     string // as the client named it
	prompts   []prompt
	n         int
	maxTokens int // 0: up to the model's length
	ignoreEOS bool
	echo      bool
	stream    bool

	includeUsage    bool
	continuousUsage bool
}

// wireRequest is what is read of a request's JSON. Unknown members are
// ignored, as vLLM does.
type wireRequest struct {
	Model               *string         `json:"model"`
	Messages            json.RawMessage `json:"messages"`
	Prompt              json.RawMessage `json:"prompt"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	N                   *int            `json:"n"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	Echo                bool            `json:"echo"`
	Stream              *bool           `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage    *bool `json:"include_usage"`
		ContinuousUsage *bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	RequestID string `json:"request_id"`
}

// apiError is an answer with an error status in OpenAI's form.
type apiError struct {
	status  int
	kind    string // error.type
	param   string // empty is null
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

// validation is the error of a body that does not fit the schema. Old
// versions append a stack trace to it, which is left out here.
func (s *Sim) validation(location, details string) *apiError {
	e := &apiError{http.StatusBadRequest, "Bad Request", "", ""}
	loc := "('body',)"
	if s.era == era032 {
		e.param = strings.TrimSuffix("body."+location, ".")
		loc = "'" + e.param + "'"
	} else if location != "" {
		loc = "('body', '" + location + "')"
		if strings.Trim(location, "0123456789") == "" {
			loc = "('body', " + location + ")"
		}
	}
	e.message = "1 validation error:\n  {" + strings.Replace(details, "LOC", loc, 1) + "}"
	return e
}

// readCall reads and checks a completion request. A read error, when the
// client left, is returned as it is; all others are *apiError.
func (s *Sim) readCall(r *http.Request, k kind) (*call, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	var w wireRequest
	if err := json.Unmarshal(body, &w); err != nil {
		return nil, s.jsonError(body, err)
	}
	c := &call{kind: k, n: 1, ignoreEOS: w.IgnoreEOS, echo: w.Echo && k == kindText}
	c.id = s.answerID(k, r.Header.Get("X-Request-Id"), w.RequestID)
	if w.Model != nil {
		c.model = *w.Model
	}
	if w.Stream != nil {
		c.stream = *w.Stream
	}
	missing := func(name string) *apiError {
		return s.validation(name, "'type': 'missing', 'loc': LOC, 'msg': 'Field required'"+s.input())
	}
	if k == kindChat && len(w.Messages) == 0 {
		return nil, missing("messages")
	}
	if k == kindText && len(w.Prompt) == 0 {
		return nil, missing("prompt")
	}
	if w.StreamOptions != nil && !c.stream {
		return nil, s.optionsWithoutStream()
	}
	if c.model == "" {
		c.model = s.cfg.Models[0]
	}
	if !slices.Contains(s.cfg.Models, c.model) {
		text, param := fmt.Sprintf("The model `%s` does not exist.", c.model), "model"
		switch s.era {
		case era011:
			param = ""
		case era032:
			text += " Valid aliases: " + strings.Join(s.cfg.Models, ", ") + "."
		}
		return nil, &apiError{http.StatusNotFound, "NotFoundError", param, text}
	}
	c.includeUsage = s.cfg.ForceIncludeUsage
	if o := w.StreamOptions; o != nil {
		asked := s.era == era011 // the default of include_usage
		if o.IncludeUsage != nil {
			asked = *o.IncludeUsage
		}
		c.includeUsage = c.includeUsage || asked
		c.continuousUsage = c.includeUsage && o.ContinuousUsage != nil && *o.ContinuousUsage
	}
	if w.N != nil {
		if c.n = *w.N; c.n < 1 {
			return nil, badRequest("n", "n must be at least 1, got %d.", c.n)
		}
	}
	if c.prompts, err = s.prompts(k, &w); err != nil {
		return nil, err
	}
	return c, s.limits(c, &w)
}

func (s *Sim) optionsWithoutStream() *apiError {
	text, param := "Stream options can only be defined when `stream=True`.", ""
	if s.era != era011 {
		text, param = text+" (parameter=stream_options)", "stream_options"
	}
	if s.era == era032 {
		return badRequest(param, "%s", text)
	}
	e := s.validation("", "'type': 'value_error', 'loc': LOC, 'msg': 'Value error, "+text+"'")
	e.param = param
	return e
}

// limits fills maxTokens and checks it and the prompts against the model's
// length.
func (s *Sim) limits(c *call, w *wireRequest) error {
	asked := w.MaxTokens
	if w.MaxCompletionTokens != nil && c.kind == kindChat {
		asked = w.MaxCompletionTokens
	}
	if asked == nil && c.kind == kindText {
		d := 16 // OpenAI's default for text completions
		asked = &d
	}
	length := s.cfg.MaxModelLen
	if asked != nil {
		c.maxTokens = *asked
		if c.maxTokens < 1 {
			return badRequest("max_tokens", "max_tokens must be at least 1, got %d.", c.maxTokens)
		}
		if c.maxTokens > length {
			return s.tooManyTokens(c)
		}
	}
	for _, p := range c.prompts {
		if p.tokens >= length || p.tokens+c.maxTokens > length {
			return s.tooLong(c, p)
		}
	}
	return nil
}

func (s *Sim) tooManyTokens(c *call) error {
	switch s.era {
	case era011:
		in := c.prompts[0].tokens
		return badRequest("", "'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is %d tokens and your request has %d input tokens (%d > %d - %d). None",
			c.maxTokens, s.cfg.MaxModelLen, in, c.maxTokens, s.cfg.MaxModelLen, in)
	case era019:
		return badRequest("max_tokens", "max_tokens=%dcannot be greater than max_model_len=max_total_tokens=%d. Please request fewer output tokens. (parameter=max_tokens, value=%d)",
			c.maxTokens, s.cfg.MaxModelLen, c.maxTokens)
	default:
		return badRequest("max_tokens", "max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=max_tokens, value=%d)",
			c.maxTokens, s.cfg.MaxModelLen, c.maxTokens)
	}
}

// charsPerToken is the bound above which vLLM refuses a prompt by its
// characters, without tokenising it (of the recordings' model).
const charsPerToken = 12

func (s *Sim) tooLong(c *call, p prompt) error {
	length := s.cfg.MaxModelLen
	room := length - c.maxTokens
	switch {
	case s.era == era011 && c.kind == kindText:
		return badRequest("", "This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", room, p.tokens)
	case s.era == era011:
		return badRequest("", "This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages. None", length, p.tokens)
	case s.era == era019 && p.chars > charsPerToken*room:
		return badRequest("input_text", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d characters (more than %d characters, which is the upper bound for %d input tokens). Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_text, value=%d)",
			length, c.maxTokens, p.chars, charsPerToken*room, room, p.chars)
	case s.era == era032 && p.chars > charsPerToken*length:
		return badRequest("input_text", "This model's maximum context length is %d tokens. However, your prompt contains %d characters (more than %d characters, which is the upper bound for %d input tokens). Please reduce the length of the input prompt. (parameter=input_text, value=%d)",
			length, p.chars, charsPerToken*length, length, p.chars)
	default:
		return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=%d)",
			length, c.maxTokens, p.tokens, p.tokens)
	}
}

// input is the member of a validation error that shows what was sent; only
// new versions show it in a form without the content.
func (s *Sim) input() string {
	if s.era == era032 {
		return ", 'input': '<dict of 1 items>'"
	}
	return ", 'input': {}"
}

func (s *Sim) jsonError(body []byte, err error) *apiError {
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return s.validation("", "'type': 'type_error', 'loc': LOC, 'msg': '"+strings.ReplaceAll(err.Error(), "'", "`")+"'")
	}
	// Python counts from 0, and the end of the text is a position too.
	at := int(syntax.Offset) - 1
	if trimmed := len(bytes.TrimRight(body, " \t\r\n")); at >= trimmed-1 {
		at = trimmed
	}
	input := ", 'input': {}"
	if s.era == era032 {
		input = ", 'input': '<dict of 0 items>'"
	}
	return s.validation(fmt.Sprint(at), "'type': 'json_invalid', 'loc': LOC, 'msg': 'JSON decode error'"+input+", 'ctx': {'error': 'Expecting value'}")
}

// prompts tokenises what was asked.
func (s *Sim) prompts(k kind, w *wireRequest) ([]prompt, error) {
	block := s.cfg.PrefixCacheBlock
	text := func(t string) prompt {
		p := newPrompt([]byte(t), block)
		p.text, p.chars = t, utf8.RuneCountInString(t)
		return p
	}
	if k == kindChat {
		var messages []message
		for _, m := range gjson.ParseBytes(w.Messages).Array() {
			msg := message{role: m.Get("role").String()}
			if content := m.Get("content"); content.IsArray() {
				for _, part := range content.Array() {
					msg.content += part.Get("text").String()
				}
			} else {
				msg.content = content.String()
			}
			messages = append(messages, msg)
		}
		return []prompt{text(chatText(messages))}, nil
	}

	bad := s.validation("prompt", "'type': 'value_error', 'loc': LOC, 'msg': 'Value error, prompt must be a string, a list of strings, or token ids'")
	var (
		one   string
		many  []string
		ids   []int
		lists [][]int
	)
	switch {
	case json.Unmarshal(w.Prompt, &one) == nil:
		return []prompt{text(one)}, nil
	case json.Unmarshal(w.Prompt, &many) == nil && len(many) > 0:
	case json.Unmarshal(w.Prompt, &ids) == nil && len(ids) > 0:
		return []prompt{newPrompt(tokenBytes(ids), block)}, nil
	case json.Unmarshal(w.Prompt, &lists) == nil && len(lists) > 0:
		var all []prompt
		for _, l := range lists {
			all = append(all, newPrompt(tokenBytes(l), block))
		}
		return all, nil
	default:
		return nil, bad
	}
	var all []prompt
	for _, t := range many {
		all = append(all, text(t))
	}
	return all, nil
}

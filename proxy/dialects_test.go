package proxy

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/timings"
)

// TestFirstToken: which events have generated output, in each API. Timing starts with the first.
func TestFirstToken(t *testing.T) {
	chatEvent := func(delta string) string {
		return `{"choices":[{"index":0,"delta":` + delta + `,"finish_reason":null}]}`
	}
	for _, test := range []struct {
		e     endpoint
		data  string
		token bool
	}{
		{chat, chatEvent(`{"role":"assistant","content":""}`), false},
		{chat, chatEvent(`{"role":"assistant","content":null,"reasoning_content":null}`), false},
		{chat, chatEvent(`{"role":"assistant"}`), false},
		{chat, chatEvent(`{"role":"assistant","content":"a"}`), true},
		{chat, chatEvent(`{"role":"assistant","content":null,"tool_calls":[{"index":0,"function":{"name":"f"}}]}`), true},
		{chat, chatEvent(`{"role":"assistant","content":"","tool_calls":[]}`), false},
		{chat, chatEvent(`{"content":""}`), true}, // a token that has no text yet
		{chat, chatEvent(`{"content":"","reasoning_content":null}`), true},
		{chat, chatEvent(`{"reasoning":"hm"}`), true},
		{chat, chatEvent(`{"reasoning_content":"hm"}`), true},
		{chat, chatEvent(`{"reasoning":""}`), true},
		{chat, chatEvent(`{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}`), true},
		{chat, chatEvent(`{"tool_calls":[]}`), false},
		{chat, chatEvent(`{"function_call":{"name":"f"}}`), true},
		{chat, chatEvent(`{"content":null}`), false},
		{chat, chatEvent(`{}`), false},
		{chat, chatEvent(`null`), false},
		{chat, `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`, true}, // the last, whatever it was
		{chat, `{"choices":[]}`, false},
		{chat, `{"choices":null}`, false},
		{chat, `{"usage":{"prompt_tokens":1,"completion_tokens":1}}`, false},
		{completions, `{"choices":[{"index":0,"text":"","finish_reason":null}]}`, true},
		{completions, `{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}`, true},
		{completions, `{"choices":[]}`, false},
		{responses, `{"type":"response.created","response":{"usage":null}}`, false},
		{responses, `{"type":"response.in_progress","response":{"usage":null}}`, false},
		{responses, `{"type":"response.output_item.added","item":{"type":"message","content":[]}}`, false},
		{responses, `{"type":"response.output_item.added","item":{"type":"function_call","name":"f","arguments":""}}`, true},
		{responses, `{"type":"response.content_part.added","part":{"text":""}}`, false},
		{responses, `{"type":"response.output_text.delta","delta":""}`, true},
		{responses, `{"type":"response.reasoning_text.delta","delta":"a"}`, true},
		{responses, `{"type":"response.function_call_arguments.delta","delta":"{"}`, true},
		{responses, `{"type":"response.output_text.done","text":"a"}`, false},
		{messages, `{"type":"message_start","message":{"usage":{"input_tokens":16,"output_tokens":0}}}`, false},
		{messages, `{"type":"ping"}`, false},
		{messages, `{"type":"content_block_start","content_block":{"type":"text","text":""}}`, false},
		{messages, `{"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}}}`, true},
		{messages, `{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}`, true},
		{messages, `{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}`, true},
		{messages, `{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}`, true},
		{messages, `{"type":"content_block_stop"}`, false},
		{messages, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":1,"output_tokens":1}}`, true},
		{messages, `{"type":"message_stop"}`, false},
	} {
		var o object
		if !o.parse([]byte(test.data)) {
			t.Fatalf("%s", test.data)
		}
		ex := testExchange(plan{endpoint: test.e})
		if f := ex.facts(&o); f.token != test.token || f.failed || f.several {
			t.Errorf("%s: %+v", test.data, f)
		}
	}
	// What repeats the prompt is no token, but the same text generated after it is.
	ex := testExchange(plan{endpoint: chat, echo: "once"})
	for _, want := range []bool{false, true} {
		var o object
		o.parse([]byte(chatEvent(`{"content":"once"}`)))
		if f := ex.facts(&o); f.token != want {
			t.Errorf("echo: %+v, want token %v", f, want)
		}
	}
}

// TestReadUsage: the names of the token counts in all APIs and versions, and what of them is prompt.
func TestReadUsage(t *testing.T) {
	for raw, want := range map[string]*timings.Usage{
		`{"prompt_tokens":9,"completion_tokens":2}`:                                                                         {Prompt: 9, Completion: 2},
		`{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":null}`:                                            {Prompt: 9, Completion: 2},
		`{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{}}`:                                              {Prompt: 9, Completion: 2},
		`{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}`:                             {Prompt: 9, Completion: 2, Cached: timings.Some(0)},
		`{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":null,"created_cache_tokens":3}}`: {Prompt: 9, Completion: 2},
		`{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4,"created_cache_tokens":5}}`:    {Prompt: 9, Completion: 2, Cached: timings.Some(4)},
		`{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":5}}`:            {Prompt: 9, Completion: 2, Cached: timings.Some(4)},
		`{"input_tokens":16,"output_tokens":6}`:                                                                             {Prompt: 16, Completion: 6}, // messages of 0.11.2 and 0.19.1
		`{"input_tokens":16,"output_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}`:                 {Prompt: 16, Completion: 6, Cached: timings.Some(0)},
		`{"input_tokens":5,"output_tokens":6,"cache_creation_input_tokens":3,"cache_read_input_tokens":8}`:                  {Prompt: 16, Completion: 6, Cached: timings.Some(8)},
		`{"input_tokens":8,"output_tokens":6,"cache_read_input_tokens":8}`:                                                  {Prompt: 16, Completion: 6, Cached: timings.Some(8)},
		`{"input_tokens":16,"output_tokens":6,"cache_creation_input_tokens":null,"cache_read_input_tokens":null}`:           {Prompt: 16, Completion: 6},
		`{"input_tokens":13,"output_tokens":6,"cache_creation_input_tokens":3}`:                                             {Prompt: 16, Completion: 6}, // not in input_tokens either
		`{"input_tokens":13,"output_tokens":6,"cache_creation_input_tokens":3,"cache_read_input_tokens":null}`:              {Prompt: 16, Completion: 6},
		`{"prompt_tokens":9}`:                         nil,
		`{"completion_tokens":9}`:                     nil,
		`{"prompt_tokens":"9","completion_tokens":2}`: nil,
		`null`: nil, `[]`: nil, `""`: nil, ``: nil,
	} {
		ex := testExchange(plan{endpoint: chat})
		ok := ex.readUsage(gjson.Parse(raw), gjson.Result{})
		if ok != (want != nil) || ok != ex.usage.Known {
			t.Errorf("%s: %v", raw, ok)
		} else if ok {
			if diff := cmp.Diff(*want, ex.usage.Value); diff != "" {
				t.Errorf("%s: %s", raw, diff)
			}
		}
	}
}

const (
	responseUsage  = `"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":4},"output_tokens":5,"total_tokens":17}`
	nativeMember   = `"metrics":{"time_to_first_token_ms":12.0,"generation_time_ms":40.0,"queue_time_ms":1}`
	messageUsage   = `"usage":{"input_tokens":6,"output_tokens":5,"cache_creation_input_tokens":2,"cache_read_input_tokens":4}`
	responseEvents = "event: response.created\ndata: {\"response\":{\"id\":\"r\",\"metrics\":null,\"usage\":null},\"sequence_number\":0,\"type\":\"response.created\"}\n\n" +
		"event: response.output_text.delta\ndata: {\"delta\":\"a \\\"usage\\\":{\",\"sequence_number\":1,\"type\":\"response.output_text.delta\"}\n\n" +
		"event: response.output_text.done\ndata: {\"text\":\"a\",\"sequence_number\":2,\"type\":\"response.output_text.done\"}\n\n"
	messageEvents = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":12,\"output_tokens\":0}}}\n\n" +
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n"
	messageStop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
)

var sequence = regexp.MustCompile(`"sequence_number":\d+|(?m)^event: .*$`)

// TestResponsesStream: one member more, at the top level of the event that carries the final usage; vLLM's metrics leave
// it where timings come.
func TestResponsesStream(t *testing.T) {
	last := func(kind, members string) string {
		return "event: " + kind + "\ndata: {\"response\":{\"id\":\"r\"," + members + "},\"sequence_number\":3,\"type\":\"" + kind + "\"}\n\n"
	}
	for name, test := range map[string]struct {
		last    string
		want    string // "" is last
		keep    bool
		sources timings.Sources
	}{
		"completed":         {last: last("response.completed", responseUsage+","+nativeMember), want: last("response.completed", responseUsage)},
		"incomplete":        {last: last("response.incomplete", nativeMember+","+responseUsage), want: last("response.incomplete", responseUsage)},
		"completed, kept":   {last: last("response.completed", responseUsage+","+nativeMember), want: last("response.completed", responseUsage+","+nativeMember), keep: true},
		"no source":         {last: last("response.completed", responseUsage+","+nativeMember), sources: timings.Sources{timings.Window}},
		"failed":            {last: last("response.failed", responseUsage+`,"error":{"code":"server_error"},`+nativeMember)},
		"failed, no reason": {last: last("response.failed", `"usage":null,`+nativeMember)},
		"cancelled":         {last: last("response.cancelled", `"usage":null`)},
		"error":             {last: "event: error\ndata: {\"type\":\"error\",\"sequence_number\":3,\"error\":{\"message\":\"x\"}}\n\n"},
		"error, then all":   {last: "event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"x\"}}\n\n" + last("response.completed", responseUsage+","+nativeMember)},
		"error of OpenAI's": {last: "data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n"},
		"no usage":          {last: last("response.completed", `"usage":null,`+nativeMember)},
		"nothing":           {last: ""},
	} {
		m := startMeter(t, burst(responseEvents+test.last))
		r := m.rig(t, func(c *Config) {
			c.KeepMetrics = test.keep
			if c.Sources = test.sources; c.Sources == nil {
				c.Sources = timings.Sources{timings.Native}
			}
		})
		const request = `{"model":"tiny","input":"x","stream":true}`
		a := r.send(http.MethodPost, string(responses), request)
		if m.last() != request {
			t.Errorf("%s: asked %s", name, m.last())
		}
		if test.want == "" {
			if a.body != responseEvents+test.last {
				t.Errorf("%s: got %s", name, a.body)
			}
			continue
		}
		wantMember(t, name, a.body, responseEvents+test.want, backgroundFigures)
		if !strings.HasSuffix(a.body, backgroundFigures+"}\n\n") {
			t.Errorf("%s: timings are not at the top level of the last event: %s", name, a.body)
		}
		if diff := cmp.Diff(sequence.FindAllString(responseEvents+test.last, -1), sequence.FindAllString(a.body, -1)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestResponsesJSON: the same of answers that come whole.
func TestResponsesJSON(t *testing.T) {
	for name, test := range map[string]struct {
		answer, want string
		keep         bool
	}{
		"completed": {`{"id":"r","status":"completed",` + nativeMember + `,` + responseUsage + `}`, `{"id":"r","status":"completed",` + responseUsage + `}`, false},
		"kept":      {`{"id":"r",` + nativeMember + `,` + responseUsage + `}`, `{"id":"r",` + nativeMember + `,` + responseUsage + `}`, true},
		"failed":    {`{"id":"r","status":"failed","usage":null,` + nativeMember + `}`, "", false},
		"patched":   {`{"id":"r","timings":{"prompt_n":1},` + responseUsage + `,` + nativeMember + `}`, "", false},
	} {
		r := startMeter(t, whole(test.answer)).rig(t, func(c *Config) { c.KeepMetrics = test.keep })
		a := r.send(http.MethodPost, string(responses), `{"input":"x"}`)
		if test.want == "" {
			if a.body != test.answer {
				t.Errorf("%s: got %s", name, a.body)
			}
			continue
		}
		wantMember(t, name, a.body, test.want, backgroundFigures)
	}
}

// TestMessagesStream: timings come with the final usage, whose prompt tokens are split; message_start stays as it is.
func TestMessagesStream(t *testing.T) {
	const delta = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}," + messageUsage + "}\n\n"
	const failed = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"x\"}}\n\n"
	one := ran{prompt: 12, completion: 5, cached: 4, prefill: 12 * time.Millisecond, decode: 40 * time.Millisecond}
	for name, test := range map[string]struct {
		tail  string
		timed bool
	}{
		"whole":                   {delta + messageStop, true},
		"with [DONE], as 0.11.2":  {delta + messageStop + doneEvent, true},
		"pings":                   {"event: ping\ndata: {\"type\":\"ping\"}\n\n" + delta + messageStop, true},
		"error":                   {failed, false},
		"error before the end":    {failed + delta + messageStop, false},
		"no usage":                {strings.Replace(delta, messageUsage, `"usage":null`, 1) + messageStop, false},
		"stopped before usage":    {messageStop, false},
		"timings of vLLM's own":   {strings.Replace(delta, messageUsage, messageUsage+`,"timings":{"x":1}`, 1) + messageStop, false},
		"metrics at the top, too": {strings.Replace(delta, messageUsage, messageUsage+`,"other":1`, 1) + messageStop, true},
	} {
		m := startMeter(t, nil)
		m.answer = func(w http.ResponseWriter, r *http.Request) {
			m.finish(one)
			burst(messageEvents+test.tail)(w, r)
		}
		a := m.rig(t).send(http.MethodPost, string(messages), `{"model":"tiny","stream":true,"max_tokens":5,"messages":[]}`)
		if !test.timed {
			if a.body != messageEvents+test.tail {
				t.Errorf("%s: got %s", name, a.body)
			}
			continue
		}
		wantMember(t, name, a.body, messageEvents+test.tail, backgroundFigures)
		before, after, _ := strings.Cut(a.body, backgroundFigures)
		if !strings.Contains(before, "message_delta") || strings.Contains(before, messageStop) || !strings.HasPrefix(after, "}\n\n") {
			t.Errorf("%s: timings stand elsewhere: %s", name, a.body)
		}
	}
	// The same of an answer that comes whole.
	m := startMeter(t, nil)
	const answer = `{"id":"m","type":"message","content":[],` + messageUsage + `}`
	m.answer = func(w http.ResponseWriter, r *http.Request) {
		m.finish(one)
		whole(answer)(w, r)
	}
	wantMember(t, "whole", m.rig(t).send(http.MethodPost, string(messages), `{"max_tokens":5,"messages":[]}`).body, answer, backgroundFigures)
}

// TestInvocations: SageMaker's route takes the bodies of chat and text completions, and of what gets no timings.
func TestInvocations(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}`
	asked := func(choice string) string {
		return `data: {"choices":[{"index":0,` + choice + `,"finish_reason":"stop"}]}` + "\n\n" + `data: {"choices":[],` + usage + `,` + nativeMember + "}\n\n" + doneEvent
	}
	straight := func(choice string) string {
		return `data: {"choices":[{"index":0,` + choice + `,"finish_reason":"stop"}]}` + "\n\n" + doneEvent
	}
	const jsonAnswer = `{"choices":[{"index":0}],` + usage + `}`
	for _, test := range []struct {
		name, request, asked, content, answer, want string
	}{
		{"chat", `{"messages":[],"stream":true}`, `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`, "text/event-stream", asked(`"delta":{"content":"a"}`), straight(`"delta":{"content":"a"}`)},
		{"completion", `{"prompt":"x","stream":true}`, `{"prompt":"x","stream":true,"stream_options":{"include_usage":true}}`, "text/event-stream", asked(`"text":"a"`), straight(`"text":"a"`)},
		{"chat, whole", `{"messages":[],"timings_per_token":true}`, `{"messages":[]}`, "application/json", strings.TrimSuffix(jsonAnswer, "}") + "," + nativeMember + "}", jsonAnswer},
		{"completion, whole", `{"prompt":[1,2]}`, `{"prompt":[1,2]}`, "application/json", strings.TrimSuffix(jsonAnswer, "}") + "," + nativeMember + "}", jsonAnswer},
		{"both: vLLM takes the first", `{"prompt":"x","messages":[]}`, `{"prompt":"x","messages":[]}`, "application/json", strings.TrimSuffix(jsonAnswer, "}") + "," + nativeMember + "}", jsonAnswer},
		{"two prompts", `{"prompt":["x","y"]}`, "", "application/json", strings.TrimSuffix(jsonAnswer, "}") + "," + nativeMember + "}", ""},
		{"embedding", `{"input":"x","stream":true}`, "", "application/json", `{"data":[],"usage":{"prompt_tokens":2,"completion_tokens":0}}`, ""},
		{"score", `{"text_1":"x","text_2":"y"}`, "", "application/json", `{"data":[],` + usage + `}`, ""},
		{"no JSON", `x=1`, "", "application/json", jsonAnswer, ""},
	} {
		m := startMeter(t, typed(test.content, test.answer))
		r := m.rig(t)
		a := r.send(http.MethodPost, string(invocations), test.request)
		want := test.asked
		if want == "" {
			want = test.request
		}
		if m.last() != want {
			t.Errorf("%s: asked %s", test.name, m.last())
		}
		if test.want == "" {
			if a.body != test.answer {
				t.Errorf("%s: got %s", test.name, a.body)
			}
			continue
		}
		wantMember(t, test.name, a.body, test.want, backgroundFigures)
		r.wantMetric(1, "timings_total", "endpoint", string(invocations))
	}
}

// TestNativeDraft: vLLM's own count of draft tokens is shown where it speculated.
func TestNativeDraft(t *testing.T) {
	for raw, want := range map[string]string{
		`{"num_draft_tokens":9,"num_accepted_draft_tokens":4}`:   `"draft_n":9,"draft_n_accepted":4}`,
		`{"num_draft_tokens":9,"num_accepted_draft_tokens":0}`:   `"draft_n":9,"draft_n_accepted":0}`,
		`{"num_draft_tokens":0,"num_accepted_draft_tokens":0}`:   ``,
		`{"num_draft_tokens":9}`:                                 ``,
		`{"num_draft_tokens":"9","num_accepted_draft_tokens":4}`: ``,
		`null`: ``,
		`[]`:   ``,
	} {
		native := strings.TrimSuffix(nativeMember, "}") + `,"speculative_decoding":` + raw + `}`
		for _, usage := range []string{`"usage":{"prompt_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}`} {
			answer := `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}` + "\n\n" + `data: {"choices":[],` + usage + `,` + native + "}\n\n" + doneEvent
			got, err := throughStream(t, testExchange(plan{endpoint: completions}, timings.Native), strings.NewReader(answer), nil, 500)
			if err != io.EOF || !strings.Contains(got, `"prompt_ms":12`) || strings.Contains(got, `"draft_n"`) != (want != "") || !strings.Contains(got, want) {
				t.Errorf("%s: got %s, %v", raw, got, err)
			}
		}
	}
}

// TestSeveral: what several engine requests answer has no timings, and nothing else of it changes; what only has more in
// its answer has them.
func TestSeveral(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}`
	for _, test := range []struct {
		e      endpoint
		member string
		single bool
	}{
		{chat, `"n":2`, false}, {completions, `"n":2`, false}, {completions, `"prompt":["a","b"]`, false}, {completions, `"best_of":3`, false},
		{chat, `"use_beam_search":true`, false}, {completions, `"prompt":[[1],[2]]`, false},
		{chat, `"echo":true`, true}, {completions, `"echo":true`, true}, {chat, `"logprobs":true,"top_logprobs":2`, true}, {completions, `"logprobs":2`, true},
		{chat, `"prompt_logprobs":1`, true}, {completions, `"prompt_logprobs":1`, true}, {chat, `"return_token_ids":true`, true}, {completions, `"return_token_ids":true`, true},
		{completions, `"prompt":["a"]`, true}, {chat, `"n":1`, true},
	} {
		for _, stream := range []bool{false, true} {
			name := fmt.Sprintf("%s, %s, stream %v", test.e, test.member, stream)
			plain := `{"choices":[{"index":0,"message":{"content":"x"},"logprobs":{"content":[{"token":"a","logprob":-0.1}]},"token_ids":[1,2],"finish_reason":"stop"}],"prompt_logprobs":[null],` + usage + `}`
			answer := strings.TrimSuffix(plain, "}") + "," + nativeMember + "}"
			if stream {
				finish := `data: {"choices":[{"index":0,"text":"a","delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]},"token_ids":[1],"finish_reason":"stop"}],"prompt_token_ids":[1,2]}` + "\n\n"
				plain = finish + doneEvent
				answer = finish + `data: {"choices":[],` + usage + `,` + nativeMember + "}\n\n" + doneEvent
			}
			content := map[bool]string{true: "text/event-stream", false: "application/json"}[stream]
			m := startMeter(t, typed(content, answer))
			request := fmt.Sprintf(`{"stream":%v,%s}`, stream, test.member)
			a := m.rig(t).send(http.MethodPost, string(test.e), request)
			if !test.single {
				if a.body != answer || m.last() != request {
					t.Errorf("%s: asked %s, got %s", name, m.last(), a.body)
				}
				continue
			}
			wantMember(t, name, a.body, plain, backgroundFigures)
		}
	}
}

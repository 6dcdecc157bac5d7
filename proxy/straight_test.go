package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/timings"
)

// TestUsageAsStraight: however usage is asked for, or is not, in all versions a client sees what straight vLLM would have shown it,
// and one member more.
func TestUsageAsStraight(t *testing.T) {
	const tokens = 4
	for _, version := range []string{"0.11.2", "0.19.1", "0.32.0"} {
		for _, native := range []bool{false, true} {
			if native && version != "0.32.0" {
				continue // older ones have no metrics in their answers
			}
			setup := func(c *vllmsim.Config) { c.Version, c.PerRequestMetrics = version, native }
			r := newRig(t, startEngine(t, setup).URL)
			r.warm()
			direct := *r
			direct.url = startEngine(t, setup).URL // one of its own, whose requests are in no window of the sidecar's
			for _, e := range []endpoint{chat, completions} {
				for _, members := range []string{
					``, `,"stream":false`, `,"stream":null`, `,"stream":false,"stream_options":null`, `,"stream":true`,
					`,"stream":true,"stream_options":null`, `,"stream":true,"stream_options":{}`, `,"stream_options":{"include_usage":false},"stream":true`,
					`,"stream":true,"stream_options":{"include_usage":true}`, `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`,
					`,"stream":true,"stream_options":{"include_usage":false,"continuous_usage_stats":true}`, `,"stream":true,"stream_options":{"continuous_usage_stats":true}`,
					`,"stream_options":{"include_usage":true}`, // which vLLM refuses
				} {
					name := fmt.Sprintf("%s, native %v, %s, %s", version, native, e, members)
					body := fmt.Sprintf(`{"max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":"%[2]d"}],"prompt":"%[2]d"%s}`, tokens, prompts.next(), members)
					want, got := direct.send(http.MethodPost, string(e), body), r.send(http.MethodPost, string(e), body)
					timed := 1
					if want.status != http.StatusOK {
						timed = 0
					}
					if n := len(ourTimings.FindAllString(got.body, -1)); n != timed || strings.Count(got.body, `"timings"`) != n {
						t.Errorf("%s: %d timings in %s", name, n, got.body)
					}
					same := func(s string) string { return randomIDs.ReplaceAllString(s, "$1$2") }
					if diff := cmp.Diff(same(theMetrics.ReplaceAllString(want.body, "")), same(ourTimings.ReplaceAllString(got.body, ""))); diff != "" || got.status != want.status || got.err != nil {
						t.Errorf("%s: status %d, %v, not what straight vLLM sends: %s", name, got.status, got.err, diff)
					}
					if !strings.Contains(members, `":true`) && strings.Contains(got.body, `"choices":[]`) {
						t.Errorf("%s: an event without choices: %s", name, got.body)
					}
				}
			}
		}
	}
}

// late is a streamed answer whose pieces come at times after one another.
type late struct {
	pieces []string
	after  time.Duration
}

func (l *late) Read(p []byte) (int, error) {
	if len(l.pieces) == 0 {
		return 0, io.EOF
	}
	time.Sleep(l.after)
	n := copy(p, l.pieces[0])
	l.pieces = l.pieces[1:]
	return n, nil
}

// TestFirstTokenStartsDecode: prefill is until the first event with output comes, whatever kind of output that is, and decode
// until the last.
func TestFirstTokenStartsDecode(t *testing.T) {
	chunk := func(delta string) string {
		return `data: {"choices":[{"index":0,"delta":` + delta + `,"finish_reason":null}]}` + "\n\n"
	}
	tool := func(call string) string { return chunk(`{"tool_calls":[{"index":0,"function":` + call + `}]}`) }
	event := func(data string) string { return "data: " + data + "\n\n" }
	role, comment := chunk(`{"role":"assistant","content":""}`), ": ping\n\n"
	const stop = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	const usage = `"usage":{"input_tokens":9,"output_tokens":5}`
	completed := event(`{"type":"response.completed","response":{` + usage + `}}`)
	delta := event(`{"type":"message_delta",` + usage + `}`)
	for name, test := range map[string]struct {
		e               endpoint
		events          []string // one a second
		prompt, decoded int      // seconds
	}{
		"reasoning, then content":   {chat, []string{role, chunk(`{"reasoning":"a"}`), chunk(`{"content":"b"}`), stop}, 2, 2},
		"reasoning, older name":     {chat, []string{role, comment, chunk(`{"reasoning_content":"a"}`), stop}, 3, 1},
		"tool calls only":           {chat, []string{role, tool(`{"name":"f"}`), tool(`{"arguments":"{"}`), tool(`{"arguments":"}"}`), stop}, 2, 3},
		"tool call with the role":   {chat, []string{chunk(`{"role":"assistant","content":null,"tool_calls":[{"index":0}]}`), tool(`{"arguments":"{"}`), stop}, 1, 2},
		"empty contents":            {chat, []string{role, chunk(`{"content":""}`), chunk(`{"content":""}`), stop}, 2, 2},
		"comments all along":        {chat, []string{comment, comment, role, comment, chunk(`{"content":"a"}`), comment, chunk(`{"content":"b"}`), comment, stop}, 5, 4},
		"text":                      {completions, []string{comment, `data: {"choices":[{"index":0,"text":"","finish_reason":null}]}` + "\n\n", `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}` + "\n\n"}, 2, 1},
		"reasoning of responses":    {responses, []string{event(`{"type":"response.created","response":{"usage":null}}`), event(`{"type":"response.reasoning_text.delta","delta":"a"}`), event(`{"type":"response.output_text.delta","delta":"b"}`), completed}, 2, 2},
		"a tool of responses":       {responses, []string{event(`{"type":"response.created"}`), event(`{"type":"response.output_item.added","item":{"type":"function_call"}}`), completed}, 2, 1},
		"thinking of messages":      {messages, []string{event(`{"type":"message_start","message":{` + usage + `}}`), event(`{"type":"ping"}`), event(`{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}`), delta}, 3, 1},
		"a tool of messages, later": {messages, []string{event(`{"type":"message_start"}`), event(`{"type":"content_block_start","content_block":{"type":"tool_use"}}`), event(`{"type":"content_block_delta"}`), delta}, 2, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events := test.events
				if test.e == chat || test.e == completions { // whose usage comes together with the end
					last := len(events) - 1
					events = append(events[:last:last], events[last]+observed(5))
				}
				ex := testExchange(plan{endpoint: test.e, showUsage: true}, timings.Observed)
				ex.headers = time.Now()
				got, err := throughStream(t, ex, &late{events, time.Second}, nil, 1<<10)
				if plain := ourTimings.ReplaceAllString(got, ""); plain != strings.Join(events, "") || err != io.EOF {
					t.Errorf("got %q, %v", plain, err)
				}
				_, x, _ := strings.Cut(got, `"timings":`)
				if x := gjson.Parse(x); x.Get("prompt_ms").Num != 1000*float64(test.prompt) || x.Get("predicted_ms").Num != 1000*float64(test.decoded) || x.Get("predicted_n").Int() != 5 {
					t.Errorf("want %d s and %d s: %s", test.prompt, test.decoded, x.Raw)
				}
			})
		})
	}
}

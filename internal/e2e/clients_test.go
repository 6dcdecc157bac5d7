//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// driver is a running clients/clients.py or clients/client.mjs, which calls client libraries for us.
type driver struct {
	in  io.Writer
	out *bufio.Reader
}

func startDriver(t *testing.T, program string, args ...string) *driver {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Stderr = os.Stderr
	// A proxy for the outer world is not for us.
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // ends it
		if err := cmd.Wait(); err != nil && t.Context().Err() == nil {
			t.Errorf("%s: %v", program, err)
		}
	})
	return &driver{in: in, out: bufio.NewReader(out)}
}

// call makes one call to the server at base and returns all that the library handed out.
func (d *driver) call(t *testing.T, name, base string) []json.RawMessage {
	t.Helper()
	if _, err := fmt.Fprintf(d.in, `{"case":%q,"base":%q}`+"\n", name, base); err != nil {
		t.Fatal(err)
	}
	line, err := d.out.ReadBytes('\n')
	if err != nil {
		t.Fatalf("%s at %s: the driver ended: %v", name, base, err)
	}
	var answer struct {
		Seen  []json.RawMessage
		Error string
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		t.Fatalf("%s at %s: %v in %s", name, base, err, line)
	}
	if answer.Error != "" || len(answer.Seen) == 0 {
		t.Fatalf("%s at %s: %s", name, base, answer.Error)
	}
	return answer.Seen
}

// clientCase is one way to call a library.
type clientCase struct {
	name string
	// timings are the places, counted from the last, of what was seen with `timings` in it.
	timings []int
}

// In the streams of the typed helpers some libraries rebuild the events and lose every member that they do not know: there
// `timings` are where the library hands out what it received.
var (
	pythonCases = []clientCase{
		{"chat", []int{1}},
		{"chat_stream", []int{1}},
		{"chat_stream_usage", []int{1}},
		{"chat_helper", []int{2}}, // the chunk; before the completion, which the library builds
		{"chat_raw", []int{1, 2}}, // the text and the object
		{"chat_raw_stream", []int{1}},
		{"chat_raw_lines", []int{2}}, // before [DONE]
		{"chat_async", []int{1}},
		{"chat_pooled", []int{1, 2, 14, 26}}, // three streams of 12 chunks
		{"text", []int{1}},
		{"text_stream", []int{1}},
		{"text_stream_usage", []int{1}},
		{"responses", []int{1}},
		{"responses_raw", []int{1, 2}},
		{"responses_stream", []int{1}},
		{"responses_helper", nil}, // the library builds its events anew
		{"messages", []int{1}},
		{"messages_raw", []int{1, 2}},
		{"messages_stream", []int{2}}, // message_delta, before message_stop
		{"messages_helper", []int{3}}, // the same, before the message that the library builds
		{"messages_text", nil},        // nothing but text
		{"litellm_chat", []int{1}},
		{"litellm_chat_stream", []int{2}}, // LiteLLM adds a chunk of its own
		{"litellm_chat_stream_usage", nil},
		{"litellm_text", []int{1}},
	}
	nodeCases = []clientCase{
		{"chat", []int{1}},
		{"chat_stream", []int{1}},
		{"chat_stream_usage", []int{1}},
		{"chat_helper", []int{1, 2}},
		{"chat_with_response", []int{1}},
		{"text", []int{1}},
		{"text_stream", []int{1}},
		{"responses", []int{1}},
		{"responses_stream", []int{1}},
		{"responses_helper", []int{2}},
	}
)

// TestClients calls vLLM with the libraries that people use, straight and through the sidecar: what they hand out is the
// same but for `timings`, which can be read as an extra field.
func TestClients(t *testing.T) {
	vllm := shared.exact.get(t)
	sidecar := startSidecar(t, vllm.URL)
	// /v1/messages has windows only, and those need a first reading.
	send(t, sidecar.URL, messagesRequest("first", 3, ""))

	here, err := filepath.Abs("clients")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		command []string
		cases   []clientCase
	}{
		"python": {[]string{filepath.Join(shared.clients, "venv", "bin", "python"), filepath.Join(here, "clients.py")}, pythonCases},
		"node":   {[]string{"node", filepath.Join(here, "client.mjs"), filepath.Join(shared.clients, "node")}, nodeCases},
	} {
		t.Run(name, func(t *testing.T) {
			d := startDriver(t, c.command[0], c.command[1:]...)
			for _, c := range c.cases {
				t.Run(c.name, func(t *testing.T) { c.compare(t, d, vllm, sidecar) })
			}
		})
	}
	// OpenAI's client for Python closes the connection as soon as it has read [DONE]; that is no client that left early.
	checkNoFaults(t, sidecar)
}

// compare makes the call both ways and compares.
func (c clientCase) compare(t *testing.T, d *driver, vllm *stack.VLLM, sidecar *stack.Sidecar) {
	t.Helper()
	checkSame(t, func() []any {
		seen, _ := normal(t, d.call(t, c.name, vllm.URL))
		return seen
	}, func() []any {
		seen, timings := normal(t, d.call(t, c.name, sidecar.URL))
		c.checkTimings(t, timings)
		return seen
	})
}

// checkTimings checks where the `timings` are, by their places counted from the last, and that they are of this call.
func (c clientCase) checkTimings(t *testing.T, timings map[int]gjson.Result) {
	t.Helper()
	got := slices.Sorted(maps.Keys(timings))
	// Where vLLM merged events, the first of several streams is nearer to the end.
	if !slices.Equal(got, c.timings) && !(c.name == "chat_pooled" && len(got) == len(c.timings)) {
		t.Errorf("timings are at %v from the end, want %v", got, c.timings)
	}
	for place, v := range timings {
		if v.Get("predicted_n").Int() != 11 || v.Get("prompt_n").Int() == 0 || !v.Get("prompt_per_second").Exists() {
			t.Errorf("the timings at %d from the end are not those of 11 tokens: %s", place, v.Raw)
		}
	}
}

// normal is what a library handed out, without what differs from one request to the next, and without `timings`;
// those are returned beside it, by their places counted from the last.
func normal(t *testing.T, seen []json.RawMessage) (all []any, timings map[int]gjson.Result) {
	t.Helper()
	timings = map[int]gjson.Result{}
	for i, raw := range seen {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		strip(v, func(value any) {
			text, err := json.Marshal(value)
			if err != nil {
				t.Fatal(err)
			}
			timings[len(seen)-i] = gjson.ParseBytes(text)
		})
		all = append(all, v)
	}
	return all, timings
}

// strip takes ids, times, `timings` and vLLM's `metrics` out of v, at any depth.
func strip(v any, onTimings func(any)) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			strip(e, onTimings)
		}
	case map[string]any:
		for name, value := range v {
			switch name {
			case "timings":
				onTimings(value)
				fallthrough
			case "id", "item_id", "request_id", "_request_id", "created", "created_at", "completed_at", "metrics":
				delete(v, name)
			default:
				strip(value, onTimings)
			}
		}
	}
}

// checkNoFaults checks that the sidecar has seen neither a client that left nor a vLLM that failed.
func checkNoFaults(t *testing.T, s *stack.Sidecar) {
	t.Helper()
	page := string(get(t, s.URL+"/-/metrics").body)
	if !strings.Contains(page, "\nvllm_timings_client_disconnects_total 0\n") {
		t.Error("vllm_timings_client_disconnects_total is not 0")
		for line := range strings.Lines(s.Tail(1 << 22)) {
			if strings.Contains(line, "client_left=true") || strings.Contains(line, "status=499") {
				t.Log(line)
			}
		}
	}
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "vllm_timings_upstream_errors_total") && !strings.HasSuffix(line, " 0\n") {
			t.Errorf("the sidecar counts %s", line)
		}
	}
}

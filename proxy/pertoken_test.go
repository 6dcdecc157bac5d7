package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
	"github.com/vllm-timings/vllm-timings/timings"
)

// TestPlanPerToken: what vLLM is asked for `timings_per_token`, which it does not know itself, byte for byte.
func TestPlanPerToken(t *testing.T) {
	const both = `{"include_usage":true,"continuous_usage_stats":true}`
	for _, test := range []struct {
		body, want string // "" is body
		q          quirks
		perToken   bool
		show       bool // usage
		own        bool // usage in every event is for us alone
	}{
		{`{"stream":true,"timings_per_token":true}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, false, true},
		{"{\n \"timings_per_token\" : true ,\n \"stream\": true\n}", "{\n \"stream\": true,\"stream_options\":" + both + "\n}", quirks032, true, false, true},
		{`{"timings_per_token":true,"stream":true,"stream_options":null}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, false, true},
		{`{"stream_options":{},"timings_per_token":true,"stream":true}`, `{"stream_options":` + both + `,"stream":true}`, quirks032, true, false, true},
		{`{"stream_options":{},"timings_per_token":true,"stream":true}`, `{"stream_options":{"continuous_usage_stats":true},"stream":true}`, quirks011, true, true, true},
		{`{"stream_options":{},"timings_per_token":true,"stream":true}`, `{"stream_options":{},"stream":true}`, quirks{}, false, true, false},
		{`{"stream":true,"stream_options":{"include_usage":false},"timings_per_token":true}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, false, true},
		{`{"stream":true,"stream_options":{"include_usage":true},"timings_per_token":true}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, true, true},
		{`{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false},"timings_per_token":true}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, true, true},
		{`{"stream":true,"stream_options":{"continuous_usage_stats":null, "a":1},"timings_per_token":true}`, `{"stream":true,"stream_options":{"continuous_usage_stats":true, "a":1,"include_usage":true}}`, quirks032, true, false, true},
		{`{"stream":true,"stream_options":{"continuous_usage_stats":true},"timings_per_token":true}`, `{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":true}}`, quirks032, true, false, false},
		{`{"stream":true,"stream_options":` + both + `,"timings_per_token":true}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, true, true, false},
		{`{"stream":true,"stream_options":` + both + `,"timings_per_token":false}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, false, true, false},
		{`{"stream":true,"stream_options":` + both + `,"timings_per_token":null}`, `{"stream":true,"stream_options":` + both + `}`, quirks032, false, true, false},
		{`{"timings\u005fper_token":true}`, `{}`, quirks032, false, true, false},
		{`{"timings_per_token":true,"stream":false}`, `{"stream":false}`, quirks032, false, true, false},
		{`{"stream":true,"n":2,"timings_per_token":true}`, `{"stream":true,"n":2}`, quirks032, false, false, false},
		{`{"x":{"timings_per_token":true}}`, ``, quirks032, false, true, false},
	} {
		for _, e := range []endpoint{chat, completions} {
			p, out := planRequest(e, []byte(test.body), false, test.q)
			want := test.want
			if want == "" {
				want = test.body
			}
			if string(out) != want {
				t.Errorf("%s: got %s, want %s", test.body, out, want)
			}
			if !p.known || p.perToken != test.perToken || p.showUsage != test.show || p.ownRunning != test.own {
				t.Errorf("%s: %+v", test.body, p)
			}
		}
	}
	// The error is vLLM's to give where it is not as llama.cpp has it.
	for _, body := range []string{`{"stream":true,"timings_per_token":"yes"}`, `{"stream":true,"timings_per_token":1}`, `{"stream":true,"timings_per_token":true,"timings_per_token":true}`} {
		if p, out := planRequest(chat, []byte(body), false, quirks032); p.known || string(out) != body {
			t.Errorf("%s: %+v, %s", body, p, out)
		}
	}
	// It is no member of the other APIs.
	for _, e := range []endpoint{responses, messages} {
		const body = `{"stream":true,"timings_per_token":true}`
		if p, out := planRequest(e, []byte(body), false, quirks032); !p.known || p.perToken || string(out) != body {
			t.Errorf("%s: %+v, %s", e, p, out)
		}
	}
}

// usageMember is usage in an event, as all three versions have it.
var usageMember = regexp.MustCompile(`,"usage":\{[^{}]*(\{[^{}]*\})?[^{}]*\}`)

// perTokenAnswer gives what a client receives of a recorded answer that has usage in every event. Events come 2 ms after
// one another by the exchange's clock.
func perTokenAnswer(t *testing.T, body []byte, p plan, sources ...timings.Source) string {
	t.Helper()
	p.perToken, p.askedRunning = true, true
	ex := testExchange(p, sources...)
	ex.headers = time.Now().Add(-20 * time.Millisecond)
	s := newStream(ex, io.NopCloser(strings.NewReader("")), 0)
	var out strings.Builder
	for event := range bytes.SplitAfterSeq(body, []byte("\n\n")) {
		s.previous, s.now = s.now, s.now.Add(2*time.Millisecond)
		s.framer.Feed(event)
		for s.events(); s.deciding; s.events() {
			s.deciding = false
			s.decide(&s.verdict)
		}
		out.Write(s.out)
		s.out = s.out[:0]
	}
	s.end = io.EOF
	s.finish()
	out.Write(s.out)
	return out.String()
}

// TestPerTokenRecorded: on real answers every event of a token has the timings so far, the last the final ones, and
// without them each is what straight vLLM sends to a client that asked, or did not ask, for usage.
func TestPerTokenRecorded(t *testing.T) {
	for _, version := range versions {
		body := loadRecordings(t, version)["chat_stream_usage_continuous"].body
		hidden := usageMember.ReplaceAll(body, nil)
		lastUsage := body[bytes.LastIndex(body, []byte(`data: {`)):]
		withoutLast := bytes.Replace(hidden, usageMember.ReplaceAll(lastUsage, nil), []byte("data: [DONE]\n\n"), 1)
		onlyLast := bytes.Replace(hidden, usageMember.ReplaceAll(lastUsage, nil), lastUsage, 1)
		for name, test := range map[string]struct {
			plan plan
			want []byte
		}{
			"not asked":       {plan{endpoint: chat, ownRunning: true}, withoutLast},
			"running only":    {plan{endpoint: chat}, withoutLast}, // of which vLLM sends nothing without include_usage
			"asked":           {plan{endpoint: chat, ownRunning: true, showUsage: true}, onlyLast},
			"asked, each one": {plan{endpoint: chat, showUsage: true}, body},
		} {
			got := perTokenAnswer(t, body, test.plan, timings.Native, timings.Observed)
			plain := ourTimings.ReplaceAllString(got, "")
			want := theMetrics.ReplaceAllString(string(test.want), "")
			if !test.plan.showUsage { // goes to the finish event, where straight vLLM has it
				plain = strings.Replace(plain, `,"system_fingerprint":"vllm-0.32.0-ab8ff72c"`, "", 1)
			}
			if diff := cmp.Diff(want, plain); diff != "" {
				t.Errorf("%s of %s: %s", name, version, diff)
			}
			checkRunning(t, name+" of "+version, got, 6, test.plan.showUsage)
		}
	}
}

// checkRunning: each event of the tokens has timings that grow, and the last ones are the final ones. With n tokens, one an
// event.
func checkRunning(t *testing.T, name, got string, n int, usageEvent bool) {
	t.Helper()
	var counts []int
	var prompt string
	last := gjson.Result{}
	for line := range strings.Lines(got) {
		x := gjson.Get(strings.TrimPrefix(line, "data: "), "timings")
		role := strings.Contains(line, `"role"`)
		if x.Exists() == role && strings.HasPrefix(line, "data: {") {
			t.Errorf("%s: timings %v in %s", name, x.Exists(), line)
		}
		if !x.Exists() {
			continue
		}
		counts = append(counts, int(x.Get("predicted_n").Int()))
		if x.Get("predicted_ms").Num < last.Get("predicted_ms").Num && len(counts) <= n {
			t.Errorf("%s: decode time goes back: %s", name, x.Raw)
		}
		if len(counts) < n {
			if prompt == "" {
				prompt = x.Get("prompt_ms").Raw
			}
			if !x.Get("estimated").Bool() || x.Get("prompt_ms").Raw != prompt || prompt == "" {
				t.Errorf("%s: running timings %s", name, x.Raw)
			}
		}
		last = x
	}
	var want []int
	for i := range n {
		want = append(want, i+1)
	}
	if usageEvent {
		want = append(want, n)
	}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Errorf("%s: tokens %s", name, diff)
	}
}

// TestPerTokenSources: where streams may not be a source there are only the final figures, and none where nothing is known.
func TestPerTokenSources(t *testing.T) {
	body := loadRecordings(t, "0.32.0")["chat_stream_usage_continuous"].body
	for n, sources := range map[int]timings.Sources{0: {}, 1: {timings.Native}, 6: {timings.Observed}} {
		if got := strings.Count(perTokenAnswer(t, body, plan{endpoint: chat, ownRunning: true}, sources...), `"timings"`); got != n {
			t.Errorf("%v: %d timings, want %d", sources, got, n)
		}
	}
	// A patched vLLM's timings are the ones.
	const own = `,"timings":{"predicted_n":-1}`
	all := bytes.ReplaceAll(body, []byte(`,"usage":{"prompt`), []byte(own+`,"usage":{"prompt`))
	got := perTokenAnswer(t, all, plan{endpoint: chat, ownRunning: true}, timings.AllSources...)
	if n := strings.Count(got, own); n != strings.Count(got, `"timings"`) || n != strings.Count(string(all), own)-1 {
		t.Errorf("a vLLM with timings of its own: %s", got)
	}
}

// TestPerTokenNull: text completions until 0.20 say `"usage":null` in each event, if usage is not shown there.
func TestPerTokenNull(t *testing.T) {
	const (
		open  = `data: {"choices":[{"index":0,"text":"a","finish_reason":`
		usage = `"usage":{"prompt_tokens":9,"completion_tokens":%d}}` + "\n\n"
		null  = `"usage":null}` + "\n\n"
	)
	body := fmt.Sprintf(open+`null}],`+usage+open+`"stop"}],`+usage+`data: {"choices":[],`+usage+"data: [DONE]\n\n", 1, 2, 2)
	got := perTokenAnswer(t, []byte(body), plan{endpoint: completions, ownRunning: true, nullUsage: true}, timings.Observed)
	want := open + `null}],` + null + open + `"stop"}],` + null + "data: [DONE]\n\n"
	if plain := ourTimings.ReplaceAllString(got, ""); plain != want || strings.Count(got, `"timings"`) != 2 {
		t.Errorf("got %q", got)
	}
}

// TestPerTokenCut: whatever is lost of an answer, no text and no finish event is lost by what is hidden.
func TestPerTokenCut(t *testing.T) {
	body := string(loadRecordings(t, "0.32.0")["chat_stream_usage_continuous"].body)
	events := strings.SplitAfter(body, "\n\n")
	for n := range len(events) {
		for _, broken := range []bool{false, true} {
			cut := strings.Join(events[:n], "")
			src := io.Reader(strings.NewReader(cut))
			want := io.EOF
			if broken {
				want = io.ErrUnexpectedEOF
				src = io.MultiReader(src, failing{want})
			}
			ex := testExchange(plan{endpoint: chat, perToken: true, askedRunning: true, ownRunning: true}, timings.Observed)
			got, err := throughStream(t, ex, src, []byte{17}, 64)
			if err != want {
				t.Fatalf("error %v, want %v", err, want)
			}
			if a, b := strings.Count(got, `"delta"`), strings.Count(cut, `"delta"`); a != b {
				t.Errorf("%d events, broken %v: %d of %d events of the answer came", n, broken, a, b)
			}
			if strings.Contains(got, `"usage":{`) {
				t.Errorf("%d events, broken %v: usage that nobody asked for: %s", n, broken, got)
			}
		}
	}
}

// TestPerTokenSimulated: the whole way, in each dialect and version, with each way of asking for usage.
func TestPerTokenSimulated(t *testing.T) {
	const tokens = 4
	for _, version := range []string{"0.11.2", "0.19.1", "0.32.0"} {
		vllm := startEngine(t, func(c *vllmsim.Config) { c.Version, c.PerRequestMetrics, c.PromptTokensDetails = version, true, true })
		r := newRig(t, vllm.URL)
		r.warm()
		for i, options := range []string{`null`, `{}`, `{"include_usage":false}`, `{"include_usage":true}`, `{"continuous_usage_stats":true}`, `{"include_usage":true,"continuous_usage_stats":true}`} {
			shown := strings.Contains(options, `"include_usage":true`) || version == "0.11.2" && strings.HasPrefix(options, "{") && !strings.Contains(options, "include")
			each := shown && strings.Contains(options, "continuous")
			for _, e := range []endpoint{chat, completions} {
				for _, stream := range []bool{true, false} {
					name := fmt.Sprintf("%s, %s, %s, stream %v", version, e, options, stream)
					if !stream && options != `null` {
						continue // vLLM refuses that
					}
					ask := func() answer {
						return r.send(http.MethodPost, string(e), fmt.Sprintf(`{"timings_per_token":true,"max_tokens":%d,"ignore_eos":true,"stream":%v,"stream_options":%s,"messages":[{"role":"user","content":"%[4]d"}],"prompt":"%[4]d"}`,
							tokens, stream, options, prompts.next()+i))
					}
					a := ask()
					// On a busy machine events may come together with the headers, which tells nothing. Not each time.
					for range 5 {
						if stream && strings.Count(a.body, `"timings"`) < tokens-1 {
							a = ask()
						}
					}
					vllm.check(t, a) // the last event has the final figures
					usages, timed, running := strings.Count(a.body, `"usage":{`), strings.Count(a.body, `"timings"`), 0
					for line := range strings.Lines(a.body) {
						if strings.Contains(line, `"choices":[{`) && strings.Contains(line, `"usage":{`) {
							running++
						}
					}
					if !stream {
						if timed != 1 || usages != 1 {
							t.Errorf("%s: %s", name, a.body)
						}
						continue
					}
					if shown != (usages-running == 1) || each != (running > 0) {
						t.Errorf("%s: usage %d times, in tokens' events %d times: %s", name, usages, running, a.body)
					}
					// The first event may have come too soon after the headers to tell anything.
					if timed < tokens-1 || timed > tokens+1 {
						t.Errorf("%s: %d timings", name, timed)
					}
					if !strings.HasSuffix(a.body, doneEvent) || strings.Count(a.body, `"finish_reason":"length"`) != 1 {
						t.Errorf("%s: ends in %s", name, a.body)
					}
				}
			}
		}
		// Two choices are as if nobody had asked.
		a := r.send(http.MethodPost, string(chat), `{"n":2,"timings_per_token":true,"max_tokens":2,"stream":true,"messages":[{"role":"user","content":"x"}]}`)
		if a.status != http.StatusOK || strings.Contains(a.body, `"usage":{`) || strings.Contains(a.body, `"timings"`) {
			t.Errorf("%s, n 2: %d %s", version, a.status, a.body)
		}
	}
}

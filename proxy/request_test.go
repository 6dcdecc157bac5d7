package proxy

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

var (
	quirks011 = quirks{omitted: usageDefaultTrue, nullUsage: true}  // vLLM 0.11
	quirks019 = quirks{omitted: usageDefaultFalse, nullUsage: true} // vLLM 0.19
	quirks032 = quirks{omitted: usageDefaultFalse}                  // vLLM 0.32
)

// TestPlanStream: usage is asked for in every streamed answer, and shown where straight vLLM would have shown it.
func TestPlanStream(t *testing.T) {
	const (
		edited = iota // usage is asked for, and hidden from the client
		shown         // as it is, and the client sees usage
		whole         // as it is, no stream
		odd           // as it is, and so is the answer
	)
	for name, tt := range map[string]struct {
		body string
		want string // "" is body
		kind int
		q    *quirks // nil: the same for all
	}{
		"no stream":              {`{"a":1}`, "", whole, nil},
		"stream false":           {`{"stream":false}`, "", whole, nil},
		"stream null":            {`{"stream":null}`, "", whole, nil},
		"stream":                 {`{"stream":true}`, `{"stream":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"stream 1":               {`{"stream":1}`, "", odd, nil},
		"stream as text":         {`{"stream":"true"}`, "", odd, nil},
		"stream twice":           {`{"stream":true,"stream":true}`, "", odd, nil},
		"stream not, and does":   {`{"stream":false,"stream":true}`, "", odd, nil},
		"stream in another":      {`{"x":{"stream":true}}`, "", whole, nil},
		"Stream":                 {`{"Stream":true}`, "", whole, nil},
		"options null":           {`{"stream":true,"stream_options":null}`, `{"stream":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"options null first":     {`{"stream_options": null , "stream":true}`, `{"stream_options": {"include_usage":true} , "stream":true}`, edited, nil},
		"options without stream": {`{"stream_options":{"include_usage":true}}`, "", odd, nil},
		"options, stream false":  {`{"stream":false,"stream_options":{}}`, "", odd, nil},
		"options null, no stream": {
			`{"stream_options":null}`, "", whole, nil,
		},
		"options a list":        {`{"stream":true,"stream_options":[]}`, "", odd, nil},
		"options a text":        {`{"stream":true,"stream_options":"{}"}`, "", odd, nil},
		"options a number":      {`{"stream":true,"stream_options":1}`, "", odd, nil},
		"options true":          {`{"stream":true,"stream_options":true}`, "", odd, nil},
		"options twice":         {`{"stream":true,"stream_options":{},"stream_options":{}}`, "", odd, nil},
		"options twice, escape": {`{"stream":true,"stream_options":{},"str\u0065am_options":null}`, "", odd, nil},
		"asked":                 {`{"stream":true,"stream_options":{"include_usage":true}}`, "", shown, nil},
		"asked not":             {`{"stream":true,"stream_options":{"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"asked null":            {`{"stream":true,"stream_options":{"include_usage":null}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"asked as text":         {`{"stream":true,"stream_options":{"include_usage":"yes"}}`, "", odd, nil},
		"asked 1":               {`{"stream":true,"stream_options":{"include_usage":1}}`, "", odd, nil},
		"asked twice":           {`{"stream":true,"stream_options":{"include_usage":true,"include_usage":true}}`, "", odd, nil},
		"asked, continuous odd": {`{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":"x"}}`, "", odd, nil},
		"other options":         {`{"stream":true,"stream_options":{"a": [1], "include_usage" : false , "b":{}}}`, `{"stream":true,"stream_options":{"a": [1], "include_usage" : true , "b":{}}}`, edited, nil},

		"empty options, 0.11":     {`{"stream":true,"stream_options":{}}`, "", shown, &quirks011},
		"empty options, 0.19":     {`{"stream":true,"stream_options":{}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, edited, &quirks019},
		"empty options, 0.32":     {`{"stream":true,"stream_options":{ }}`, `{"stream":true,"stream_options":{"include_usage":true }}`, edited, &quirks032},
		"empty options, unknown":  {`{"stream":true,"stream_options":{}}`, "", shown, &quirks{}},
		"options, absent in 0.32": {`{"stream":true,"stream_options":{"a":1 }}`, `{"stream":true,"stream_options":{"a":1,"include_usage":true }}`, edited, &quirks032},

		"empty":          {``, "", odd, nil},
		"not JSON":       {`{"stream":true`, "", odd, nil},
		"cut":            {`{"stream":true,"messages":[`, "", odd, nil},
		"more behind":    {`{"stream":true}{}`, "", odd, nil},
		"a list":         {`[{"stream":true}]`, "", odd, nil},
		"a text":         {`"stream"`, "", odd, nil},
		"null":           {`null`, "", odd, nil},
		"NaN":            {`{"stream":true,"temperature":NaN}`, "", odd, nil}, // Python reads that, JSON has it not
		"Infinity":       {`{"stream":true,"temperature":-Infinity}`, "", odd, nil},
		"BOM":            {"\xef\xbb\xbf" + `{"stream":true}`, "", odd, nil},
		"UTF-16":         {"{\x00\"\x00a\x00\"\x00:\x001\x00}\x00", "", odd, nil},
		"single quotes":  {`{'stream':true}`, "", odd, nil},
		"comma too many": {`{"stream":true,}`, "", odd, nil},
		"too deep":       {`{"stream":true,"x":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}`, "", odd, nil},
		"deep": {
			`{"stream":true,"x":` + strings.Repeat("[", 4_000) + strings.Repeat("]", 4_000) + `}`,
			`{"stream":true,"x":` + strings.Repeat("[", 4_000) + strings.Repeat("]", 4_000) + `,"stream_options":{"include_usage":true}}`, edited, nil,
		},
		"many brackets": {
			`{"stream":true,"x":[` + strings.Repeat("[],", 20_000) + `"[{"]}`,
			`{"stream":true,"x":[` + strings.Repeat("[],", 20_000) + `"[{"],"stream_options":{"include_usage":true}}`, edited, nil,
		},
		"escaped keys":    {`{"str\u0065am":true}`, `{"str\u0065am":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"escaped option":  {`{"stream":true,"stream\u005foptions":{"\u0069nclude_usage":false}}`, `{"stream":true,"stream\u005foptions":{"\u0069nclude_usage":true}}`, edited, nil},
		"lone surrogates": {`{"stream":true,"a":"\ud800","\udfff":1}`, `{"stream":true,"a":"\ud800","\udfff":1,"stream_options":{"include_usage":true}}`, edited, nil},
		"big numbers":     {`{"seed":123456789012345678901234567890,"x":1e999,"y":-0.0,"stream":true}`, `{"seed":123456789012345678901234567890,"x":1e999,"y":-0.0,"stream":true,"stream_options":{"include_usage":true}}`, edited, nil},
		"in a text":       {`{"stream":true,"a":"\"stream_options\":{\"include_usage\":true}, } ] \\"}`, `{"stream":true,"a":"\"stream_options\":{\"include_usage\":true}, } ] \\","stream_options":{"include_usage":true}}`, edited, nil},
		"around":          {" \r\n\t{\"stream\":true} \n", " \r\n\t{\"stream\":true,\"stream_options\":{\"include_usage\":true}} \n", edited, nil},
		"pretty": {
			"{\n  \"stream\": true,\n  \"stream_options\": {\n    \"include_usage\": false\n  }\n}\n",
			"{\n  \"stream\": true,\n  \"stream_options\": {\n    \"include_usage\": true\n  }\n}\n", edited, nil,
		},
		"pretty, absent": {
			"{\n  \"stream\": true\n}\n",
			"{\n  \"stream\": true,\"stream_options\":{\"include_usage\":true}\n}\n", edited, nil,
		},
	} {
		all := []quirks{{}, quirks011, quirks019, quirks032}
		if tt.q != nil {
			all = []quirks{*tt.q}
		}
		for _, q := range all {
			for _, e := range []endpoint{chat, completions} {
				want := plan{endpoint: e}
				switch tt.kind {
				case edited:
					want = plan{endpoint: e, known: true, stream: true, single: true, nullUsage: q.nullUsage && e == completions}
				case shown:
					want = plan{endpoint: e, known: true, stream: true, single: true, showUsage: true, nullUsage: q.nullUsage && e == completions}
				case whole:
					want = plan{endpoint: e, known: true, single: true, showUsage: true, nullUsage: q.nullUsage && e == completions}
				}
				checkPlan(t, name, e, tt.body, tt.want, q, false, want)
				// With --usage always the request is the same, and usage stays where it comes.
				if want.stream {
					want.showUsage = true
				}
				checkPlan(t, name+", usage always", e, tt.body, tt.want, q, true, want)
			}
		}
	}
}

func checkPlan(t *testing.T, name string, e endpoint, body, wantBody string, q quirks, always bool, want plan) {
	t.Helper()
	if wantBody == "" {
		wantBody = body
	}
	want.dialect = e.dialect()
	got, out := planRequest(e, []byte(body), always, q)
	if !got.known {
		got.nullUsage = false // nothing is hidden then
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(plan{})); diff != "" {
		t.Errorf("%s, %s: %s", name, e, diff)
	}
	if string(out) != wantBody {
		t.Errorf("%s, %s: got %.300q, want %.300q", name, e, out, wantBody)
	}
}

// TestPlanContinuous: usage in every event is what the client gets only where it gets usage at all.
func TestPlanContinuous(t *testing.T) {
	for body, tt := range map[string]struct {
		want  string
		shown map[*quirks]bool
	}{
		`{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`: {
			`{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`,
			map[*quirks]bool{{}: true, &quirks011: true, &quirks032: true},
		},
		`{"stream":true,"stream_options":{"continuous_usage_stats":true}}`: {
			`{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":true}}`,
			map[*quirks]bool{{}: true, &quirks011: true, &quirks019: false, &quirks032: false},
		},
		`{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":false}}`: {
			`{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":true}}`,
			map[*quirks]bool{{}: false, &quirks011: false, &quirks032: false},
		},
	} {
		for q, shown := range tt.shown {
			want := tt.want
			if shown {
				want = body
			}
			p, out := planRequest(chat, []byte(body), false, *q)
			if p.showUsage != shown || !p.known || string(out) != want {
				t.Errorf("%s with %+v: %+v, %s", body, *q, p, out)
			}
		}
	}
}

// TestPlanSingle: what several engine requests answer is left alone.
func TestPlanSingle(t *testing.T) {
	for member, want := range map[string]struct{ chat, completions bool }{
		`"n":1`:                                {true, true},
		`"n":1.0`:                              {true, true},
		`"n":null`:                             {true, true},
		`"n":0`:                                {false, false},
		`"n":2`:                                {false, false},
		`"\u006e":2`:                           {false, false},
		`"n":1,"n":2`:                          {false, false}, // Python takes the last
		`"n":2,"n":1`:                          {true, true},
		`"n":"2"`:                              {false, false},
		`"best_of":1`:                          {true, true},
		`"best_of":3`:                          {false, false},
		`"use_beam_search":false`:              {true, true},
		`"use_beam_search":null`:               {true, true},
		`"use_beam_search":true`:               {false, false},
		`"prompt":"a"`:                         {true, true},
		`"prompt":["a"]`:                       {true, true},
		`"prompt":["a","b"]`:                   {true, false},
		`"prompt":[5,6,7]`:                     {true, true},
		`"prompt":[[5,6,7]]`:                   {true, true},
		`"prompt":[[5,6],[7]]`:                 {true, false},
		`"prompt":[]`:                          {true, true},
		`"prompt":null`:                        {true, true},
		`"prompt":""`:                          {true, true},
		`"prompt_embeds":"AA=="`:               {true, true},
		`"prompt_embeds":["AA=="]`:             {true, true},
		`"prompt_embeds":["AA==","BB=="]`:      {true, false},
		`"prompt":"a","prompt_embeds":"AA=="`:  {true, false},
		`"prompt":null,"prompt_embeds":"AA=="`: {true, true},
		`"prompt":"a","prompt_embeds":null`:    {true, true},
	} {
		for e, single := range map[endpoint]bool{chat: want.chat, completions: want.completions} {
			body := `{"model":"m","stream":true,` + member + `}`
			p, out := planRequest(e, []byte(body), false, quirks032)
			if !p.known || p.single != single {
				t.Errorf("%s, %s: known %v, single %v, want %v", member, e, p.known, p.single, single)
			}
			if edited := string(out) != body; edited != single {
				t.Errorf("%s, %s: became %s", member, e, out)
			}
		}
	}
	if p, _ := planRequest(chat, []byte(`{"use_beam_search":"x"}`), false, quirks032); p.known {
		t.Error("use_beam_search of the wrong type")
	}
}

func TestPlanModelAndEcho(t *testing.T) {
	for body, want := range map[string]struct{ model, echo string }{
		`{"model":"m"}`:                  {"m", ""},
		`{"model":"a\u002fb\n"}`:         {"a/b\n", ""},
		`{"model":5}`:                    {},
		`{"model":null}`:                 {},
		`{"messages":[{"content":"x"}]}`: {},
		`{"echo":true,"messages":[{"content":"x"},{"role":"assistant","content":"y\n"}]}`:  {"", "y\n"},
		`{"echo":false,"messages":[{"content":"x"},{"role":"assistant","content":"y\n"}]}`: {},
		`{"echo":true,"messages":[]}`: {},
		`{"echo":true,"messages":5}`:  {},
	} {
		p, out := planRequest(chat, []byte(body), false, quirks032)
		if !p.known || p.model != want.model || p.echo != want.echo || string(out) != body {
			t.Errorf("%s: %+v, %s", body, p, out)
		}
		if p, _ := planRequest(completions, []byte(body), false, quirks032); p.echo != "" {
			t.Errorf("%s: echo %q of a text completion", body, p.echo) // there it comes with the first token
		}
	}
	// The name is known where the request goes through untouched.
	if p, _ := planRequest(chat, []byte(`{"model":"m","stream":5}`), false, quirks032); p.model != "m" || p.known {
		t.Errorf("%+v", p)
	}
}

// TestDeepNesting: gjson's recursion on eight million brackets would end the process.
func TestDeepNesting(t *testing.T) {
	for _, open := range []string{"[", `{"a":`} {
		body := []byte(`{"stream":true,"x":` + strings.Repeat(open, 9<<20))
		if p, out := planRequest(chat, body, false, quirks032); p.known || !bytes.Equal(out, body) {
			t.Error("it was understood")
		}
	}
}

func TestQuirks(t *testing.T) {
	for version, want := range map[string]quirks{
		"0.9.2":                 quirks011,
		"0.11.2":                quirks011,
		"0.17.9":                quirks011,
		"0.18.0":                quirks019,
		"0.18.0rc1":             quirks019,
		"0.19.1":                quirks019,
		"0.20.2":                quirks019,
		"0.21.0":                quirks032,
		"0.32.0":                quirks032,
		"0.32.0+cpu":            quirks032,
		"0.32.1.dev3+g1a2b3c4d": quirks032,
		"1.0.0":                 quirks032,
		"1.0":                   quirks032,
		"":                      {},
	} {
		u := &upstream{known: true, version: version}
		if got := u.quirks(); got != want {
			t.Errorf("%q: %+v", version, got)
		}
		u.forget()
		if got := u.quirks(); got != (quirks{}) {
			t.Errorf("%q, forgotten: %+v", version, got)
		}
	}
}

func TestVersionAtLeast(t *testing.T) {
	for version, want := range map[string]bool{
		"0.24.9": false, "0.25.0": true, "0.25": true, "0.25.0rc2": true, "0.100.0": true, "1.0.0": true, "1": true,
		"0.9": false, "": false, "dev": false, "0.25rc1": true, "0.2.5": false, "99999999999999999999.1": true,
	} {
		if got := atLeast(version, 0, 25); got != want {
			t.Errorf("%q: %v", version, got)
		}
	}
}

// TestReadBodyMemory: a body gets memory for what has come of it, not for what it is said to have.
func TestReadBodyMemory(t *testing.T) {
	const length = 64 << 20
	r := httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(io.ErrUnexpectedEOF))
	r.ContentLength = length
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, _, err := readBody(r, length); err != io.ErrUnexpectedEOF {
		t.Errorf("error %v", err)
	}
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 4*maxGrow {
		t.Errorf("%d bytes for a body of which nothing came", after.TotalAlloc-before.TotalAlloc)
	}
}

// TestReadBody: bodies up to the limit are there whole, longer ones lose no byte.
func TestReadBody(t *testing.T) {
	for _, tt := range []struct {
		size   int
		length bool // the client says how long it is
	}{{0, true}, {0, false}, {9, true}, {10, true}, {10, false}, {11, true}, {11, false}, {100, false}, {100, true}} {
		want := strings.Repeat("x", tt.size)
		r := httptest.NewRequest(http.MethodPost, "/", iotest.OneByteReader(strings.NewReader(want)))
		r.ContentLength = -1
		if tt.length {
			r.ContentLength = int64(tt.size)
		}
		body, rest, err := readBody(r, 10)
		if err != nil {
			t.Fatal(err)
		}
		if (rest != nil) != (tt.size > 10) {
			t.Errorf("%+v: rest %v", tt, rest)
		}
		if rest != nil {
			if body, err = io.ReadAll(rest); err != nil {
				t.Error(err)
			}
		}
		if string(body) != want {
			t.Errorf("%+v: got %q", tt, body)
		}
	}
	r := httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(io.ErrUnexpectedEOF))
	if _, _, err := readBody(r, 10); err != io.ErrUnexpectedEOF {
		t.Errorf("error %v", err)
	}
}

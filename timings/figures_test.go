package timings

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const ms = time.Millisecond

func phases(prefill, decode time.Duration) Phases { return Phases{Some(prefill), Some(decode)} }

func TestAppendJSON(t *testing.T) {
	tests := []struct {
		name string
		in   Figures
		want string
	}{
		{
			"everything",
			Figures{Usage: Usage{1000, 101, Some(900)}, Phases: phases(50*ms, 2*time.Second), Draft: Some(Draft{30, 20}), Estimated: true},
			`{"cache_n":900,"prompt_n":100,"prompt_ms":50,"prompt_per_token_ms":0.5,"prompt_per_second":2000,` +
				`"predicted_n":101,"predicted_ms":2000,"predicted_per_token_ms":19.802,"predicted_per_second":50.5,` +
				`"draft_n":30,"draft_n_accepted":20,"estimated":true}`,
		},
		{
			"cached unknown: all prompt tokens",
			Figures{Usage: Usage{Prompt: 10, Completion: 2}, Phases: phases(10*ms, 20*ms)},
			`{"prompt_n":10,"prompt_ms":10,"prompt_per_token_ms":1,"prompt_per_second":1000,` +
				`"predicted_n":2,"predicted_ms":20,"predicted_per_token_ms":10,"predicted_per_second":100}`,
		},
		{
			"cached known to be none",
			Figures{Usage: Usage{10, 2, Some(0)}},
			`{"cache_n":0,"prompt_n":10,"predicted_n":2}`,
		},
		{
			"more cached than there are",
			Figures{Usage: Usage{10, 2, Some(12)}, Phases: Phases{Prefill: Some(3 * ms)}},
			`{"cache_n":12,"prompt_n":0,"prompt_ms":3,"prompt_per_token_ms":0,"prompt_per_second":0,"predicted_n":2}`,
		},
		{
			"one token",
			Figures{Usage: Usage{10, 1, Some(0)}, Phases: phases(10*ms, 0)},
			`{"cache_n":0,"prompt_n":10,"prompt_ms":10,"prompt_per_token_ms":1,"prompt_per_second":1000,` +
				`"predicted_n":1,"predicted_ms":0,"predicted_per_token_ms":0,"predicted_per_second":0}`,
		},
		{
			"no prefill",
			Figures{Usage: Usage{10, 4, Opt[int]{}}, Phases: Phases{Decode: Some(30 * ms)}, Estimated: true},
			`{"prompt_n":10,"predicted_n":4,"predicted_ms":30,"predicted_per_token_ms":7.5,"predicted_per_second":133.333,"estimated":true}`,
		},
		{
			"three decimals",
			Figures{Usage: Usage{3, 7, Opt[int]{}}, Phases: phases(1234567, 7654321)},
			`{"prompt_n":3,"prompt_ms":1.235,"prompt_per_token_ms":0.412,"prompt_per_second":2430.002,` +
				`"predicted_n":7,"predicted_ms":7.654,"predicted_per_token_ms":1.093,"predicted_per_second":914.516}`,
		},
		{
			"drafts that proposed nothing",
			Figures{Usage: Usage{1, 1, Some(0)}, Draft: Some(Draft{})},
			`{"cache_n":0,"prompt_n":1,"predicted_n":1}`,
		},
		{
			"drafts of which none was accepted",
			Figures{Usage: Usage{1, 1, Some(0)}, Draft: Some(Draft{Proposed: 3})},
			`{"cache_n":0,"prompt_n":1,"predicted_n":1,"draft_n":3,"draft_n_accepted":0}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, string(tt.in.AppendJSON(nil))); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff("x"+tt.want, string(tt.in.AppendJSON([]byte("x")))); d != "" {
				t.Error(d)
			}
		})
	}
}

func FuzzAppendJSON(f *testing.F) {
	f.Add(10, 20, 5, true, int64(1e6), true, int64(1e9), true, 3, 2, true, true)
	f.Add(0, 0, 0, false, int64(0), true, int64(math.MaxInt64), true, 0, 0, false, false)
	f.Add(math.MaxInt, math.MinInt, math.MinInt, true, int64(1), true, int64(math.MinInt64), true, 1, -1, true, false)
	f.Fuzz(func(t *testing.T, prompt, completion, cached int, hasCached bool, prefill int64, hasPrefill bool, decode int64, hasDecode bool,
		proposed, accepted int, hasDraft, estimated bool) {
		in := Figures{
			Usage: Usage{prompt, completion, Opt[int]{cached, hasCached}},
			Phases: Phases{
				Prefill: Opt[time.Duration]{time.Duration(prefill), hasPrefill},
				Decode:  Opt[time.Duration]{time.Duration(decode), hasDecode},
			},
			Draft:     Opt[Draft]{Draft{proposed, accepted}, hasDraft},
			Estimated: estimated,
		}
		out := in.AppendJSON(nil)
		var members map[string]any
		if err := json.Unmarshal(out, &members); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		for name, v := range members {
			x, isNumber := v.(float64)
			if isNumber == (name == "estimated") || math.IsInf(x, 0) || math.IsNaN(x) {
				t.Errorf("%s is %v in %s", name, v, out)
			}
		}
	})
}

func TestUseful(t *testing.T) {
	for _, tt := range []struct {
		in   Phases
		want bool
	}{
		{Phases{}, false},
		{Phases{Prefill: Some(ms)}, true},
		{Phases{Decode: Some(time.Duration(0))}, true},
	} {
		f := Figures{Usage: Usage{1, 1, Some(1)}, Phases: tt.in}
		if got := f.Useful(); got != tt.want {
			t.Errorf("%+v: got %v", tt.in, got)
		}
	}
}

func TestParseSources(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Sources
		err  string
	}{
		{"upstream,native,window,observed", AllSources, ""},
		{" window , observed", Sources{Window, Observed}, ""},
		{"native", Sources{Native}, ""},
		{"", nil, `unknown source "": use some of upstream,native,window,observed`},
		{"window,,native", nil, `unknown source "": use some of upstream,native,window,observed`},
		{"Window", nil, `unknown source "Window": use some of upstream,native,window,observed`},
		{"native,native", nil, `source "native" stands twice`},
	} {
		got, err := ParseSources(tt.in)
		msg := ""
		if err != nil {
			msg = err.Error()
		}
		if d := cmp.Diff(tt.want, got); d != "" || msg != tt.err {
			t.Errorf("%q: error %q, want %q\n%s", tt.in, msg, tt.err, d)
		}
		if err == nil && (!got.Has(tt.want[0]) || got.Has("other")) {
			t.Errorf("%q: Has is wrong", tt.in)
		}
	}
}

func TestFrom(t *testing.T) {
	known, unknown := Usage{10, 5, Some(4)}, Usage{10, 5, Opt[int]{}}
	both := phases(10*ms, 40*ms)
	none := Opt[time.Duration]{}
	for _, tt := range []struct {
		name      string
		got, want Figures
	}{
		{"native", FromNative(known, both, Some(Draft{2, 1})), Figures{Usage: known, Phases: both, Draft: Some(Draft{2, 1}), Source: Native}},
		{"native, cached unknown", FromNative(unknown, both, Opt[Draft]{}), Figures{Usage: unknown, Phases: both, Source: Native, Estimated: true}},
		{"native, no decode", FromNative(known, Phases{Some(ms), none}, Opt[Draft]{}), Figures{Usage: known, Phases: Phases{Some(ms), none}, Source: Native, Estimated: true}},
		{"share", FromShare(unknown, Share{Phases: both, Cached: Some(4)}), Figures{Usage: known, Phases: both, Source: Window}},
		{"share, usage knows better", FromShare(known, Share{Phases: both, Cached: Some(9)}), Figures{Usage: known, Phases: both, Source: Window}},
		{"share, cached unknown", FromShare(unknown, Share{Phases: both}), Figures{Usage: unknown, Phases: both, Source: Window, Estimated: true}},
		{"share, estimated", FromShare(known, Share{Phases: both, Estimated: true}), Figures{Usage: known, Phases: both, Source: Window, Estimated: true}},
		{"observed", FromObserved(known, both), Figures{Usage: known, Phases: both, Source: Observed, Estimated: true}},
		{"observed, in one burst", FromObserved(known, phases(10*ms, 100*time.Microsecond)), Figures{Usage: known, Source: Observed, Estimated: true}},
		{"observed, at once", FromObserved(known, phases(0, 0)), Figures{Usage: known, Source: Observed, Estimated: true}},
		{"observed, one token", FromObserved(Usage{10, 1, Some(0)}, Phases{Some(ms), none}), Figures{Usage: Usage{10, 1, Some(0)}, Phases: phases(ms, 0), Source: Observed, Estimated: true}},
		{"observed, as fast as can be", FromObserved(known, phases(ms, 400*time.Microsecond)), Figures{Usage: known, Phases: phases(ms, 400*time.Microsecond), Source: Observed, Estimated: true}},
	} {
		if d := cmp.Diff(tt.want, tt.got); d != "" {
			t.Errorf("%s:\n%s", tt.name, d)
		}
	}
}

package metrics

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

const tinyKey = `engine="0",model_name="tiny"`

// recorded are the figures of the recorded pages, read from them by hand.
var recorded = map[string]Reading{
	"0.11.2/metrics_full.txt": {ProcessStart: 1.7959630672e+09, Series: []Series{{
		Key: tinyKey, Count: 45, Prefill: 35.68418550499996, Decode: 0.8962629310005923,
		Queue: 0.0032218700007433654, HasQueue: true, PromptTokens: 1230, GenerationTokens: 247,
		PrefixQueries: 1230, PrefixHits: 384, HasRunning: true, HasPrefixCache: true, Generated: 247, HasGenerated: true, Consistent: true,
	}}},
	"0.19.1/metrics_full.txt": {ProcessStart: 1.79596224685e+09, Series: []Series{{
		Key: tinyKey, Count: 45, Prefill: 72.97467686799996, Decode: 3.2965946009994695,
		Queue: 0.0013717310000629368, HasQueue: true, PromptTokens: 1230, GenerationTokens: 247,
		ComputedTokens: 846, HasComputed: true, PrefixQueries: 1230, PrefixHits: 384, HasRunning: true, HasPrefixCache: true, Generated: 247, HasGenerated: true, Consistent: true,
	}}},
	"0.32.0/metrics_full.txt": {ProcessStart: 1.79596262959e+09, Series: []Series{{
		Key: tinyKey, Count: 45, Prefill: 19.069081573999483, Decode: 0.8731280710005649,
		Queue: 0.0008153400001447153, HasQueue: true, PromptTokens: 1230, GenerationTokens: 247,
		ComputedTokens: 846, HasComputed: true, PrefixQueries: 1230, PrefixHits: 384, HasRunning: true, HasPrefixCache: true, Generated: 247, HasGenerated: true, Consistent: true,
	}}},
	"0.11.2/api2_metrics_full.txt": {Series: []Series{{
		Key: tinyKey, Count: 8, Prefill: 0.09596997899961934, Decode: 0.19331795900052384,
		Queue: 0.0006393100002242136, HasQueue: true, PromptTokens: 662, GenerationTokens: 64,
		PrefixQueries: 662, HasRunning: true, HasPrefixCache: true, Generated: 64, HasGenerated: true, Consistent: true,
	}}},
	"0.19.1/api2_metrics_full.txt": {Series: []Series{{
		Key: tinyKey, Count: 8, Prefill: 0.09192316499957087, Decode: 0.25818017999972653,
		Queue: 0.00019748000022445922, HasQueue: true, PromptTokens: 410, GenerationTokens: 79,
		ComputedTokens: 410, HasComputed: true, PrefixQueries: 410, HasRunning: true, HasPrefixCache: true, Generated: 79, HasGenerated: true, Consistent: true,
	}}},
	"0.32.0/api2_metrics_full.txt": {Series: []Series{{
		Key: tinyKey, Count: 8, Prefill: 0.2253407180000977, Decode: 0.4534886489998371,
		Queue: 0.00020086399990759674, HasQueue: true, PromptTokens: 555, GenerationTokens: 64,
		ComputedTokens: 555, HasComputed: true, PrefixQueries: 555, HasRunning: true, HasPrefixCache: true, Generated: 64, HasGenerated: true, Consistent: true,
	}}},
	"0.11.2/api2_metrics_fresh.txt": {Series: []Series{{
		Key: tinyKey, HasQueue: true, HasPrefixCache: true, HasGenerated: true, Consistent: true,
	}}},
	"0.19.1/api2_metrics_fresh.txt": {Series: []Series{{
		Key: tinyKey, HasQueue: true, HasComputed: true, HasPrefixCache: true, HasGenerated: true, Consistent: true,
	}}},
	// Nothing, or not enough for a window.
	"0.11.2/api2_metrics_filtered_slash.txt":        {},
	"0.19.1/api2_metrics_filtered_slash.txt":        {},
	"0.32.0/api2_metrics_filtered_slash.txt":        {},
	"0.19.1/nologstats_metrics_filtered.txt":        {},
	"0.19.1/nologstats_metrics_full.txt":            {ProcessStart: 1.79596346065e+09},
	"0.19.1/metrics_filtered_fresh.txt":             {},
	"0.32.0/metrics_filtered_fresh.txt":             {},
	"0.32.0/metrics_filtered_slash.txt":             {},
	"0.32.0/metrics_slash_openmetrics_filtered.txt": {},
}

func TestParseRecorded(t *testing.T) {
	for name, want := range recorded {
		t.Run(name, func(t *testing.T) {
			body, _ := recording(t, name)
			got, err := Parse(body)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			filtered, err := Parse(filterPage(body, wantedNames()))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, filtered); d != "" {
				t.Errorf("filtered: -want +got:\n%s", d)
			}
		})
	}
}

// TestParseAgreesWithExpfmt holds the scanner against the library's parser.
func TestParseAgreesWithExpfmt(t *testing.T) {
	for name := range recorded {
		if strings.Contains(name, "openmetrics") {
			continue // not the format that either reads
		}
		body, _ := recording(t, name)
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got, err := Parse(body)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, s := range got.Series {
			compare := func(what string, has bool, got float64, family string, pick func(*dto.Metric) float64) {
				t.Helper()
				f := families[namePrefix+family]
				if f == nil || !has {
					if has != (f != nil) {
						t.Errorf("%s: %s: have it: %v, expfmt: %v", name, what, has, f != nil)
					}
					return
				}
				if want := pick(f.Metric[0]); got != want {
					t.Errorf("%s: %s is %v, expfmt says %v", name, what, got, want)
				}
			}
			sum := func(m *dto.Metric) float64 { return m.GetHistogram().GetSampleSum() }
			count := func(m *dto.Metric) float64 { return float64(m.GetHistogram().GetSampleCount()) }
			counter := func(m *dto.Metric) float64 { return m.GetCounter().GetValue() }
			compare("count", true, s.Count, "request_prefill_time_seconds", count)
			compare("prefill", true, s.Prefill, "request_prefill_time_seconds", sum)
			compare("decode", true, s.Decode, "request_decode_time_seconds", sum)
			compare("queue", s.HasQueue, s.Queue, "request_queue_time_seconds", sum)
			compare("prompt", true, s.PromptTokens, "request_prompt_tokens", sum)
			compare("generation", true, s.GenerationTokens, "request_generation_tokens", sum)
			compare("computed", s.HasComputed, s.ComputedTokens, "request_prefill_kv_computed_tokens", sum)
			compare("hits", s.HasPrefixCache, s.PrefixHits, "prefix_cache_hits_total", counter)
			compare("queries", s.HasPrefixCache, s.PrefixQueries, "prefix_cache_queries_total", counter)
			compare("generated", s.HasGenerated, s.Generated, "generation_tokens_total", counter)
		}
	}
}

// pageOf is a page with all required samples of one series, and extra lines.
func pageOf(labels string, value float64, extra string) string {
	var b strings.Builder
	for i, n := range wanted {
		if required&(1<<i) != 0 {
			fmt.Fprintf(&b, "%s%s%s %v\n", namePrefix, n, labels, value)
		}
	}
	return b.String() + extra
}

func TestParseForms(t *testing.T) {
	base := Series{Count: 2, Prefill: 2, Decode: 2, PromptTokens: 2, GenerationTokens: 2, Consistent: true}
	with := func(edit func(*Series)) []Series {
		s := base
		edit(&s)
		return []Series{s}
	}
	key := func(k string) func(*Series) { return func(s *Series) { s.Key = k } }
	for _, tt := range []struct {
		name, page string
		want       []Series
	}{
		{"empty", "", nil},
		{"no labels", pageOf("", 2, ""), with(key(""))},
		{"empty labels", pageOf("{}", 2, ""), with(key(""))},
		{"model only", pageOf(`{model_name="m"}`, 2, ""), with(key(`model_name="m"`))},
		{"engine only", pageOf(`{engine="3"}`, 2, ""), with(key(`engine="3"`))},
		{"other order", pageOf(`{model_name="m",engine="0"}`, 2, ""), with(key(`engine="0",model_name="m"`))},
		{"another label", pageOf(`{engine="0",job="x",model_name="m"}`, 2, ""), with(key(`engine="0",model_name="m"`))},
		{"blanks", pageOf(` { engine = "0" , model_name = "m" , } `, 2, ""), with(key(`engine="0",model_name="m"`))},
		{"escapes", pageOf(`{engine="0",model_name="a\"},b=\\"}`, 2, ""), with(key(`engine="0",model_name="a\"},b=\\"`))},
		{"carriage returns", strings.ReplaceAll(pageOf("", 2, ""), "\n", "\r\n"), with(key(""))},
		{"timestamps", strings.ReplaceAll(pageOf("", 2, ""), "\n", " 1795962629590\n"), with(key(""))},
		{"indented, with comments", "\n# \n#\n" + strings.ReplaceAll(pageOf("", 2, ""), "vllm:", "\t vllm:"), with(key(""))},
		{"split by a label more", pageOf(`{lora="a"}`, 1, "") + pageOf(`{lora="b"}`, 1, ""), with(key(""))},
		{"drafts", pageOf("", 2, "vllm:spec_decode_num_draft_tokens_total 9\nvllm:spec_decode_num_accepted_tokens_total 4\n"),
			with(func(s *Series) { s.HasDraft, s.DraftTokens, s.AcceptedTokens = true, 9, 4 })},
		{"half of the drafts", pageOf("", 2, "vllm:spec_decode_num_draft_tokens_total 9\n"), with(key(""))},
		{"torn", pageOf("", 2, "vllm:request_decode_time_seconds_count 3\n"), with(func(s *Series) { s.Consistent = false })},
		{"torn in computed", pageOf("", 2, "vllm:request_prefill_kv_computed_tokens_count 1\n"), with(func(s *Series) { s.Consistent = false })},
		{"engines, sorted", pageOf(`{engine="1"}`, 2, "") + pageOf(`{engine="0"}`, 2, ""),
			append(with(key(`engine="0"`)), with(key(`engine="1"`))...)},
		{"interleaved engines", interleaved(pageOf(`{engine="1",model_name="m"}`, 2, ""), pageOf(`{engine="10",model_name="m"}`, 2, "")),
			append(with(key(`engine="1",model_name="m"`)), with(key(`engine="10",model_name="m"`))...)},
		{"an engine with hits alone", pageOf("", 2, `vllm:prefix_cache_hits_total{engine="7"} 5`+"\n"), with(key(""))},
		{"prefix is not enough", "vllm:request_prefill_time_seconds_count_x 1\nvllm: 1\nvllm 1\n", nil},
		{"foreign lines", "<html>\n{\"a.b\"} 1\n=\n\xff\x00\n", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse([]byte(tt.page))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got.Series); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

// interleaved has a line of each in turn, as families with several engines do.
func interleaved(a, b string) string {
	var out strings.Builder
	bs := strings.SplitAfter(b, "\n")
	for i, line := range strings.SplitAfter(a, "\n") {
		out.WriteString(line + bs[i])
	}
	return out.String()
}

func TestParseRejects(t *testing.T) {
	line := func(rest string) string { return "vllm:request_prefill_time_seconds_count" + rest }
	for name, page := range map[string]string{
		"no line feed":          line(" 4"),
		"NaN":                   line(" NaN\n"),
		"infinite":              line(" +Inf\n"),
		"too large":             line(" 1e999\n"),
		"negative":              line(" -1\n"),
		"no value":              line("{}\n"),
		"no value, no labels":   line("\n"),
		"hexadecimal":           line(" 0x1p4\n"),
		"underscore":            line(" 1_0\n"),
		"bad timestamp":         line(" 1 x\n"),
		"too many fields":       line(" 1 2 3\n"),
		"open labels":           line(`{engine="0` + "\n"),
		"label without value":   line("{engine} 1\n"),
		"label without quotes":  line("{engine=0} 1\n"),
		"quote escaped away":    line(`{engine="\"} 1` + "\n"),
		"start time with words": processStartName + " now\n",
		"start time, bad label": processStartName + "{x 1\n",
		"too large a page":      strings.Repeat("#\n", MaxPage/2+1),
		"too many series":       manySeries(maxSeries + 1),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := Parse([]byte(page)); err == nil {
				t.Errorf("no error, but %+v", got)
			} else if len(got.Series) != 0 {
				t.Errorf("series beside the error %v", err)
			}
		})
	}
}

func manySeries(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "vllm:request_queue_time_seconds_sum{engine=\"%d\"} 1\n", i)
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	for name := range recorded {
		body, _ := recording(f, name)
		f.Add(filterPage(body, wantedNames()))
	}
	f.Add([]byte(pageOf(`{engine="0",model_name="a\"b"}`, 2, processStartName+" 1e9 5\n")))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := Parse(text)
		if err != nil {
			if len(r.Series) != 0 || r.ProcessStart != 0 {
				t.Fatalf("a reading beside the error %v", err)
			}
			return
		}
		keys := 0
		for i, s := range r.Series {
			keys += len(s.Key)
			if i > 0 && r.Series[i-1].Key >= s.Key {
				t.Fatalf("series %d is not sorted", i)
			}
			for _, v := range []float64{s.Count, s.Prefill, s.Decode, s.Queue, s.PromptTokens, s.GenerationTokens, s.ComputedTokens, s.PrefixQueries, s.PrefixHits, s.Generated, s.DraftTokens, s.AcceptedTokens} {
				if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
					t.Fatalf("series %d: %+v", i, s)
				}
			}
			if !s.HasDraft && s.DraftTokens != 0 {
				t.Fatalf("series %d: %+v", i, s)
			}
		}
		if keys > len(text)+32*len(r.Series) {
			t.Fatalf("%d bytes of keys from %d", keys, len(text))
		}
	})
}

func benchmarkPages(b *testing.B, run func(b *testing.B, page []byte)) {
	full, _ := recording(b, "0.32.0/metrics_full.txt")
	for name, page := range map[string][]byte{"filtered": filterPage(full, wantedNames()), "full": full} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(page)))
			b.ReportAllocs()
			run(b, page)
		})
	}
}

func BenchmarkParse(b *testing.B) {
	benchmarkPages(b, func(b *testing.B, page []byte) {
		for b.Loop() {
			if r, err := Parse(page); err != nil || len(r.Series) != 1 {
				b.Fatal(r, err)
			}
		}
	})
}

// BenchmarkExpfmt is what Parse is compared with in its comment.
func BenchmarkExpfmt(b *testing.B) {
	benchmarkPages(b, func(b *testing.B, page []byte) {
		for b.Loop() {
			parser := expfmt.NewTextParser(model.UTF8Validation)
			if f, err := parser.TextToMetricFamilies(bytes.NewReader(page)); err != nil || len(f) == 0 {
				b.Fatal(err)
			}
		}
	})
}

package proxy

import (
	"encoding/json"
	"strings"
	"testing"
)

// validCases are JSON and what is nearly JSON.
var validCases = []string{
	``, ` `, `{}`, ` { } `, `[]`, `[ ]`, `{"a":1}`, `{"a":1,}`, `{,}`, `{"a"}`, `{"a":}`, `{"a" : 1 , "b":[1 , 2]}`, `{a:1}`, `{1:1}`, `[1,]`, `[,1]`, `[1 2]`,
	`{"a":1]`, `[1}`, `{"a":1}}`, `{}{}`, `{} x`, `[`, `{`, `{"a`, `{"a":`, `{"a":1`, `]`, `}`, `[[]`, `[[]]`, `[{}]`, `[{},[]]`, `,`, `:`,
	`true`, `false`, `null`, `tru`, `truth`, `nul`, `falsey`, `True`,
	`0`, `-0`, `01`, `-`, `-1`, `+1`, `1.`, `1.5`, `.5`, `1e5`, `1E+5`, `1e-05`, `1e`, `1e+`, `1.e5`, `0x1`, `1_0`, `Infinity`, `NaN`, `12345678901234567890`,
	`""`, `"a"`, `"`, `"a`, `"\"`, `"\\"`, `"\""`, `"\x"`, `"\u00e9"`, `"\u00E9"`, `"\u00g9"`, `"\u00e"`, `"\u"`, `"\/\b\f\n\r\t"`, `'a'`, "\"\n\"", "\"\x00\"", "\"\x1f\"",
	"\"\x7f\"", "\"é\"", "\"\xff\xfe\"", "\"\x80\x81\"", "\ufeff{}", "\v{}", "\u00a0{}", "{}\x00",
	`"12345678"`, `"1234567\"8"`, `"12345678\"`, "\"1234567\n\"", `"1234567"x`,
}

func TestValid(t *testing.T) {
	for _, raw := range validCases {
		// Each at each offset within eight bytes, in a text and alone.
		for pad := range 9 {
			for _, s := range []string{strings.Repeat(" ", pad) + raw, `{"` + strings.Repeat("k", pad) + `":` + raw + `}`} {
				if got, want := valid([]byte(s)), json.Valid([]byte(s)); got != want {
					t.Errorf("%q: %v, want %v", s, got, want)
				}
			}
		}
	}
	for _, c := range []byte(strings.Repeat("x", 1) + "\"\\\x00\x1f \x7f\x80\xa2\xdc\xff") {
		for at := range 24 {
			b := []byte(`"` + strings.Repeat("a", 24) + `"`)
			b[1+at] = c
			if got, want := valid(b), json.Valid(b); got != want {
				t.Errorf("%q: %v, want %v", b, got, want)
			}
		}
	}
}

func TestValidDepth(t *testing.T) {
	for _, n := range []int{1, 63, 64, 65, maxDepth, maxDepth + 1} {
		for _, s := range []string{
			strings.Repeat("[", n) + strings.Repeat("]", n),
			strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n),
			strings.Repeat(`[{"a":`, n/2) + "1" + strings.Repeat("}]", n/2),
			"[" + strings.Repeat("{},", n) + `"` + strings.Repeat("[", n) + `"]`, // not deep at all
			strings.Repeat("[", n), // and never ends
		} {
			if got, want := valid([]byte(s)), json.Valid([]byte(s)); got != want {
				t.Errorf("%d deep, %.9s: %v, want %v", n, s, got, want)
			}
		}
	}
}

// FuzzValid compares it with encoding/json.
func FuzzValid(f *testing.F) {
	for _, raw := range validCases {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if got, want := valid(raw), json.Valid(raw); got != want {
			t.Errorf("%q: %v, want %v", raw, got, want)
		}
	})
}

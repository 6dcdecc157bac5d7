package proxy

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/sse"
)

func TestParse(t *testing.T) {
	for raw, want := range map[string][]string{ // key=value, as they stand
		`{}`:                                  {},
		"\n { \t } \r\n":                      {},
		`{"a":1}`:                             {`"a"=1`},
		`{"a":1,"b":[1,{"c":2}],"d":{}}`:      {`"a"=1`, `"b"=[1,{"c":2}]`, `"d"={}`},
		`{"":""}`:                             {`""=""`},
		"{\n \"a\" :\t1e5 ,\r\n\"b\":null\n}": {`"a"=1e5`, `"b"=null`},
		`{"a":"}","b":"\"","c":"\\","d":"\\\"},{"}`: {`"a"="}"`, `"b"="\""`, `"c"="\\"`, `"d"="\\\"},{"`},
		`{"a":["]","}",[[]]] , "b" : -1.5E-3 }`:     {`"a"=["]","}",[[]]]`, `"b"=-1.5E-3`},
		`{"a\"b":true,"\u0061":false}`:              {`"a\"b"=true`, `"\u0061"=false`},
		"{\"\u00e9\":\"\U0001f600\",\"\\ud800\":0}": {"\"\u00e9\"=\"\U0001f600\"", `"\ud800"=0`},
		`{"a":1,"a":2}`: {`"a"=1`, `"a"=2`},
	} {
		var o object
		o.members = make([]member, 3, 8) // of another object
		if !o.parse([]byte(raw)) {
			t.Errorf("%q was not read", raw)
			continue
		}
		got := []string{}
		for _, m := range o.members {
			got = append(got, string(o.raw[m.key:m.keyEnd])+"="+string(o.bytes(m)))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", raw, diff)
		}
	}
	for _, raw := range []string{
		``, ` `, `[]`, `1`, `"a"`, `null`, `true`, `{`, `}`, `{]`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{,"a":1}`, `{"a":1 "b":2}`, `{a:1}`, `{'a':1}`,
		`{"a":01}`, `{"a":+1}`, `{"a":.5}`, `{"a":NaN}`, `{"a":"` + "\n" + `"}`, `{"a":"\x"}`, `{"a":"\u12"}`, `{}{}`, `{} x`, `{"a":tru}`, "\x00{}", "[DONE]",
	} {
		var o object
		if o.parse([]byte(raw)) {
			t.Errorf("%q was read", raw)
		}
	}
}

func TestGet(t *testing.T) {
	var o object
	if !o.parse([]byte(`{"a":1,"b":{"a":9},"\u0061":2,"c":"x\ty","d\"":3}`)) {
		t.Fatal("not read")
	}
	if m, n := o.get("a"); n != 2 || string(o.bytes(m)) != "2" {
		t.Errorf("a: %d, %s", n, o.bytes(m))
	}
	if _, n := o.get("A"); n != 0 || o.has("x") || !o.has("c") || o.has(`d\"`) {
		t.Error("keys are compared in another way than as they are")
	}
	if o.result("c").String() != "x\ty" || o.result("x").Exists() || o.result("b").Get("a").Int() != 9 {
		t.Error("wrong values")
	}
	b, _ := o.get("b")
	sub, ok := o.sub(b)
	if m, n := sub.get("a"); !ok || n != 1 || string(sub.bytes(m)) != "9" {
		t.Error("wrong object in it")
	}
	a, _ := o.get("a")
	if _, ok := o.sub(a); ok {
		t.Error("a number is an object")
	}
}

// edits are objects with what becomes of them when members are taken out and added. Every other byte stays.
var edits = []struct {
	raw    string
	remove string // first letters of keys
	add    []string
	want   string
}{
	{`{"a":1,"b":2,"c":3}`, "", nil, `{"a":1,"b":2,"c":3}`},
	{`{"a":1,"b":2,"c":3}`, "a", nil, `{"b":2,"c":3}`},
	{`{"a":1,"b":2,"c":3}`, "b", nil, `{"a":1,"c":3}`},
	{`{"a":1,"b":2,"c":3}`, "c", nil, `{"a":1,"b":2}`},
	{`{"a":1,"b":2,"c":3}`, "ab", nil, `{"c":3}`},
	{`{"a":1,"b":2,"c":3}`, "bc", nil, `{"a":1}`},
	{`{"a":1,"b":2,"c":3}`, "ac", nil, `{"b":2}`},
	{`{"a":1,"b":2,"c":3}`, "abc", nil, `{}`},
	{`{"a":1,"b":2,"c":3,"d":4,"e":5}`, "ace", nil, `{"b":2,"d":4}`},
	{`{"a":1,"b":2,"c":3,"d":4,"e":5}`, "bd", []string{`"x":1`}, `{"a":1,"c":3,"e":5,"x":1}`},
	{`{"a":1,"a":2}`, "a", []string{`"x":1`}, `{"x":1}`},
	{`{}`, "", []string{`"x":1`}, `{"x":1}`},
	{"{ \n }", "", []string{`"x":1`}, "{\"x\":1 \n }"},
	{`{"a":1}`, "", []string{`"x":1`, `"y":2`}, `{"a":1,"x":1,"y":2}`},
	{`{"a":1}`, "", []string{"", `"y":2`, ""}, `{"a":1,"y":2}`},
	{`{"a":1}`, "", []string{""}, `{"a":1}`},
	{`{"a":1}`, "a", []string{`"x":1`, `"y":2`}, `{"x":1,"y":2}`},
	{`{"a":1,"b":2}`, "b", []string{`"x":1`}, `{"a":1,"x":1}`},
	{`{"a":1,"b":2}`, "a", []string{`"x":1`}, `{"b":2,"x":1}`},
	{"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}\n", "a", nil, "{\n  \"b\": 2,\n  \"c\": 3\n}\n"},
	{"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}\n", "b", nil, "{\n  \"a\": 1,\n  \"c\": 3\n}\n"},
	{"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}\n", "c", []string{`"x":1`}, "{\n  \"a\": 1,\n  \"b\": 2,\"x\":1\n}\n"},
	{"{\n  \"a\": 1\n}\n", "a", nil, "{\n  \n}\n"},
	{"{\n  \"a\": 1\n}\n", "a", []string{`"x":1`}, "{\n  \"x\":1\n}\n"},
	{" {\"a\" : [1, 2] , \"b\" : {\"a\":1}} ", "b", []string{`"x":1`}, " {\"a\" : [1, 2],\"x\":1} "},
	{`{"\u0061":1,"b":"a"}`, "a", nil, `{"b":"a"}`},
}

func TestObjectEdit(t *testing.T) {
	for _, tt := range edits {
		var o object
		if !o.parse([]byte(tt.raw)) {
			t.Fatal(tt.raw)
		}
		var add [][]byte
		for _, a := range tt.add {
			add = append(add, []byte(a))
		}
		remove := func(m member) bool {
			return strings.ContainsFunc(tt.remove, func(r rune) bool { return o.is(m, string(r)) })
		}
		if tt.remove == "" {
			remove = nil
		}
		splices := o.edit(remove, add...)
		at := 0
		for _, s := range splices {
			if s.From < at || s.To < s.From {
				t.Errorf("%q: splices %v overlap", tt.raw, splices)
			}
			at = s.To
		}
		if got := string(splice([]byte(tt.raw), splices)); got != tt.want {
			t.Errorf("%q without %q with %q: got %q, want %q", tt.raw, tt.remove, tt.add, got, tt.want)
		}
	}
}

// TestObjectEditInLines: the same edits where every line of the object is a data line of its own.
func TestObjectEditInLines(t *testing.T) {
	for _, tt := range edits {
		stream := "data: " + strings.ReplaceAll(tt.raw, "\n", "\ndata: ") + "\n\n"
		f := sse.NewFramer(0)
		f.Feed([]byte(stream))
		ev, ok := f.Next()
		if !ok {
			t.Fatal(stream)
		}
		var o object
		if !o.parse(ev.Data(nil)) {
			t.Fatalf("%q was not read", ev.Data(nil))
		}
		var add [][]byte
		for _, a := range tt.add {
			add = append(add, []byte(a))
		}
		edited := ev.Edit(nil, o.edit(func(m member) bool {
			return strings.ContainsFunc(tt.remove, func(r rune) bool { return o.is(m, string(r)) })
		}, add...)...)
		f = sse.NewFramer(0)
		f.Feed(edited)
		ev, ok = f.Next()
		if !ok {
			t.Fatalf("%q is no event", edited)
		}
		// A line end between removed members stays, so only what the JSON means can be compared.
		if got, want := meaning(ev.Data(nil)), meaning([]byte(tt.want)); got != want {
			t.Errorf("%q: got %s, want %s", stream, got, want)
		}
	}
}

func TestHasMember(t *testing.T) {
	for _, tt := range []struct {
		b     string
		first byte
		want  bool
	}{
		{`{"usage":{}}`, '{', true},
		{`{"usage" : {}}`, '{', true},
		{"{\"usage\"\n:\r\t {}}", '{', true},
		{`{"usage":null}`, '{', false},
		{`{"usage":null}`, 'n', true},
		{`{"usage":null}`, 0, true},
		{`{"usage":null},{"usage":{}}`, '{', true},
		{`{"a":"usage","usage":{}}`, '{', true},
		{`["usage"]`, 0, false},
		{`["usage", {}]`, '{', false},
		{`{"x":"\"usage\":{}"}`, '{', false}, // in a text quotes are escaped
		{`{"xusage":{}}`, '{', false},
		{`{"usage`, 0, false},
		{`{"usage"`, 0, false},
		{`{"usage":`, 0, false},
		{`{"usage": `, 0, false},
		{``, 0, false},
		{`data: {"usage":{"usage":1}}`, '1', true},
	} {
		if got := hasMember([]byte(tt.b), []byte(`"usage"`), tt.first); got != tt.want {
			t.Errorf("%q, %q: %v", tt.b, tt.first, got)
		}
	}
}

func TestSplice(t *testing.T) {
	const raw = "abcdef"
	for want, splices := range map[string][]sse.Splice{
		"abcdef":       nil,
		"bcdef":        {{From: 0, To: 1}},
		"abcdefx":      {{From: 6, To: 6, With: []byte("x")}},
		"xbcyyef":      {{From: 0, To: 1, With: []byte("x")}, {From: 3, To: 4, With: []byte("yy")}},
		"axbcdef":      {{From: 1, To: 1, With: []byte("x")}},
		"abc":          {{From: 3, To: 5}, {From: 5, To: 6}},
		"":             {{From: 0, To: 6}},
		"abcdeinstead": {{From: 5, To: 6, With: []byte("instead")}},
	} {
		for _, room := range []int{0, 1, 9} { // behind the bytes
			in := append(make([]byte, 0, len(raw)+room), raw...)
			if got := string(splice(in, splices)); got != want {
				t.Errorf("%v, room for %d: got %q, want %q", splices, room, got, want)
			}
		}
	}
}

func TestObjectSeveral(t *testing.T) {
	for raw, want := range map[string]bool{
		`{}`:                           false,
		`{"a":null}`:                   false,
		`{"a":{"0":1,"1":2}}`:          false,
		`{"a":[]}`:                     false,
		`{"a":[ ]}`:                    false,
		`{"a":[{"x":[1,2]}]}`:          false,
		`{"a":["],["]}`:                false,
		`{"b":[1,2],"a":[1]}`:          false,
		`{"a":[1,2],"a":[1]}`:          false, // the last one counts
		`{"a":[1,2]}`:                  true,
		"{\"a\" : [ [\"]\"] \n, {} ]}": true,
		`{"a":[{"x":1},{"x":2}]}`:      true,
	} {
		var o object
		if !o.parse([]byte(raw)) {
			t.Fatal(raw)
		}
		if got := o.several("a"); got != want {
			t.Errorf("%s: %v", raw, got)
		}
	}
}

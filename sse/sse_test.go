package sse

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type got struct {
	Raw, Data string
	Piece     bool
}

// frame feeds stream in reads of n bytes and returns the events and what was left.
func frame(stream string, n int) (events []got, rest string) {
	f := NewFramer(0)
	take := func() {
		for {
			ev, ok := f.Next()
			if !ok {
				return
			}
			events = append(events, got{string(ev.Raw), string(ev.Data(nil)), ev.Piece})
		}
	}
	for len(stream) > 0 {
		k := min(n, len(stream))
		f.Feed([]byte(stream[:k]))
		stream = stream[k:]
		take()
	}
	return events, string(f.Rest())
}

func TestFraming(t *testing.T) {
	for name, tt := range map[string]struct {
		stream string
		want   []got
		rest   string
	}{
		"lf":                    {"data: a\n\ndata: b\n\n", []got{{"data: a\n\n", "a", false}, {"data: b\n\n", "b", false}}, ""},
		"crlf":                  {"data: a\r\n\r\ndata: b\r\n\r\n", []got{{"data: a\r\n\r\n", "a", false}, {"data: b\r\n\r\n", "b", false}}, ""},
		"cr":                    {"data: a\r\rdata: b\r\r", []got{{"data: a\r\r", "a", false}, {"data: b\r\r", "b", false}}, ""},
		"mixed line ends":       {"event: e\rdata: a\n\r\ndata: b\r\n\n", []got{{"event: e\rdata: a\n\r\n", "a", false}, {"data: b\r\n\n", "b", false}}, ""},
		"no space":              {"data:a\n\n", []got{{"data:a\n\n", "a", false}}, ""},
		"only one space goes":   {"data:  a\n\n", []got{{"data:  a\n\n", " a", false}}, ""},
		"name alone":            {"data\n\n", []got{{"data\n\n", "", false}}, ""},
		"several data lines":    {"data: {\ndata: \"a\"\ndata\ndata:}\n\n", []got{{"data: {\ndata: \"a\"\ndata\ndata:}\n\n", "{\n\"a\"\n\n}", false}}, ""},
		"other fields":          {"id: 1\nevent: x\nretry: 5\ndatax: 1\ndata: a\n\n", []got{{"id: 1\nevent: x\nretry: 5\ndatax: 1\ndata: a\n\n", "a", false}}, ""},
		"comment before data":   {": hi\n\ndata: a\n\n", []got{{": hi\n\n", "", false}, {"data: a\n\n", "a", false}}, ""},
		"comment in event":      {": hi\ndata: a\n\n", []got{{": hi\ndata: a\n\n", "a", false}}, ""},
		"bom":                   {"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", []got{{"\xef\xbb\xbfdata: a\n\n", "a", false}, {"\xef\xbb\xbfdata: b\n\n", "", false}}, ""},
		"blank lines":           {"\n\ndata: a\n\n\n", []got{{"\n", "", false}, {"\n", "", false}, {"data: a\n\n", "a", false}, {"\n", "", false}}, ""},
		"unfinished":            {"data: a\n\ndata: b\n", []got{{"data: a\n\n", "a", false}}, "data: b\n"},
		"utf-8 in data":         {"data: \u00e9\U0001f600\n\n", []got{{"data: \u00e9\U0001f600\n\n", "\u00e9\U0001f600", false}}, ""},
		"nothing":               {"", nil, ""},
		"unfinished bom":        {"\xef\xbb", nil, "\xef\xbb"},
		"cr then another event": {"data: a\n\r\ndata: b\n\n", []got{{"data: a\n\r\n", "a", false}, {"data: b\n\n", "b", false}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			events, rest := frame(tt.stream, len(tt.stream)+1)
			if diff := cmp.Diff(tt.want, events); diff != "" {
				t.Error(diff)
			}
			if rest != tt.rest {
				t.Errorf("rest %q, want %q", rest, tt.rest)
			}
			// At any read boundary the same data comes out, and the same bytes in the same order.
			for n := 1; n < len(tt.stream); n++ {
				cut, cutRest := frame(tt.stream, n)
				var whole []got
				var all strings.Builder
				for _, g := range cut {
					all.WriteString(g.Raw)
					if g.Piece { // the late LF of a CRLF
						whole[len(whole)-1].Raw += g.Raw
						continue
					}
					whole = append(whole, g)
				}
				if diff := cmp.Diff(tt.want, whole); diff != "" {
					t.Errorf("reads of %d: %s", n, diff)
				}
				if got := all.String() + cutRest; got != tt.stream {
					t.Errorf("reads of %d: %q came out of %q", n, got, tt.stream)
				}
			}
		})
	}
}

// A blank line ends its event as soon as its first byte is there, also where an LF may still follow.
func TestEventIsNotLate(t *testing.T) {
	f := NewFramer(0)
	f.Feed([]byte("data: a\r\n\r"))
	if ev, ok := f.Next(); !ok || string(ev.Raw) != "data: a\r\n\r" {
		t.Fatalf("got %q, %v", ev.Raw, ok)
	}
	f.Feed([]byte("\n"))
	if ev, ok := f.Next(); !ok || string(ev.Raw) != "\n" || !ev.Piece {
		t.Fatalf("got %q, %v", ev.Raw, ok)
	}
	if !f.Idle() {
		t.Error("not idle")
	}
}

func TestLongEventsComeInPieces(t *testing.T) {
	for _, end := range []string{"\n\n", "\r\n\r\n", "\r\r"} {
		long := "data: " + strings.Repeat("x", MinLimit) + strings.Repeat("y", 2<<20) + end
		stream := "data: a" + end + long + "data: b" + end
		for _, n := range []int{1 << 10, 32<<10 + 1, 1 << 20, len(stream)} {
			events, rest := frame(stream, n)
			var all strings.Builder
			var whole []string
			for _, g := range events {
				all.WriteString(g.Raw)
				if !g.Piece {
					whole = append(whole, g.Data)
				} else if g.Data != "" {
					t.Errorf("a piece has data")
				}
			}
			if all.String()+rest != stream {
				t.Errorf("%q, reads of %d: bytes differ", end, n)
			}
			want := []string{"a", "b"}
			if n == len(stream) { // it was there whole, nothing had to be buffered for it
				want = []string{"a", long[6 : len(long)-len(end)], "b"}
			}
			if diff := cmp.Diff(want, whole); diff != "" {
				t.Errorf("%q, reads of %d: %.200s", end, n, diff)
			}
		}
	}
}

func TestEventUpToLimitIsWhole(t *testing.T) {
	data := strings.Repeat("x", MinLimit-8)
	events, _ := frame("data: "+data+"\n\n", 64<<10)
	if len(events) != 1 || events[0].Piece || events[0].Data != data {
		t.Errorf("%d events", len(events))
	}
}

func TestLongEventGivesItsBufferBack(t *testing.T) {
	f := NewFramer(0)
	f.Feed([]byte("data: " + strings.Repeat("x", 1<<20) + "\n\n"))
	if _, ok := f.Next(); !ok {
		t.Fatal("no event")
	}
	f.Feed([]byte("data: a\n\n"))
	if cap(f.buf) > keep {
		t.Errorf("%d bytes are kept", cap(f.buf))
	}
}

func TestEdit(t *testing.T) {
	for name, tt := range map[string]struct {
		raw     string
		splices []Splice
		want    string
	}{
		"none":                       {"data: {}\n\n", nil, "data: {}\n\n"},
		"insert":                     {"event: e\ndata: {}\n\n", []Splice{{1, 1, []byte("x")}}, "event: e\ndata: {x}\n\n"},
		"remove and insert":          {"data:{abc}\r\n\r\n", []Splice{{1, 2, nil}, {4, 4, []byte("x")}}, "data:{bcx}\r\n\r\n"},
		"replace":                    {"data: abc\n\n", []Splice{{0, 3, []byte("d")}}, "data: d\n\n"},
		"in the second line":         {"data: {\ndata: a}\n\n", []Splice{{3, 3, []byte("x")}}, "data: {\ndata: ax}\n\n"},
		"remove over two lines":      {"data: {ab\nid: 1\ndata: cd}\n\n", []Splice{{2, 5, nil}, {6, 6, []byte("x")}}, "data: {a\nid: 1\ndata: dx}\n\n"},
		"remove over three lines":    {"data: ab\ndata: cd\ndata: ef\n\n", []Splice{{1, 7, []byte("X")}}, "data: aX\ndata: \ndata: f\n\n"},
		"at the very end of a line":  {"data: a\ndata: b\n\n", []Splice{{1, 1, []byte("x")}, {3, 3, []byte("y")}}, "data: ax\ndata: by\n\n"},
		"two in one line, then last": {"data: abcdef\n\n", []Splice{{0, 1, nil}, {2, 3, nil}, {6, 6, []byte("!")}}, "data: bdef!\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			f := NewFramer(0)
			f.Feed([]byte(tt.raw))
			ev, ok := f.Next()
			if !ok {
				t.Fatal("no event")
			}
			if got := string(ev.Edit([]byte("before "), tt.splices...)); got != "before "+tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestWhole(t *testing.T) {
	f := NewFramer(0)
	if f.Whole([]byte("data: a\n\n")) {
		t.Error("the first bytes may hold a BOM")
	}
	f.Feed([]byte("data: a\n\n"))
	f.Next()
	for p, want := range map[string]bool{
		"data: a\n\n": true, "data: a\n\ndata: b\n\n": true, ": c\n\n": true,
		"data: a\n": false, "data: a\r\n\r\n": false, "data: a\r\rx\n\n": false, "": false,
	} {
		if got := f.Whole([]byte(p)); got != want {
			t.Errorf("Whole(%q) = %v", p, got)
		}
	}
	f.Feed([]byte("data: "))
	f.Next()
	if f.Whole([]byte("a\n\n")) {
		t.Error("whole though an event is under way")
	}
}

// FuzzIdentity: whatever the bytes and the read boundaries, all bytes come out once and in order, the events
// are the same as when read at once, and none is held longer than needed.
func FuzzIdentity(f *testing.F) {
	f.Add([]byte("\xef\xbb\xbfdata: a\r\n\r\n: c\n\nid: 1\rdata:b\r\rdata\n\n"), uint16(3))
	f.Add([]byte("data: {\"a\":1}\n\ndata: [DONE]\n\n"), uint16(1))
	f.Fuzz(func(t *testing.T, stream []byte, n uint16) {
		if n == 0 {
			n = 1
		}
		once, onceRest := frame(string(stream), len(stream)+1)
		cut, cutRest := frame(string(stream), int(n))
		var a, b bytes.Buffer
		var da, db []string
		for _, g := range once {
			a.WriteString(g.Raw)
			if !g.Piece {
				da = append(da, g.Data)
			}
		}
		for _, g := range cut {
			b.WriteString(g.Raw)
			if !g.Piece {
				db = append(db, g.Data)
			}
		}
		a.WriteString(onceRest)
		b.WriteString(cutRest)
		if !bytes.Equal(a.Bytes(), stream) || !bytes.Equal(b.Bytes(), stream) {
			t.Fatalf("bytes differ: %q, %q from %q", a.Bytes(), b.Bytes(), stream)
		}
		if diff := cmp.Diff(da, db); diff != "" {
			t.Fatal(diff)
		}
	})
}

var bare = regexp.MustCompile(`(^|[\r\n]|\xef\xbb\xbf)data[\r\n]`)

// FuzzEdit: an edit with nothing to change is the identity, and an insertion lands at its offset in the data.
func FuzzEdit(f *testing.F) {
	f.Add([]byte("data: {\ndata: }\n\n"), uint16(3))
	f.Fuzz(func(t *testing.T, raw []byte, at uint16) {
		fr := NewFramer(0)
		fr.Feed(raw)
		ev, ok := fr.Next()
		if !ok || !ev.HasData() {
			return
		}
		if got := ev.Edit(nil); !bytes.Equal(got, ev.Raw) {
			t.Fatalf("%q became %q", ev.Raw, got)
		}
		if bare.Match(raw) {
			return // nothing can be inserted into an empty line that has no colon, and no JSON value ends in one
		}
		data := bytes.Clone(ev.Data(nil))
		i := int(at) % (len(data) + 1)
		want := string(data[:i]) + "<x>" + string(data[i:])
		edited := ev.Edit(nil, Splice{i, i, []byte("<x>")})
		again := NewFramer(0)
		again.Feed(edited)
		ev2, ok := again.Next()
		if got := string(ev2.Data(nil)); !ok || got != want {
			t.Fatalf("%q at %d: got %q, want %q", raw, i, got, want)
		}
	})
}

func BenchmarkNext(b *testing.B) {
	event := []byte(`data: {"id":"chatcmpl-8c1ad26a75eb22fc","object":"chat.completion.chunk","created":1795962720,"model":"tiny","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	f := NewFramer(0)
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		f.Feed(event)
		if _, ok := f.Next(); !ok {
			b.Fatal("no event")
		}
	}
}

package patch

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestAnchor: where an anchor stands in a file, and what the file becomes.
func TestAnchor(t *testing.T) {
	const (
		missing = "the lines to replace are not there"
		both    = "both the lines to replace and those to put there are there"
	)
	for _, c := range []struct {
		name          string
		old, new      string
		file          string
		state         State
		at            int
		reason        string
		after, before string // what it turns to, either way
	}{
		{name: "pristine", old: "a\n", new: "b\n", file: "x\na\ny\n", state: Pristine, at: 2, after: "x\nb\ny\n"},
		{name: "patched", old: "a\n", new: "b\n", file: "x\nb\ny\n", state: Patched, at: 2, before: "x\na\ny\n"},
		{name: "none", old: "a\n", new: "b\n", file: "x\ny\n", state: Drifted, at: -1, reason: missing},
		{name: "an empty file", old: "a\n", new: "b\n", file: "", state: Drifted, at: -1, reason: missing},
		{name: "both", old: "a\n", new: "b\n", file: "a\nb\n", state: Drifted, at: -1, reason: both},
		{name: "old twice", old: "a\n", new: "b\n", file: "a\nx\na\n", state: Drifted, at: -1, reason: "the lines to replace are there 2 times, not once"},
		{name: "new three times", old: "a\n", new: "b\n", file: "b\nx\nb\nb\n", state: Drifted, at: -1, reason: "the lines to put there are there 3 times, not once"},
		{name: "first line", old: "a\n", new: "b\n", file: "a\ny\n", state: Pristine, at: 0, after: "b\ny\n"},
		{name: "last line", old: "a\n", new: "b\n", file: "y\na\n", state: Pristine, at: 2, after: "y\nb\n"},
		{name: "the whole file", old: "a\n", new: "b\nc\n", file: "a\n", state: Pristine, at: 0, after: "b\nc\n"},

		{name: "only the end of a line", old: "a\n", new: "b\n", file: "xa\n", state: Drifted, at: -1, reason: missing},
		{name: "only the start of a line", old: "a\n", new: "b\n", file: "ax\n", state: Drifted, at: -1, reason: missing},
		{name: "a whole line among parts of lines", old: "a\n", new: "b\n", file: "xa\na\nax\n", state: Pristine, at: 3, after: "xa\nb\nax\n"},
		{name: "other white space", old: "  a\n", new: "b\n", file: "\ta\n", state: Drifted, at: -1, reason: missing},

		{name: "new contains old at its start", old: "a\n", new: "a\nb\n", file: "a\nb\n", state: Patched, at: 0, before: "a\n"},
		{name: "new contains old at its end", old: "a\n", new: "b\na\n", file: "x\nb\na\n", state: Patched, at: 2, before: "x\na\n"},
		{name: "new contains old, pristine", old: "a\n", new: "a\nb\n", file: "a\nx\n", state: Pristine, at: 0, after: "a\nb\nx\n"},
		{name: "new contains old, and old is elsewhere too", old: "a\n", new: "a\nb\n", file: "a\nb\nx\na\n", state: Drifted, at: -1, reason: both},
		{name: "new contains old twice", old: "a\n", new: "a\nb\na\n", file: "a\nb\na\n", state: Patched, at: 0, before: "a\n"},
		{name: "new contains old, and is there twice", old: "a\n", new: "a\nb\n", file: "a\nb\na\nb\n", state: Drifted, at: -1, reason: "the lines to put there are there 2 times, not once"},
		{name: "old contains new, pristine", old: "a\nb\n", new: "a\n", file: "a\nb\n", state: Pristine, at: 0, after: "a\n"},
		{name: "old contains new, patched", old: "a\nb\n", new: "a\n", file: "x\na\n", state: Patched, at: 2, before: "x\na\nb\n"},
		{name: "old contains new, and new is elsewhere too", old: "a\nb\n", new: "a\n", file: "a\nb\na\n", state: Drifted, at: -1, reason: both},
		{name: "what overlaps itself", old: "a\na\n", new: "b\n", file: "a\na\na\n", state: Drifted, at: -1, reason: "the lines to replace are there 2 times, not once"},
		{name: "old and new overlap only in part", old: "a\nb\n", new: "x\na\n", file: "x\na\nb\n", state: Drifted, at: -1, reason: both},

		{name: "CRLF", old: "a\nb\n", new: "c\n", file: "x\r\na\r\nb\r\ny\r\n", state: Pristine, at: 3, after: "x\r\nc\r\ny\r\n"},
		{name: "CRLF, patched", old: "a\n", new: "c\nd\n", file: "x\r\nc\r\nd\r\n", state: Patched, at: 3, before: "x\r\na\r\n"},
		{name: "CRLF, no final newline", old: "a\nb", new: "c\nd", file: "x\r\na\r\nb", state: Pristine, at: 3, after: "x\r\nc\r\nd"},
		{name: "mixed ends, LF in the anchor's place", old: "a\nb\n", new: "c\n", file: "x\r\na\nb\ny\r\n", state: Pristine, at: 3, after: "x\r\nc\ny\r\n"},
		{name: "mixed ends, CRLF in the anchor's place", old: "a\nb\n", new: "c\n", file: "x\na\r\nb\r\n", state: Drifted, at: -1, reason: missing},
		{name: "mixed ends in the anchor's place", old: "a\nb\n", new: "c\n", file: "a\nb\r\n", state: Drifted, at: -1, reason: missing},
		{name: "a CR alone is no line end", old: "a\n", new: "c\n", file: "x\ra\n", state: Drifted, at: -1, reason: missing},

		{name: "no final newline, both sides", old: "a", new: "b", file: "x\na", state: Pristine, at: 2, after: "x\nb"},
		{name: "no final newline, the file has one", old: "a", new: "b", file: "x\na\n", state: Drifted, at: -1, reason: missing},
		{name: "a final newline, the file has none", old: "a\n", new: "b\n", file: "x\na", state: Drifted, at: -1, reason: missing},
		{name: "the newline is added", old: "a", new: "a\n", file: "x\na", state: Pristine, at: 2, after: "x\na\n"},
		{name: "the newline is added, patched", old: "a", new: "a\n", file: "x\na\n", state: Patched, at: 2, before: "x\na"},
		{name: "the newline is added, and the line is elsewhere too", old: "a", new: "a\n", file: "a\nx\na", state: Pristine, at: 4, after: "a\nx\na\n"},
		{name: "the newline is taken", old: "a\n", new: "a", file: "a\nx\na\n", state: Pristine, at: 4, after: "a\nx\na"},
		{name: "the newline is taken, not at the end", old: "a\n", new: "b", file: "a\nx\n", state: Drifted, at: -1, reason: missing},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := Anchor{Old: []byte(c.old), New: []byte(c.new)}
			got := a.ends([]byte(c.file)).in([]byte(c.file))
			if want := (place{state: c.state, at: c.at, reason: c.reason}); got != want {
				t.Fatalf("%+v, not %+v", got, want)
			}
			f := File{Path: "x.py", Anchors: []Anchor{a}}
			for d, want := range map[direction]string{forward: c.after, backward: c.before} {
				turned, err := f.turn([]byte(c.file), d)
				if want == "" && err == nil {
					t.Errorf("direction %d is not refused: %q", d, turned)
				}
				if want != "" && (err != nil || string(turned) != want) {
					t.Errorf("direction %d: %q, %v, not %q", d, turned, err, want)
				}
			}
		})
	}
}

// TestTurnSeveral: the anchors of one file together.
func TestTurnSeveral(t *testing.T) {
	for _, c := range []struct {
		name    string
		anchors []Anchor
		file    string
		want    string
		refused string
	}{
		{"out of order", []Anchor{anchor("c\n", "C\n"), anchor("a\n", "A\nAA\n")}, "a\nb\nc\n", "A\nAA\nb\nC\n", ""},
		{"side by side", []Anchor{anchor("a\n", "A\n"), anchor("b\n", "B\n")}, "a\nb\n", "A\nB\n", ""},
		{"on one line", []Anchor{anchor("a\nb\n", "A\nb\n"), anchor("b\nc\n", "b\nC\n")}, "a\nb\nc\n", "", "two anchors stand on the same line"},
		{"the same twice", []Anchor{anchor("a\n", "A\n"), anchor("a\n", "B\n")}, "a\n", "", "two anchors stand on the same line"},
		{"one puts there what the other looks for", []Anchor{anchor("a\n", "b\n"), anchor("b\n", "c\n")}, "a\nx\nb\n", "", "anchor 1 is drifted: both the lines"},
		{"they leave the same", []Anchor{anchor("a\n", "c\n"), anchor("b\n", "c\n")}, "a\nb\n", "", "could not be taken back exactly"},
		{"one fits, one does not", []Anchor{anchor("a\n", "A\n"), anchor("z\n", "Z\n")}, "a\nb\n", "", "anchor 2 is drifted: the lines to replace are not there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := File{Path: "x.py", Anchors: c.anchors}.turn([]byte(c.file), forward)
			if c.refused != "" {
				refused(t, err, c.refused)
				return
			}
			if err != nil || string(got) != c.want {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func anchor(old, new string) Anchor { return Anchor{Old: []byte(old), New: []byte(new)} }

func TestNearest(t *testing.T) {
	type near struct {
		Line          int
		Found, Wanted string
	}
	for _, c := range []struct {
		name, old, file string
		want            near
	}{
		{"nothing alike", "a\nb\n", "x\ny\n", near{0, "", "a"}},
		{"an empty file", "\na\n", "", near{0, "", "a"}},
		{"all of it, as it is there twice", "a\nb\n", "x\na\nb\na\nb\n", near{2, "a", "a"}},
		{"one line is other", "a\nb\nc\n", "x\na\nB\nc\n", near{3, "B", "b"}},
		{"the best of several", "a\nb\nc\n", "a\nx\na\nb\ny\n", near{5, "y", "c"}},
		{"only white space is other", "    a\n    b\n", "x\n  a\n  b\n", near{2, "a", "a"}},
		{"blank lines do not count", "\n\na\n", "\n\n\nb\n", near{0, "", "a"}},
		{"it goes on behind the end", "a\nb\nc\n", "x\na", near{2, "a", "b"}},
		{"CRLF", "a\r\nb\r\n", "x\r\na\r\nB\r\n", near{3, "B", "b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			line, found, wanted := Anchor{Old: []byte(c.old)}.nearest([]byte(c.file))
			if diff := cmp.Diff(c.want, near{line, found, wanted}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// FuzzAnchor: a file that an anchor fits turns to a patched one and back to the very same bytes, and no file is both.
func FuzzAnchor(f *testing.F) {
	f.Add("x\na\ny\n", "a\n", "a\nb\n", "")
	f.Add("x\r\na\r\ny\r\n", "a\n", "b\nc\n", "y\n")
	f.Add("a\nb\na", "a", "a\n", "b\n")
	f.Add("a\r\nb", "a\nb", "ab", "")
	f.Fuzz(turnsBack)
}

// TestTurnRandom does the same with texts of few different lines, where anchors meet in every way.
func TestTurnRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	text := func(most int) string {
		var b strings.Builder
		for range 1 + random.IntN(most) {
			b.WriteString([]string{"a\n", "b\n", "c\n", "\n", "a\r\n", "b\r\n"}[random.IntN(6)])
		}
		if random.IntN(4) == 0 {
			b.WriteString("a")
		}
		return b.String()
	}
	for range 30_000 {
		old, second := text(3), text(2)
		turnsBack(t, text(4)+old+text(4)+second, string(lf([]byte(old))), string(lf([]byte(text(3)))), string(lf([]byte(second))))
	}
}

func turnsBack(t *testing.T, file, old, new, second string) {
	if usable([]byte(old), []byte(new)) != nil || len(file) > 1<<12 {
		return
	}
	edit := File{Path: "x.txt", Anchors: []Anchor{anchor(old, new)}}
	if usable([]byte(second), []byte(second+"#\n")) == nil {
		edit.Anchors = append(edit.Anchors, anchor(second, second+"#\n"))
	}
	content := []byte(file)
	was := surveyFile(edit, content, true)
	turned, err := edit.turn(content, forward)
	if err != nil {
		return
	}
	if was.State != Pristine {
		t.Fatalf("%q: it could be patched, but was %s", content, was.State)
	}
	if s := surveyFile(edit, turned, true); s.State != Patched {
		t.Fatalf("%q: patched, it is %s: %v", content, s.State, s.Drifts)
	}
	back, err := edit.turn(turned, backward)
	if err != nil || !bytes.Equal(back, content) {
		t.Fatalf("%q: back it is %q, %v", content, back, err)
	}
	if _, err := edit.turn(turned, forward); err == nil {
		t.Fatalf("%q was patched twice", content)
	}
	if len(edit.Anchors) < 2 {
		return
	}
	// What has one of two anchors is neither.
	half := File{Path: edit.Path, Anchors: edit.Anchors[:1]}
	if between, err := half.turn(content, forward); err == nil {
		if s := surveyFile(edit, between, true); s.State != Drifted {
			t.Fatalf("%q: half patched to %q, it is %s", content, between, s.State)
		}
	}
}

package patch

import (
	"bytes"
	"fmt"
)

// State is where a file, or an anchor in it, stands.
type State string

const (
	Pristine State = "pristine" // as the set expects it before
	Patched  State = "patched"  // as the set leaves it
	Drifted  State = "drifted"  // neither
)

// place is where an anchor stands in a file.
type place struct {
	state  State
	at     int    // offset of the old or new side; -1 where drifted
	reason string // why it is drifted
}

// ends adapts the anchor to a file's line ends. A file that mixes them matches as it is or not at all.
func (a Anchor) ends(content []byte) Anchor {
	crlf := bytes.Count(content, []byte("\r\n"))
	if crlf == 0 || crlf != bytes.Count(content, []byte("\n")) {
		return a
	}
	to := func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")) }
	return Anchor{Old: to(a.Old), New: to(a.New)}
}

// in says where the anchor, already in the file's line ends, stands. When one side contains the other, as where lines are
// added to the end of what is looked for, the inner one does not count inside the outer one.
func (a Anchor) in(content []byte) place {
	atEnd := !bytes.HasSuffix(a.Old, []byte("\n")) || !bytes.HasSuffix(a.New, []byte("\n"))
	old, new := occurrences(content, a.Old, atEnd), occurrences(content, a.New, atEnd)
	oldLeft := outside(old, len(a.Old), new, len(a.New))
	newLeft := outside(new, len(a.New), old, len(a.Old))
	drifted := func(format string, args ...any) place {
		return place{state: Drifted, at: -1, reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case oldLeft == 1 && newLeft == 0:
		return place{state: Pristine, at: old[0]}
	case oldLeft == 0 && newLeft == 1:
		return place{state: Patched, at: new[0]}
	case oldLeft == 0 && newLeft == 0:
		return drifted("the lines to replace are not there")
	case oldLeft > 0 && newLeft > 0:
		return drifted("both the lines to replace and those to put there are there")
	case oldLeft > 1:
		return drifted("the lines to replace are there %d times, not once", oldLeft)
	default:
		return drifted("the lines to put there are there %d times, not once", newLeft)
	}
}

// occurrences returns the offsets at which text stands as whole lines. An anchor with a side that has no final newline
// can only stand at the end of a file.
func occurrences(content, text []byte, atEnd bool) []int {
	var at []int
	for from := 0; from < len(content); {
		i := bytes.Index(content[from:], text)
		if i < 0 {
			break
		}
		start := from + i
		end := start + len(text)
		if (start == 0 || content[start-1] == '\n') && (end == len(content) || content[end-1] == '\n' && !atEnd) {
			at = append(at, start)
		}
		from = start + 1
	}
	return at
}

// outside counts the inner occurrences that are not wholly within an outer one.
func outside(inner []int, innerLen int, outer []int, outerLen int) int {
	n := 0
next:
	for _, i := range inner {
		for _, o := range outer {
			if innerLen < outerLen && o <= i && i+innerLen <= o+outerLen {
				continue next
			}
		}
		n++
	}
	return n
}

// nearest returns the line of content at which most of the anchor's old text stands, and what the first of its lines is
// that does not; 0 where there is nothing like it. White space at the ends does not count, and half a line counts half of
// a whole one at most. Lines count from 1.
func (a Anchor) nearest(content []byte) (line int, found, wanted string) {
	lines, want := bytes.Split(content, []byte("\n")), bytes.Split(bytes.TrimSuffix(a.Old, []byte("\n")), []byte("\n"))
	for i := range lines {
		lines[i] = bytes.TrimSpace(lines[i])
	}
	for k := range want {
		want[k] = bytes.TrimSpace(want[k])
	}
	best, at := 0, 0
	for i := range lines {
		score := 0
		for k := range min(len(want), len(lines)-i) {
			score += likeness(lines[i+k], want[k])
		}
		if score > best {
			best, at = score, i
		}
	}
	if best == 0 {
		return 0, "", firstText(want)
	}
	for k, w := range want {
		if i := min(at+k, len(lines)-1); len(w) > 0 && (at+k >= len(lines) || !bytes.Equal(lines[i], w)) {
			return i + 1, string(lines[i]), string(w)
		}
	}
	return at + 1, string(lines[at]), firstText(want)
}

// likeness says how much of what is wanted a line begins with: twice its length for all of it, 0 for less than half.
func likeness(line, want []byte) int {
	n := 0
	for n < min(len(line), len(want)) && line[n] == want[n] {
		n++
	}
	switch {
	case bytes.Equal(line, want):
		return 2 * n
	case 2*n < len(want):
		return 0
	}
	return n
}

func firstText(lines [][]byte) string {
	for _, l := range lines {
		if len(l) > 0 {
			return string(l)
		}
	}
	return ""
}

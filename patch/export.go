package patch

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Diff returns what Apply would change as a unified diff that `git apply` and `patch -p1` take in the folder that holds
// the package. Of a tree that is patched already it is the diff that would have made it so.
func (t *Tree) Diff(ctx context.Context, r Request) ([]byte, error) {
	unlock, err := t.lockSettled(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	res, before, err := t.plan(r, backward)
	if err != nil {
		return nil, err
	}
	after := before.clone()
	if err := after.apply(res, r.Gate); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, path := range after.paths() {
		old, _, err := before.read(path)
		if err != nil {
			return nil, err
		}
		new := after.files[path]
		if !bytes.Equal(old, new) {
			writeDiff(&out, "vllm/"+path, old, new)
		}
	}
	return out.Bytes(), nil
}

// contextLines is how many unchanged lines a diff has around a change, as everybody's.
const contextLines = 3

// writeDiff writes one file's diff. Sets only ever put a few lines into a file, so a greedy comparison is enough: it finds
// the next place where both sides go on alike.
func writeDiff(out *bytes.Buffer, path string, old, new []byte) {
	fmt.Fprintf(out, "diff --git a/%s b/%s\n", path, path)
	if old == nil {
		fmt.Fprintf(out, "new file mode 100644\n--- /dev/null\n+++ b/%s\n", path)
	} else {
		fmt.Fprintf(out, "--- a/%s\n+++ b/%s\n", path, path)
	}
	a, b := lines(old), lines(new)
	regions := changed(a, b)
	for i := 0; i < len(regions); {
		last := i
		for last+1 < len(regions) && regions[last+1].a-regions[last].aEnd <= 2*contextLines {
			last++
		}
		writeHunk(out, a, b, regions[i:last+1])
		i = last + 1
	}
}

// region is a stretch of lines of the old side, and the one of the new side in its place.
type region struct{ a, aEnd, b, bEnd int }

// changed returns the regions in which two texts differ.
func changed(a, b [][]byte) []region {
	var regions []region
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		if i < len(a) && j < len(b) && bytes.Equal(a[i], b[j]) {
			i, j = i+1, j+1
			continue
		}
		r := region{a: i, b: j}
		i, j = meet(a, b, i, j)
		r.aEnd, r.bEnd = i, j
		regions = append(regions, r)
	}
	return regions
}

// meet returns the next place where both sides have the same lines, enough of them to be no accident: with the fewest
// lines left out before it.
func meet(a, b [][]byte, i, j int) (int, int) {
	for skipped := 1; skipped <= len(a)-i+len(b)-j; skipped++ {
		for da := 0; da <= skipped; da++ {
			x, y := i+da, j+skipped-da
			if x <= len(a) && y <= len(b) && alike(a[x:], b[y:]) {
				return x, y
			}
		}
	}
	return len(a), len(b)
}

func alike(a, b [][]byte) bool {
	n := min(contextLines, max(len(a), len(b)))
	if len(a) < n || len(b) < n {
		return false
	}
	for k := range n {
		if !bytes.Equal(a[k], b[k]) {
			return false
		}
	}
	return true
}

func writeHunk(out *bytes.Buffer, a, b [][]byte, regions []region) {
	first, last := regions[0], regions[len(regions)-1]
	from, to := max(0, first.a-contextLines), min(len(a), last.aEnd+contextLines)
	bFrom := first.b - (first.a - from)
	bTo := last.bEnd + (to - last.aEnd)
	fmt.Fprintf(out, "@@ -%s +%s @@\n", span(from, to), span(bFrom, bTo))
	at := from
	for _, r := range regions {
		writeLines(out, ' ', a[at:r.a])
		writeLines(out, '-', a[r.a:r.aEnd])
		writeLines(out, '+', b[r.b:r.bEnd])
		at = r.aEnd
	}
	writeLines(out, ' ', a[at:to])
}

// span is the place of a hunk: an empty one is named by the line before it.
func span(from, to int) string {
	if from == to {
		return fmt.Sprintf("%d,0", from)
	}
	return fmt.Sprintf("%d,%d", from+1, to-from)
}

func writeLines(out *bytes.Buffer, op byte, lines [][]byte) {
	for _, l := range lines {
		out.WriteByte(op)
		out.Write(l)
		if !bytes.HasSuffix(l, []byte("\n")) {
			out.WriteString("\n\\ No newline at end of file\n")
		}
	}
}

func lines(text []byte) [][]byte { return slices.Collect(bytes.Lines(text)) }

// scriptTemplate is a patcher of its own, with the same rules as this package. Its SETS are empty.
//
//go:embed script.py
var scriptTemplate []byte

// Script returns one Python file that does what Apply, Check and Revert do, for where this program is not to be had. With
// choose it takes the one of the sets that fits, else it applies all of them.
func Script(sets []Set, gate string, choose bool) ([]byte, error) {
	type anchor struct {
		Old []string `json:"old"`
		New []string `json:"new"`
	}
	type file struct {
		Path    string   `json:"path"`
		Content []string `json:"content,omitempty"`
		Anchors []anchor `json:"anchors,omitempty"`
	}
	type set struct {
		Name  string `json:"name"`
		Files []file `json:"files"`
	}
	list := []set{}
	for _, s := range sets {
		if _, err := s.WithGate(gate); err != nil {
			return nil, err
		}
		if err := s.isText(); err != nil {
			return nil, err
		}
		to := set{Name: s.Name}
		for _, f := range s.Files {
			tf := file{Path: f.Path, Content: texts(f.Content)}
			for _, a := range f.Anchors {
				tf.Anchors = append(tf.Anchors, anchor{texts(a.Old), texts(a.New)})
			}
			to.Files = append(to.Files, tf)
		}
		list = append(list, to)
	}
	// JSON of texts, lists and objects alone is Python too.
	var literal bytes.Buffer
	enc := json.NewEncoder(&literal)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(list); err != nil {
		return nil, err
	}
	out := scriptTemplate
	for _, fill := range []struct{ line, with string }{
		{`SETS = []  # the sets go here`, "SETS = " + strings.TrimSpace(literal.String())},
		{`GATE = ""  # the gate goes here`, fmt.Sprintf("GATE = %q", gate)},
		{`CHOOSE = True  # choose the one set that fits, else apply all in order`, "CHOOSE = " + map[bool]string{true: "True", false: "False"}[choose]},
	} {
		if bytes.Count(out, []byte(fill.line+"\n")) != 1 {
			return nil, errors.New("the template of the script has not just one line " + fill.line)
		}
		out = bytes.Replace(out, []byte(fill.line+"\n"), []byte(fill.with+"\n"), 1)
	}
	return out, nil
}

// isText is an error where a set has bytes that a script cannot have in its texts.
func (s Set) isText() error {
	for _, f := range s.Files {
		sides := [][]byte{f.Content}
		for _, a := range f.Anchors {
			sides = append(sides, a.Old, a.New)
		}
		if !utf8.Valid(slices.Concat(sides...)) {
			return fmt.Errorf("the set %s is not UTF-8 in %s, so it cannot be made a script; `vllm-timings patch apply` takes it", s.Name, f.Path)
		}
	}
	return nil
}

func texts(text []byte) []string {
	var out []string
	for l := range bytes.Lines(text) {
		out = append(out, string(l))
	}
	return out
}

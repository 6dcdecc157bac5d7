package patch

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// exported are trees and sets whose diffs are not all alike.
func exported() []struct {
	name  string
	files map[string]string
	diff  string
	gate  string
} {
	long := func(end string, n int, edits map[int]string) string {
		var b strings.Builder
		for i := range n {
			line := "x" + strings.Repeat("'", i%3) + string(rune('a'+i))
			if e, ok := edits[i]; ok {
				line = e
			}
			b.WriteString(line + end)
		}
		return b.String()
	}
	file := func(text string) map[string]string {
		return map[string]string{"__init__.py": "", "v1/x.txt": text}
	}
	diff := func(hunks string) string { return "--- a/vllm/v1/x.txt\n+++ b/vllm/v1/x.txt\n" + hunks }
	return []struct {
		name  string
		files map[string]string
		diff  string
		gate  string
	}{
		{"everything", stock, stockDiff, ""},
		{"a gate", stock, stockDiff, "VLLM_TIMINGS"},
		{"at the start and the end", file(long("\n", 20, nil)), diff("@@ -1 +1,2 @@\n+new\n xa\n@@ -20 +21,2 @@\n x'" + string(rune('a'+19)) + "\n+end\n"), ""},
		{"near each other", file(long("\n", 20, nil)), diff("@@ -1 +1 @@\n-x'e\n+X\n@@ -1 +1 @@\n-x''l\n+Y\n"), ""},
		{"six lines between", file(long("\n", 20, nil)), diff("@@ -1 +1 @@\n-xd\n+X\n@@ -1 +1 @@\n-x'" + "k\n+Y\n"), ""},
		{"seven lines between", file(long("\n", 20, nil)), diff("@@ -1 +1 @@\n-xd\n+X\n@@ -1 +1 @@\n-x''l\n+Y\n"), ""},
		{"CRLF", file(long("\r\n", 20, nil)), diff("@@ -1 +1,2 @@\n x'e\n+X\n@@ -20 +21,2 @@\n x'" + string(rune('a'+19)) + "\n+end\n"), ""},
		{"blank lines all over", file("\n\n\na\n\n\n\n\n\nb\n\n\n"), diff("@@ -1 +1,4 @@\n+\n+\n+X\n a\n@@ -1 +1,3 @@\n-b\n+\n+c\n+\n"), ""},
		{"lines repeated", file("a\nz\nz\nz\nz\nz\nz\nb\nz\nz\nz\n"), diff("@@ -1,1 +1,4 @@\n a\n+z\n+z\n+y\n@@ -1 +1,3 @@\n-b\n+z\n+w\n+z\n"), ""},
		{"a final newline is added", file("a\nb\nc"), diff("@@ -1,2 +1,2 @@\n b\n-c\n\\ No newline at end of file\n+c\n"), ""},
		{"a final newline is taken", file("a\nb\nc\n"), diff("@@ -1,2 +1,2 @@\n b\n-c\n+c\n\\ No newline at end of file\n"), ""},
		{"no final newline, far from the change", file(long("\n", 20, nil) + "end"), diff("@@ -1 +1,2 @@\n xa\n+X\n"), ""},
		{"no final newline, near the change", file("a\nb\nend"), diff("@@ -1 +1,2 @@\n a\n+X\n"), ""},
		{"one line", file("a"), diff("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"), ""},
		{"lines that look like a diff's", file("--- a\n+++ b\n@@ -1 +1 @@\n"), diff("@@ -1,2 +1,2 @@\n ++++ b\n-@@ -1 +1 @@\n+@@ -2 +2 @@\n"), ""},
		{"other encodings", file("caf\xe9\nb\n"), diff("@@ -1,2 +1,2 @@\n caf\xe9\n-b\n+\xffb\f\n"), ""},
	}
}

// TestDiff: the diff makes with git and patch, and as a set, just what Apply makes; and is the same from a patched tree.
func TestDiff(t *testing.T) {
	for _, c := range exported() {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "lines that look like a diff's" {
				c.diff = strings.Replace(c.diff, " ++++ b\n", " +++ b\n", 1)
			}
			tree := newTree(t, c.files)
			r := Request{Sets: []Set{parse(t, "mine", c.diff)}, Gate: c.gate}
			before := listing(t, tree.Dir)
			diff, err := tree.Diff(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "exporting writes nothing", listing(t, tree.Dir), before)
			mustApply(t, tree, r)
			want := tree.texts(t)
			again, err := tree.Diff(t.Context(), r)
			if err != nil || string(again) != string(diff) {
				t.Errorf("from the patched tree: %v\n%s\nnot\n%s", err, again, diff)
			}
			t.Run("set", func(t *testing.T) {
				own := newTree(t, c.files)
				r := Request{Sets: []Set{parse(t, "again", string(diff))}}
				mustApply(t, own, r)
				same(t, "the tree", own.texts(t), want)
				mustRevert(t, own, r)
				same(t, "reverted", listing(t, own.Dir), before)
			})
			for _, commands := range [][][]string{
				{{"git", "apply", "--check", "--whitespace=nowarn"}, {"git", "apply", "--whitespace=nowarn"}},
				{{"patch", "-p1", "--dry-run"}, {"patch", "-p1"}},
			} {
				t.Run(commands[1][0], func(t *testing.T) {
					own := newTree(t, c.files)
					for _, command := range commands {
						cmd := exec.Command(needs.Program(t, command[0], command[0]), command[1:]...)
						cmd.Dir = filepath.Dir(own.Dir)
						cmd.Stdin = strings.NewReader(string(diff))
						if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "fuzz") || strings.Contains(string(out), "offset") {
							t.Fatalf("%v\n%s\n%s", err, out, diff)
						}
					}
					same(t, "the tree", own.texts(t), want)
				})
			}
		})
	}
}

// TestDiffRefuses: where Apply would.
func TestDiffRefuses(t *testing.T) {
	tree, r := stockTree(t)
	writeText(t, tree.name("a.py"), "other = 1\n")
	_, err := tree.Diff(t.Context(), r)
	refused(t, err, "the set mine does not fit", "a.py")

	tree, r = stockTree(t)
	r.Gate = "VLLM_TIMINGS"
	mustApply(t, tree, r)
	r.Gate = ""
	_, err = tree.Diff(t.Context(), r)
	refused(t, err, "is applied with the gate VLLM_TIMINGS, and not with no gate: revert it first")
}

// TestScriptRefuses: what cannot be said in a script.
func TestScriptRefuses(t *testing.T) {
	set := parse(t, "mine", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+x = 'caf\xe9'\n")
	_, err := Script([]Set{set}, "", false)
	refused(t, err, "the set mine is not UTF-8 in a.py, so it cannot be made a script; `vllm-timings patch apply` takes it")
	_, err = Script([]Set{parse(t, "mine", stockDiff)}, "not a name", false)
	refused(t, err, "is no name of an environment variable")
}

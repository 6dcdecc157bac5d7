package patch

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// one is a small change of a.py, below any header.
const one = "@@ -1,3 +1,4 @@\n import os\n+import sys\n \n x = 1\n"

var oneFile = File{Path: "a.py", Anchors: []Anchor{anchor("import os\n\nx = 1\n", "import os\nimport sys\n\nx = 1\n")}}

func TestParseDiff(t *testing.T) {
	two := oneFile
	two.Path = "v1/b.py"
	added := File{Path: "v1/added.py", Content: []byte("x = 1\ny = 2\n")}
	const addedHunk = "@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
	git := "diff --git a/vllm/a.py b/vllm/a.py\nindex 0123456..789abcd 100644\n--- a/vllm/a.py\n+++ b/vllm/a.py\n" + one
	for _, c := range []struct {
		name, diff string
		want       []File
	}{
		{"git diff", git, []File{oneFile}},
		{"git show", "commit 0123\nAuthor: Me <me@x>\n\n    Add it\n    - and more\n    + and more\n\n" + git, []File{oneFile}},
		{"git format-patch", "From 0123 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] Add it\n---\n vllm/a.py | 1 +\n 1 file changed, 1 insertion(+)\n\n" + git + "-- \n2.43.0\n", []File{oneFile}},
		{"diff -u", "--- a/vllm/a.py\n+++ b/vllm/a.py\n" + one, []File{oneFile}},
		{"diff -ru", "diff -ru a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\t2026-01-01 10:00:00.000000000 +0000\n+++ b/vllm/a.py\t2026-01-02 10:00:00.123456789 +0100\n" + one, []File{oneFile}},
		{"of other folders", "--- /tmp/old/site-packages/vllm/a.py\n+++ /tmp/new/vllm/a.py\n" + one, []File{oneFile}},
		{"without prefix", "--- vllm/a.py\n+++ vllm/a.py\n" + one, []File{oneFile}},
		{"a copy beside", "--- vllm/a.py.orig\n+++ vllm/a.py\n" + one, []File{oneFile}},
		{"of a checkout called vllm", "--- /home/me/vllm/vllm/a.py\n+++ /home/me/vllm/vllm/a.py\n" + one, []File{oneFile}},
		{"odd but right paths", "--- a/vllm/./v1//../a.py\n+++ b/vllm/./v1//../a.py\n" + one, []File{oneFile}},
		{"sent with CRLF", strings.ReplaceAll(git, "\n", "\r\n"), []File{oneFile}},
		{"of CRLF files", "--- a/vllm/a.py\n+++ b/vllm/a.py\n" + strings.ReplaceAll(one, "\n", "\r\n"), []File{oneFile}},
		{"blank context without its blank", strings.ReplaceAll(git, "\n \n", "\n\n"), []File{oneFile}},
		{"several files", git + "diff --git a/vllm/v1/b.py b/vllm/v1/b.py\n--- a/vllm/v1/b.py\n+++ b/vllm/v1/b.py\n" + one, []File{oneFile, two}},
		{"text between files", git + "\nAnd now the other.\n\n--- a/vllm/v1/b.py\n+++ b/vllm/v1/b.py\n" + one + "\nThat was it.\n", []File{oneFile, two}},
		{"several hunks", git + "@@ -9 +10 @@\n-y\n+z\n", []File{{Path: "a.py", Anchors: []Anchor{oneFile.Anchors[0], anchor("y\n", "z\n")}}}},
		{"a new file of git", "diff --git a/vllm/v1/added.py b/vllm/v1/added.py\nnew file mode 100644\nindex 0000000..0123456\n--- /dev/null\n+++ b/vllm/v1/added.py\n" + addedHunk, []File{added}},
		{"a new file of diff -N", "diff -ruN a/vllm/v1/added.py b/vllm/v1/added.py\n--- a/vllm/v1/added.py\t1970-01-01 00:00:00.000000000 +0000\n+++ b/vllm/v1/added.py\t2026-01-02 10:00:00.123456789 +0100\n" + addedHunk, []File{added}},
		{"a new file without final newline", "--- /dev/null\n+++ b/vllm/v1/added.py\n@@ -0,0 +1 @@\n+x = 1\n\\ No newline at end of file\n", []File{{Path: "v1/added.py", Content: []byte("x = 1")}}},
		{"no final newline", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,2 @@\n x\n-y\n\\ No newline at end of file\n+z\n\\ No newline at end of file\n", []File{{Path: "a.py", Anchors: []Anchor{anchor("x\ny", "x\nz")}}}},
		{"no final newline, with CRLF", "--- a/vllm/a.py\r\n+++ b/vllm/a.py\r\n@@ -1 +1 @@\r\n-y\r\n\\ No newline at end of file\r\n+z\r\n\\ No newline at end of file\r\n", []File{{Path: "a.py", Anchors: []Anchor{anchor("y", "z")}}}},
		{"a final newline is added", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-y\n\\ No newline at end of file\n+y\n", []File{{Path: "a.py", Anchors: []Anchor{anchor("y", "y\n")}}}},
		{"pasted without its last newline", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-y\n+z", []File{{Path: "a.py", Anchors: []Anchor{anchor("y\n", "z\n")}}}},
		{"compiled code is left out", "Only in b/vllm/__pycache__: a.cpython-312.pyc\nBinary files a/vllm/__pycache__/b.pyc and b/vllm/__pycache__/b.pyc differ\n" + git, []File{oneFile}},
		{"lines that look like headers", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,3 +1,3 @@\n x\n--- a\n+++ b\n y\n", []File{{Path: "a.py", Anchors: []Anchor{anchor("x\n-- a\ny\n", "x\n++ b\ny\n")}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseDiff("mine", []byte(c.diff))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Set{Name: "mine", Files: c.want}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseDiffRefuses(t *testing.T) {
	head := func(path string) string { return "--- a/" + path + "\n+++ b/" + path + "\n" }
	git := func(lines string) string { return "diff --git a/vllm/a.py b/vllm/a.py\n" + lines }
	for _, c := range []struct{ name, diff, want string }{
		{"empty", "", "mine: no change in it: not a unified diff, or an empty one"},
		{"garbage", "hello\n", "mine: no change in it"},
		{"a Python file", "import os\n\n\ndef f():\n    return 1\n", "mine: no change in it"},
		{"a context diff", "*** a/vllm/a.py\n--- b/vllm/a.py\n***************\n*** 1 ****\n! x\n--- 1 ----\n! y\n", "mine: no change in it"},
		{"a hunk without a file", one, "mine: not a unified diff: gitdiff: line 1: patch fragment without file header"},
		{"cut off", head("vllm/a.py") + "@@ -1,3 +1,4 @@\n import os\n+import sys\n", "mine: not a unified diff: gitdiff: line 3: fragment header miscounts lines"},
		{"cut off at the header", head("vllm/a.py") + "@@ -1,3 +1,4 @@\n", "mine: not a unified diff"},
		{"added by hand", head("vllm/a.py") + "@@ -1,1 +1,2 @@\n import os\n+import sys\n+import re\n", "mine: line 6: the hunk of line 3 has more lines than its header counts"},
		{"context added by hand", head("vllm/a.py") + "@@ -1,1 +1,2 @@\n import os\n+import sys\n\n x\n" + head("vllm/b.py") + one, "mine: line 7: the hunk of line 3 has more lines"},
		{"nothing changed", head("vllm/a.py") + "@@ -1,1 +1,1 @@\n import os\n", "mine: not a unified diff: gitdiff: line 5: fragment contains no changes"},
		{"the same put there", head("vllm/a.py") + "@@ -1,1 +1,1 @@\n-import os\n+import os\n", "mine: a.py, hunk 1: it changes nothing"},
		{"no context", head("vllm/a.py") + one + "@@ -10,0 +11,1 @@\n+x = 1\n", "mine: a.py, hunk 2: it has no line to find its place by; make the diff with context lines (diff -U3)"},
		{"blank context", head("vllm/a.py") + "@@ -10,2 +10,3 @@\n \n+x = 1\n \n", "mine: a.py, hunk 1: it has no line to find its place by"},
		{"it leaves nothing", head("vllm/a.py") + "@@ -10,2 +10,1 @@\n-x = 1\n \n", "mine: a.py, hunk 1: it leaves no line to find it again by; make the diff with context lines (diff -U3)"},
		{"a deleted file of git", git("deleted file mode 100644\nindex 0123456..0000000\n--- a/vllm/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"), "mine: a.py: it deletes a file; a set may only edit and add"},
		{"a deleted file of diff", "--- a/vllm/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "mine: a.py: it deletes a file"},
		{"a deleted file of diff -N", "--- a/vllm/a.py\t2026-01-01 10:00:00.000000000 +0000\n+++ b/vllm/a.py\t1970-01-01 00:00:00.000000000 +0000\n@@ -1 +0,0 @@\n-x\n", "mine: a.py: it deletes a file"},
		{"renamed", "diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 90%\nrename from vllm/a.py\nrename to vllm/b.py\n--- a/vllm/a.py\n+++ b/vllm/b.py\n" + one, "mine: b.py: it renames or copies a file"},
		{"copied", "diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 100%\ncopy from vllm/a.py\ncopy to vllm/b.py\n", "mine: b.py: it renames or copies a file"},
		{"binary", git("index 0123456..789abcd 100644\nGIT binary patch\nliteral 3\nKcmZQzXkY*U1poj5\n\nliteral 0\nHcmV?d00001\n\n"), "mine: a.py: it is binary; a set has text only"},
		{"binary without data", git("index 0123456..789abcd 100644\nBinary files a/vllm/a.so and b/vllm/a.so differ\n"), `mine: line 3: "Binary files a/vllm/a.so and b/vllm/a.so differ": what this names is not in the diff`},
		{"binary in a diff -r", "Binary files a/vllm/a.so and b/vllm/a.so differ\n" + head("vllm/a.py") + one, `mine: line 1: "Binary files`},
		{"a new file that diff -r leaves out", head("vllm/a.py") + one + "Only in b/vllm: added.py\n", `mine: line 8: "Only in b/vllm: added.py": what this names is not in the diff; make it with diff -ruN`},
		{"a mode", git("old mode 100644\nnew mode 100755\n"), "mine: a.py: it changes a file's mode"},
		{"a mode and text", git("old mode 100644\nnew mode 100755\nindex 0123456..789abcd\n") + head("vllm/a.py") + one, "mine: a.py: it changes a file's mode"},
		{"a new empty file", git("new file mode 100644\nindex 0000000..e69de29\n"), "mine: a.py: it adds an empty file; put a line into it"},
		{"nothing below the header", git("index 0123456..789abcd 100644\n"), "mine: a.py: no hunk for it"},
		{"a new file in pieces", "--- /dev/null\n+++ b/vllm/a.py\n@@ -0,0 +1 @@\n+x\n@@ -0,0 +5 @@\n+y\n", "mine: a.py: a new file in several hunks"},
		{"lines behind the last", head("vllm/a.py") + "@@ -1,2 +1,2 @@\n x\n\\ No newline at end of file\n-y\n+z\n", `mine: a.py, hunk 1: there are lines behind "\ No newline at end of file"`},
		{"outside of vllm", head("csrc/a.py") + one, `mine: "b/csrc/a.py" is not below a folder vllm; make the diff with git`},
		{"git --no-prefix", "diff --git vllm/a.py vllm/a.py\n--- vllm/a.py\n+++ vllm/a.py\n" + one, `mine: "a.py" is not below a folder vllm; make the diff with git in vLLM's repository (without --no-prefix)`},
		{"a file called vllm", head("vllm") + one, `is not below a folder vllm`},
		{"the folder itself", head("vllm/.") + one, `is not below a folder vllm`},
		{"up and out", head("vllm/../a.py") + one, `mine: "b/vllm/../a.py" is not below a folder vllm`},
		{"down, up and out", head("vllm/v1/../../a.py") + one, `is not below a folder vllm`},
		{"out by an absolute path", head("vllm//../../etc/passwd") + one, `is not below a folder vllm`},
		{"twice the same", head("vllm/a.py") + one + head("vllm/a.py") + one, "mine: a.py is in it twice"},
		{"twice the same under two names", head("vllm/a.py") + one + head("vllm/v1/../a.py") + one, "mine: a.py is in it twice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseDiff("mine", []byte(c.diff))
			refused(t, err, c.want)
		})
	}
}

// TestParseDiffOfTools: what git and diff make of two trees is taken.
func TestParseDiffOfTools(t *testing.T) {
	dir := t.TempDir()
	writeTree(t, filepath.Join(dir, "a", "vllm"), stock)
	writeTree(t, filepath.Join(dir, "b", "vllm"), stockPatched(""))
	for _, command := range [][]string{
		{"diff", "-ruN", "a", "b"},
		{"diff", "-U1", "-rN", "a/vllm", "b/vllm"},
		{"git", "diff", "--no-index", "a/vllm", "b/vllm"},
		{"git", "diff", "--no-index", filepath.Join(dir, "a/vllm"), filepath.Join(dir, "b/vllm")},
	} {
		t.Run(strings.Join(command[:3], " "), func(t *testing.T) {
			cmd := exec.Command(needs.Program(t, command[0], command[0]), command[1:]...)
			cmd.Dir = dir
			diff, err := cmd.Output()
			if code := cmd.ProcessState.ExitCode(); code != 1 {
				t.Fatal(code, err)
			}
			tree := newTree(t, stock)
			mustApply(t, tree, Request{Sets: []Set{parse(t, "mine", string(diff))}})
			same(t, "the tree", tree.texts(t), stockPatched(""))
		})
	}
}

// TestGolden: the files of testdata: one before, the patch, and one after.
func TestGolden(t *testing.T) {
	names, err := filepath.Glob("testdata/*.patch")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			stem := strings.TrimSuffix(name, ".patch")
			before, after := readText(t, stem+".before"), readText(t, stem+".after")
			set := parse(t, "golden", readText(t, name))
			got, err := set.Files[0].turn([]byte(before), forward)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(after, string(got)); diff != "" {
				t.Error(diff)
			}
			if got, err = set.Files[0].turn(got, backward); err != nil || string(got) != before {
				t.Errorf("back: %v\n%s", err, cmp.Diff(before, string(got)))
			}
		})
	}
}

// FuzzParseDiff: it never panics, and what it takes fits its own old side, or is refused there.
func FuzzParseDiff(f *testing.F) {
	f.Add([]byte(stockDiff))
	f.Add([]byte("--- a/vllm/a.py\r\n+++ b/vllm/a.py\r\n@@ -1 +1 @@\r\n-y\r\n\\ No newline at end of file\r\n+z\r\n"))
	f.Add([]byte("diff --git a/vllm/a.py b/vllm/b.py\nold mode 100644\nnew mode 100755\nrename from vllm/a.py\nrename to vllm/b.py\nGIT binary patch\nliteral 3\n"))
	if names, err := filepath.Glob("sets/*/*.patch"); err == nil {
		for _, name := range names {
			if text, err := os.ReadFile(name); err == nil {
				f.Add(text)
			}
		}
	}
	f.Fuzz(func(t *testing.T, diff []byte) {
		set, err := ParseDiff("fuzz", diff)
		if err != nil {
			if err.Error() == "" || set.Files != nil {
				t.Fatalf("%v, %q", set, err)
			}
			return
		}
		var paths []string
		for _, file := range set.Files {
			if !filepath.IsLocal(file.Path) || filepath.Clean(file.Path) != file.Path || file.Path == "." {
				t.Fatalf("the path %q", file.Path)
			}
			if slices.Contains(paths, file.Path) {
				t.Fatalf("%q twice", file.Path)
			}
			paths = append(paths, file.Path)
			if (file.Content == nil) == (len(file.Anchors) == 0) {
				t.Fatalf("it neither edits nor adds %q, or both", file.Path)
			}
			var content []byte
			for i, a := range file.Anchors {
				if usable(a.Old, a.New) != nil {
					t.Fatalf("%q, anchor %d", file.Path, i+1)
				}
				content = append(append(content, a.Old...), "-----\n"...)
			}
			turned, err := file.turn(content, forward)
			if err != nil {
				continue
			}
			if back, err := file.turn(turned, backward); err != nil || string(back) != string(content) {
				t.Fatalf("%q: %q, back %q, %v", file.Path, content, back, err)
			}
		}
	})
}

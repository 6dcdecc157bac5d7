package patch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The exported script and the engine have one set of rules, so most tests here do the same to two copies of a tree, one
// with each, and compare: what they leave, and what they say.

const scriptPrefix = "vllm-timings-patch: "

// scriptSet is a set made of diffs, one a file.
func scriptSet(t *testing.T, name, diff string) Set {
	t.Helper()
	set, err := ParseDiff(name, []byte(diff))
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// scriptFile writes the script for some sets and returns its name.
func scriptFile(t *testing.T, gate string, choose bool, sets ...Set) string {
	t.Helper()
	text, err := Script(sets, gate, choose)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "vllm-timings-patch.py")
	if err := os.WriteFile(name, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

// scriptTree makes a package folder.
func scriptTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "vllm")
	all := map[string]string{"__init__.py": "", "_version.py": "__version__ = version = '0.32.0'\n"}
	maps.Copy(all, files)
	for path, text := range all {
		name := filepath.Join(dir, filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// scriptSnapshot is all that is in a tree.
func scriptSnapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := os.Lstat(name)
		if err != nil {
			return err
		}
		path, _ := filepath.Rel(dir, name)
		text, err := os.ReadFile(name)
		if errors.Is(err, syscall.EISDIR) { // through a link
			err = nil
		}
		all[path] = info.Mode().String() + "\n" + string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func scriptSame(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for path := range maps.Keys(want) {
		if got[path] != want[path] {
			t.Errorf("%s: %s is\n%q\nnot\n%q", what, path, got[path], want[path])
		}
	}
	for path := range maps.Keys(got) {
		if _, ok := want[path]; !ok {
			t.Errorf("%s: %s is left", what, path)
		}
	}
}

// engineTree opens a tree for the engine, which is spared its starts of Python: the script compiles the same files.
func engineTree(t *testing.T, dir string) *Tree {
	t.Helper()
	tree, err := Open(dir, program(t, "true"))
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

type scriptRun struct {
	code        int
	out, stderr string
}

// said is the error that the script printed, without its name.
func (r scriptRun) said() string {
	_, said, _ := strings.Cut(r.stderr, scriptPrefix)
	return strings.TrimSuffix(said, "\n")
}

func runScript(t *testing.T, cmd *exec.Cmd) scriptRun {
	t.Helper()
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if strings.Contains(stderr.String(), "Traceback") {
		t.Errorf("%v: %s", cmd.Args, stderr.String())
	}
	return scriptRun{cmd.ProcessState.ExitCode(), out.String(), stderr.String()}
}

// scriptOK runs the script, which must do it.
func scriptOK(t *testing.T, script, dir string, args ...string) scriptRun {
	t.Helper()
	r := runScript(t, exec.Command(realPython(t), append([]string{"-S", script, "--vllm-dir", dir}, args...)...))
	if r.code != 0 {
		t.Fatalf("%v: exit %d: %s", args, r.code, r.stderr)
	}
	return r
}

const scriptPlain = `--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,3 +1,4 @@
 def f():
-    return 1
+    x = 2  # [vllm-timings]
+    return x  # [vllm-timings]
 
`

// scriptThree edits two files and adds a third one.
const scriptThree = scriptPlain + `--- a/vllm/sub/b.py
+++ b/vllm/sub/b.py
@@ -1 +1,2 @@
 import os
+import sys  # [vllm-timings]
@@ -5,2 +6,2 @@
 Y = 1
-Z = 1
+Z = 3  # [vllm-timings] "é𝄞"
--- /dev/null
+++ b/vllm/sub/added.py
@@ -0,0 +1,3 @@
+# [vllm-timings]
+GATE = "@gate@"
+TEXT = "\u2028 \\ ` + "\t\x01\x7f ü 𝄞" + `"
`

var scriptThreeFiles = map[string]string{
	"a.py":            "import re\n\ndef f():\n    return 1\n\n",
	"sub/__init__.py": "",
	"sub/b.py":        "import os\n\nX = 0\n\nY = 1\nZ = 1\n",
}

func with(files map[string]string, path, text string) map[string]string {
	files = maps.Clone(files)
	files[path] = text
	return files
}

func TestScriptDoesWhatTheEngineDoes(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	tests := []struct {
		name   string
		files  map[string]string
		diffs  []string
		gate   string
		mode   map[string]fs.FileMode
		alter  func(t *testing.T, dir string) // before the first command
		midway func(t *testing.T, dir string) // after the first apply
		fails  string                         // what the first apply's error says; "": it works
		leaves string                         // a file that is not there in the end
		loose  bool                           // their errors may be worded differently
	}{
		{name: "one file", files: map[string]string{"a.py": scriptThreeFiles["a.py"]}, diffs: []string{scriptPlain}},
		{name: "several files and an added one", files: scriptThreeFiles, diffs: []string{scriptThree}},
		{name: "gate", files: scriptThreeFiles, diffs: []string{scriptThree}, gate: "VLLM_TIMINGS"},
		{
			name: "two sets, the second on the first", files: scriptThreeFiles,
			diffs: []string{scriptPlain, "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -3 +3 @@\n-    return x  # [vllm-timings]\n+    return 7\n"},
		},
		{
			name: "two sets, of which one does not fit", files: scriptThreeFiles, fails: "set-2 does not fit",
			diffs: []string{scriptPlain, "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -3 +3 @@\n-    return 1\n+    return 7\n"},
		},
		{name: "a set twice", files: scriptThreeFiles, diffs: []string{scriptPlain, scriptPlain}},
		{
			name: "a folder missing", files: scriptThreeFiles, fails: "but vLLM has no folder new",
			diffs: []string{scriptPlain + "--- /dev/null\n+++ b/vllm/new/added.py\n@@ -0,0 +1 @@\n+# [vllm-timings]\n"},
		},
		{
			name: "lines added where the file ends without a newline", files: map[string]string{"a.py": "A = 1\nB = 2\nA = 1\nB = 2"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -3,2 +3,3 @@\n A = 1\n-B = 2\n\\ No newline at end of file\n+B = 2\n+C = 3\n"},
		},
		{
			name: "only deleted lines", files: map[string]string{"a.py": "A = 1\nB = 2\nC = 3\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,3 +1,2 @@\n A = 1\n-B = 2\n C = 3\n"},
		},
		{
			name: "lines added to what is looked for", files: map[string]string{"a.py": "A = 1\nB = 2\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n A = 1\n+C = 3\n"},
		},
		{name: "CRLF", files: with(scriptThreeFiles, "a.py", "def f():\r\n    return 1\r\n\r\n"), diffs: []string{scriptThree}, gate: "G"},
		{name: "mixed line ends", files: with(scriptThreeFiles, "a.py", "def f():\r\n    return 1\n\r\n"), diffs: []string{scriptPlain}, fails: "the lines to replace are not there; nearest is line 1"},
		{
			name: "no newline at the end", files: map[string]string{"a.py": "A = 1\nB = 2"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,3 @@\n A = 1\n-B = 2\n\\ No newline at end of file\n+B = 3\n+C = 3\n\\ No newline at end of file\n"},
		},
		{
			name: "characters beyond ASCII", files: map[string]string{"a.py": "A = \"äß €\"  # 𝄞\nB = 1\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,3 @@\n A = \"äß €\"  # 𝄞\n+C = \"😀\u2028\u0085\ufeff\"\n B = 1\n"},
		},
		{
			name: "bytes that are no UTF-8, elsewhere in the file", files: map[string]string{"a.py": "# -*- coding: latin-1 -*-\nU = '\xff\xe9'\nA = 1\nB = 1\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,2 @@\n A = 1\n-B = 1\n+B = 2\n"},
		},
		{name: "mode", files: scriptThreeFiles, diffs: []string{scriptThree}, mode: map[string]fs.FileMode{"a.py": 0o755, "sub/b.py": 0o600, "__init__.py": 0o640}},
		{
			name: "compiled code", files: scriptThreeFiles, diffs: []string{scriptThree},
			alter: func(t *testing.T, dir string) {
				cache := filepath.Join(dir, "sub", "__pycache__")
				if err := os.Mkdir(cache, 0o755); err != nil {
					t.Fatal(err)
				}
				for _, name := range []string{"b.cpython-39.pyc", "b.cpython-313.opt-1.pyc", "bb.cpython-39.pyc", "b.txt"} {
					if err := os.WriteFile(filepath.Join(cache, name), nil, 0o644); err != nil {
						t.Fatal(err)
					}
				}
			},
		},
		{name: "drift in the last file", files: with(scriptThreeFiles, "sub/b.py", "import os\n\nX = 0\n\n  Y = 1\nZ = \"\\\" é\"\n"), diffs: []string{scriptThree}, fails: "nearest is line 6"},
		{name: "drift with nothing near", files: with(scriptThreeFiles, "sub/b.py", "\n\n"), diffs: []string{scriptThree}, fails: `no line of it is, such as "import os"`},
		{name: "drift at the end", files: with(scriptThreeFiles, "a.py", "# \nA\ndef f():"), diffs: []string{scriptPlain}, fails: "nearest is line 3"},
		{name: "the old lines twice", files: with(scriptThreeFiles, "sub/b.py", "import os\nimport os\nY = 1\nZ = 1\n"), diffs: []string{scriptThree}, fails: "there 2 times"},
		{name: "both sides", files: with(scriptThreeFiles, "a.py", "def f():\n    return 1\n\ndef f():\n    x = 2  # [vllm-timings]\n    return x  # [vllm-timings]\n\n"), diffs: []string{scriptThree}, fails: "both the lines to replace"},
		{name: "the new lines twice", files: with(scriptThreeFiles, "a.py", strings.Repeat("def f():\n    x = 2  # [vllm-timings]\n    return x  # [vllm-timings]\n\n", 2)), diffs: []string{scriptThree}, fails: "the lines to put there are there 2 times"},
		{name: "one file patched already", files: with(scriptThreeFiles, "a.py", "def f():\n    x = 2  # [vllm-timings]\n    return x  # [vllm-timings]\n\n"), diffs: []string{scriptThree}, fails: "only a part is patched: a.py is, sub/b.py, sub/added.py is not"},
		{name: "one anchor patched already", files: with(scriptThreeFiles, "sub/b.py", "import os\nimport sys  # [vllm-timings]\n\nY = 1\nZ = 1\n"), diffs: []string{scriptThree}, fails: "some of its anchors are patched and some are not"},
		{name: "a file missing", files: map[string]string{"a.py": scriptThreeFiles["a.py"]}, diffs: []string{scriptThree}, fails: "sub/b.py: the file is not there"},
		{name: "another file in the place of the added one", files: with(scriptThreeFiles, "sub/added.py", "mine\n"), diffs: []string{scriptThree}, fails: "there is another file of this name"},
		{name: "another version in the place of the added one", files: with(scriptThreeFiles, "sub/added.py", "mine  # [vllm-timings]\n"), diffs: []string{scriptThree}, fails: "it is of another version of this set, or was edited"},
		{name: "somebody else's patch", files: with(scriptThreeFiles, "deep/er/c.py", "x = 1  # [patch_timings]\n"), diffs: []string{scriptThree}, fails: "deep/er/c.py"},
		{
			name: "does not compile", files: map[string]string{"a.py": "A = 1\nB = 2\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,3 @@\n A = 1\n+C = = 3\n B = 2\n"}, fails: "does not compile", loose: true,
		},
		{
			name: "anchors on one line", files: map[string]string{"a.py": "A = 1\nB = 2\nC = 3\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,2 @@\n A = 1\n-B = 2\n+B = 3\n@@ -2,2 +2,2 @@\n B = 2\n-C = 3\n+C = 4\n"}, fails: "two anchors stand on the same line",
		},
		{
			name: "a linked file", files: scriptThreeFiles, diffs: []string{scriptThree},
			alter: func(t *testing.T, dir string) {
				name, cache := filepath.Join(dir, "a.py"), filepath.Join(filepath.Dir(dir), "cached.py")
				if err := errors.Join(os.Rename(name, cache), os.Symlink(cache, name)); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "a linked folder", files: scriptThreeFiles, diffs: []string{scriptThree}, fails: "symbolic link to a folder",
			alter: func(t *testing.T, dir string) {
				name, cache := filepath.Join(dir, "sub"), filepath.Join(filepath.Dir(dir), "cached")
				if err := errors.Join(os.Rename(name, cache), os.Symlink(cache, name)); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "a folder in the place of a file", files: with(scriptThreeFiles, "sub/added.py/x", ""), diffs: []string{scriptThree}, fails: "is no regular file",
		},
		{
			name: "edited after it was applied", files: scriptThreeFiles, diffs: []string{scriptThree},
			midway: func(t *testing.T, dir string) {
				if err := os.WriteFile(filepath.Join(dir, "sub", "added.py"), []byte("# mine\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "other lines edited after it was applied", files: scriptThreeFiles, diffs: []string{scriptThree},
			midway: func(t *testing.T, dir string) {
				name := filepath.Join(dir, "sub", "b.py")
				text, err := os.ReadFile(name)
				if err := errors.Join(err, os.WriteFile(name, append([]byte("# mine\n"), text...), 0o644)); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "a journal of another kind", files: with(scriptThreeFiles, journalName, `{"phase": "new", "files": []}`), diffs: []string{scriptThree}, fails: `has the phase "new"`,
		},
		{
			name: "a journal of a file that somebody edited", files: with(with(scriptThreeFiles, journalName, `{"phase": "committing", "files": [{"path": "a.py", "old": "1", "new": "2"}]}`), ".a.py.vllm-timings.old", ""),
			diffs: []string{scriptThree}, fails: "keep a copy of that, and put DIR/.a.py.vllm-timings.old, its text",
		},
		{
			name: "a journal of an added file that somebody edited", files: with(scriptThreeFiles, journalName, `{"phase": "committing", "files": [{"path": "a.py", "old": "", "new": "2"}]}`),
			diffs: []string{scriptThree}, fails: "and it was not there before: take it away",
		},
		{
			name: "a journal of a file that is put back and was edited", files: with(scriptThreeFiles, journalName, `{"phase": "committing", "files": [{"path": "a.py", "old": "1", "new": "2"}]}`),
			diffs: []string{scriptThree}, leaves: journalName,
		},
		{
			name: "a journal that is none", files: with(scriptThreeFiles, journalName, "{"), diffs: []string{scriptThree}, fails: "is no journal", loose: true,
		},
		{
			name: "a journal of files elsewhere", files: with(scriptThreeFiles, journalName, `{"phase": "committing", "files": [{"path": "../x", "old": "", "new": ""}]}`),
			diffs: []string{scriptThree}, fails: "outside of the package",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var sets []Set
			for i, diff := range test.diffs {
				sets = append(sets, scriptSet(t, fmt.Sprint("set-", i+1), diff))
			}
			script := scriptFile(t, test.gate, false, sets...)
			byGo, byPython := scriptTree(t, test.files), scriptTree(t, test.files)
			for _, dir := range []string{byGo, byPython} {
				for path, mode := range test.mode {
					if err := os.Chmod(filepath.Join(dir, path), mode); err != nil {
						t.Fatal(err)
					}
				}
				if test.alter != nil {
					test.alter(t, dir)
				}
			}
			tree := engineTree(t, byGo)
			if test.loose {
				tree.Python = python
			}
			before := scriptSnapshot(t, byGo)
			delete(before, test.leaves)
			ctx, r := context.Background(), Request{Sets: sets, Gate: test.gate}
			applied := false
			commands := []string{"check", "apply", "revert"}
			if test.leaves != "" {
				commands = []string{"apply", "revert"}
			} else if test.fails == "" {
				commands = []string{"check", "apply", "check", "apply", "revert", "revert"}
			}
			for i, command := range commands {
				what := fmt.Sprintf("%s, command %d", command, i+1)
				was := scriptSnapshot(t, byPython)
				var err error
				args := []string{"-S", script, "--vllm-dir", byPython} // -S: it starts sooner
				switch command {
				case "check":
					_, err = tree.Check(ctx, r)
					args = append(args, "--check")
				case "apply":
					_, err = tree.Apply(ctx, r)
				case "revert":
					_, err = tree.Revert(ctx, r)
					args = append(args, "--revert")
				}
				got := runScript(t, exec.Command(python, args...))
				switch {
				case err == nil && (got.code != 0 || got.said() != "" && command != "check" && !strings.Contains(got.stderr, "what it had begun is undone: a.py")):
					t.Fatalf("%s: exit %d: %s, where the engine did it", what, got.code, got.stderr)
				case err != nil && (got.code != 1 || got.out != ""):
					t.Fatalf("%s: exit %d: %s, where the engine said: %v", what, got.code, got.out, err)
				case err != nil && !test.loose:
					want := strings.ReplaceAll(err.Error(), byGo, "DIR")
					want = strings.ReplaceAll(want, "`apply` or `revert`", "apply or --revert")
					if said := strings.ReplaceAll(got.said(), byPython, "DIR"); said != want {
						t.Errorf("%s: it says\n%s\nand the engine\n%s", what, said, want)
					}
				}
				now := scriptSnapshot(t, byPython)
				scriptSame(t, what+", script and engine", now, scriptSnapshot(t, byGo))
				if command == "check" || err != nil {
					scriptSame(t, what, now, was)
				}
				if command == "apply" && !applied {
					applied = true
					if (err != nil) != (test.fails != "") || err != nil && !strings.Contains(strings.ReplaceAll(got.said(), byPython, "DIR"), test.fails) {
						t.Errorf("%s: it says %q, not %q", what, got.said(), test.fails)
					}
					if err == nil && maps.Equal(now, before) {
						t.Error("nothing changed")
					}
					if test.midway != nil {
						test.midway(t, byGo)
						test.midway(t, byPython)
					}
				}
			}
			if test.fails == "" && test.midway == nil {
				for path, text := range scriptSnapshot(t, byPython) {
					_, want, _ := strings.Cut(before[path], "\n")
					if _, got, _ := strings.Cut(text, "\n"); got != want {
						t.Errorf("after all, %s is\n%q\nnot\n%q", path, got, want)
					}
				}
			}
		})
	}
}

func TestScriptSays(t *testing.T) {
	t.Parallel()
	dir, script := scriptTree(t, scriptThreeFiles), scriptFile(t, "ON", false, scriptSet(t, "mine", scriptThree))
	tree := dir + " (vLLM 0.32.0)"
	for _, step := range []struct{ arg, want string }{
		{"--check", "mine fits " + tree + "; it is not applied\n"},
		{"--revert", "mine is not applied to " + tree + ": nothing to do\n"},
		{"", "mine is applied to " + tree + ", on where the environment has ON=1: a.py, sub/b.py, sub/added.py\n"},
		{"", "mine is applied already to " + tree + ", on where the environment has ON=1: nothing to do\n"},
		{"--check", "mine is applied to " + tree + ", on where the environment has ON=1\n"},
		{"--revert", "mine is taken out of " + tree + ": a.py, sub/b.py, sub/added.py\n"},
	} {
		r := scriptOK(t, script, dir, strings.Fields(step.arg)...)
		if r.out != step.want || r.stderr != "" {
			t.Errorf("%q: it says %q and %q, not %q", step.arg, r.out, r.stderr, step.want)
		}
	}
}

func TestScriptTakesTheSetThatFits(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	one := scriptSet(t, "one", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 10\n")
	two := scriptSet(t, "two", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 20\n--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1 +1 @@\n-B = 1\n+B = 20\n")
	other := scriptSet(t, "other", "--- a/vllm/c.py\n+++ b/vllm/c.py\n@@ -1,2 +1 @@\n-C = 1\n-C = 2\n+C = 20\n@@ -3 +2 @@\n-D = 1\n+D = 2\n")
	alike := scriptSet(t, "alike", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 30\n")
	for _, test := range []struct {
		name  string
		files map[string]string
		sets  []Set
	}{
		{"only one", map[string]string{"a.py": "A = 1\n"}, []Set{one, two, other}},
		{"the one with more edits", map[string]string{"a.py": "A = 1\n", "b.py": "B = 1\n"}, []Set{one, two, other}},
		{"two alike", map[string]string{"a.py": "A = 1\n"}, []Set{other, one, alike}},
		{"patched", map[string]string{"a.py": "A = 20\n", "b.py": "B = 20\n"}, []Set{one, two, other}},
		{"none, the one with one drift", map[string]string{"a.py": "A = 2\n", "b.py": "B = 1\n"}, []Set{other, two}},
		{"none, the first of equals", map[string]string{"a.py": "A = 2\n"}, []Set{alike, one}},
		{"none, half of it", map[string]string{"c.py": "D = 1\n", "a.py": "A = 0\n"}, []Set{one, other}},
		{"none at all", nil, []Set{other, two, one}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := scriptTree(t, test.files)
			want, err := choose(&Tree{Dir: dir}, test.sets)
			if err == nil && want.State == Drifted {
				err = want.drifted()
			}
			r := runScript(t, exec.Command(python, scriptFile(t, "", true, test.sets...), "--vllm-dir", dir))
			if err != nil {
				if says, _, _ := strings.Cut(err.Error(), ";"); r.code != 1 || !strings.HasPrefix(r.said(), says) {
					t.Errorf("exit %d: %q, not %q", r.code, r.said(), err)
				}
			} else if !strings.HasPrefix(r.out, want.Set+" ") {
				t.Errorf("exit %d: %q%s, not of %s", r.code, r.out, r.stderr, want.Set)
			}
		})
	}
}

func TestScriptRefusesAnotherGate(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set := scriptSet(t, "mine", scriptThree)
	for _, gates := range [][2]string{{"", "ON"}, {"ON", ""}, {"ON", "OTHER"}} {
		dir := scriptTree(t, scriptThreeFiles)
		before := scriptSnapshot(t, dir)
		first, second := scriptFile(t, gates[0], false, set), scriptFile(t, gates[1], false, set)
		scriptOK(t, first, dir)
		was := scriptSnapshot(t, dir)
		tree, err := Open(dir, python)
		if err != nil {
			t.Fatal(err)
		}
		_, want := tree.Apply(context.Background(), Request{Sets: []Set{set}, Gate: gates[1]})
		for _, arg := range []string{"--force", "--check"} {
			if r := runScript(t, exec.Command(python, second, arg, "--vllm-dir", dir)); r.code != 1 || want == nil || r.said() != want.Error() {
				t.Errorf("%q, %s: exit %d: %s, not: %v", gates, arg, r.code, r.stderr, want)
			}
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), was)
		scriptOK(t, second, dir, "--revert")
		scriptSame(t, "reverted with another gate", scriptSnapshot(t, dir), before)
	}
}

func TestScriptLeavesWhatALinkSharesAlone(t *testing.T) {
	t.Parallel()
	script := scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	for name, link := range map[string]func(old, new string) error{
		"hard": os.Link, "symbolic": func(old, new string) error { return errors.Join(os.Rename(old, new), os.Symlink(new, old)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := scriptTree(t, scriptThreeFiles)
			cached := filepath.Join(filepath.Dir(dir), "cached.py")
			if err := link(filepath.Join(dir, "a.py"), cached); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{nil, {"--revert"}} {
				scriptOK(t, script, dir, args...)
				if text, err := os.ReadFile(cached); err != nil || string(text) != scriptThreeFiles["a.py"] {
					t.Errorf("%v: the cache is %q, %v", args, text, err)
				}
			}
			if info, err := os.Lstat(filepath.Join(dir, "a.py")); err != nil || !info.Mode().IsRegular() {
				t.Errorf("a.py is %v, %v", info.Mode(), err)
			}
		})
	}
}

func TestScriptCommandLine(t *testing.T) {
	t.Parallel()
	python, script := realPython(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptPlain))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	dir := scriptTree(t, scriptThreeFiles)
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--help"}, 0, "--revert"},
		{[]string{"--check", "--revert"}, 2, "not allowed with"},
		{[]string{"--vllm", dir}, 2, "--vllm"},
		{[]string{"apply"}, 2, "apply"},
		{[]string{"--vllm-dir"}, 2, "--vllm-dir"},
		{[]string{"--vllm-dir", filepath.Join(dir, "missing")}, 1, "no vllm package at " + filepath.Join(dir, "missing") + ": no such file or directory"},
		{[]string{"--vllm-dir", file}, 1, "it is a file; give the folder vllm"},
		{[]string{"--vllm-dir", filepath.Dir(dir)}, 1, "but one below it: give " + dir},
		{[]string{"--vllm-dir", filepath.Dir(file)}, 1, "it has no __init__.py"},
	} {
		r := runScript(t, exec.Command(python, append([]string{script}, test.args...)...))
		if r.code != test.code || !strings.Contains(r.out+r.stderr, test.says) {
			t.Errorf("%q: exit %d, %s%s", test.args, r.code, r.out, r.stderr)
		}
		if test.code == 1 {
			if _, err := Open(test.args[1], python); err == nil || r.said() != err.Error() {
				t.Errorf("%q: it says %q, and the engine %v", test.args, r.said(), err)
			}
		}
	}
}

func TestScriptFindsVLLM(t *testing.T) {
	t.Parallel()
	python, script := realPython(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptPlain))
	installed, shadow, working := scriptTree(t, scriptThreeFiles), scriptTree(t, scriptThreeFiles), scriptTree(t, scriptThreeFiles)
	beside := filepath.Join(filepath.Dir(script), "vllm")
	if err := os.CopyFS(beside, os.DirFS(installed)); err != nil {
		t.Fatal(err)
	}
	// Importing it would fail.
	if err := os.WriteFile(filepath.Join(installed, "__init__.py"), []byte("raise SystemExit(9)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	namespace := t.TempDir()
	if err := os.Mkdir(filepath.Join(namespace, "vllm"), 0o755); err != nil {
		t.Fatal(err)
	}
	editable := t.TempDir()
	if err := os.WriteFile(filepath.Join(editable, "sitecustomize.py"), []byte("import sys\nsys.path.append("+fmt.Sprintf("%q", filepath.Dir(installed))+")\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	command := t.TempDir()
	if err := os.WriteFile(filepath.Join(command, "vllm"), []byte("#!/opt/venv/bin/python3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, path, cwd, bin string
		code                 int
		says                 []string
	}{
		{"installed", filepath.Dir(installed), filepath.Dir(working), "", 0, []string{"mine fits " + installed, "there is another vLLM at " + working}},
		{"two on the path", filepath.Dir(installed) + ":" + filepath.Dir(shadow), "/", "", 0, []string{"mine fits " + installed, "there is another vLLM at " + shadow}},
		{"the working folder is on the path", filepath.Dir(installed), filepath.Dir(installed), "", 0, []string{"mine fits " + installed}},
		{"editable", editable, "/", "", 0, []string{"mine fits " + installed}},
		{"none", "", filepath.Dir(working), "", 1, []string{"has no vllm installed; run this with the Python that serves"}},
		{"none, but a command", "", "/", command, 1, []string{"has no vllm installed; the command " + command + "/vllm has another one: run this with /opt/venv/bin/python3"}},
		{"a folder of that name", namespace, "/", "", 1, []string{"happens to be called so: " + namespace + "/vllm"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.Command(python, script, "--check")
			cmd.Dir = test.cwd
			cmd.Env = append(os.Environ(), "PYTHONPATH="+test.path, "PYTHONDONTWRITEBYTECODE=1")
			if test.bin != "" {
				cmd.Env = append(cmd.Env, "PATH="+test.bin)
			}
			r := runScript(t, cmd)
			for _, says := range test.says {
				if !strings.Contains(r.out+r.stderr, says) {
					t.Errorf("it does not say %q", says)
				}
			}
			if r.code != test.code || len(test.says) == 1 && test.code == 0 && r.stderr != "" {
				t.Errorf("exit %d", r.code)
			}
			if t.Failed() {
				t.Log(r.out + r.stderr)
			}
		})
	}
}

// scriptUnder runs some lines of Python, and then the script in the same process, with its arguments.
func scriptUnder(python, prelude, script string, args ...string) *exec.Cmd {
	return exec.Command(python, append([]string{"-c", prelude + "\nimport runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n", script}, args...)...)
}

func TestScriptWithoutTheRight(t *testing.T) {
	t.Parallel()
	python, script := realPython(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	// Root may write anywhere, unless it lets go of that: 24 is PR_CAPBSET_DROP, 0 to 2 the rights to give files away and to
	// pass over modes.
	run := func(args ...string) *exec.Cmd {
		drop := "import ctypes, os, sys\nfor c in (0, 1, 2): ctypes.CDLL(None).prctl(24, c, 0, 0, 0)\nos.execv(sys.executable, [sys.executable] + sys.argv[1:])"
		return exec.Command(python, append([]string{"-c", drop, script}, args...)...)
	}
	t.Run("folder", func(t *testing.T) {
		dir := scriptTree(t, scriptThreeFiles)
		before := scriptSnapshot(t, dir)
		sub := filepath.Join(dir, "sub")
		if err := os.Chmod(sub, 0o555); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = os.Chmod(sub, 0o755) }()
		r := runScript(t, run("--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "permission denied: this user may not write there; run it as the user that installed vLLM, or as root. Nothing is changed") {
			t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), before)
		if r := runScript(t, run("--check", "--vllm-dir", dir)); r.code != 0 {
			t.Errorf("--check: exit %d: %s", r.code, r.stderr)
		}
	})
	t.Run("owner", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("only root can make a file of another user")
		}
		dir := scriptTree(t, scriptThreeFiles)
		if err := os.Chown(filepath.Join(dir, "sub", "b.py"), 12345, 12346); err != nil {
			t.Skipf("this root may not give files away: %v", err)
		}
		before := scriptSnapshot(t, dir)
		r := runScript(t, run("--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "operation not permitted: this user may not write there") {
			t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), before)
		scriptOK(t, script, dir)
		info, err := os.Stat(filepath.Join(dir, "sub", "b.py"))
		if err != nil {
			t.Fatal(err)
		}
		if stat := info.Sys().(*syscall.Stat_t); stat.Uid != 12345 || stat.Gid != 12346 {
			t.Errorf("b.py is now of %d:%d", stat.Uid, stat.Gid)
		}
	})
}

// A read-only disk refuses to remove even what is not there. Python asks before each such step, and may be told no.
func TestScriptOnAReadOnlyDisk(t *testing.T) {
	t.Parallel()
	python, script := realPython(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	const readOnly = `
import errno, os, sys
tree = sys.argv[-1]
def hook(event, args):
    write = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (write or event in ("os.rename", "os.remove")) and str(args[0]).startswith(tree):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])
sys.addaudithook(hook)`
	dir := scriptTree(t, scriptThreeFiles)
	for _, test := range []struct {
		arg  string
		code int
		says string
	}{
		{"--check", 0, ""},
		{"--revert", 0, ""},
		{"--force", 1, filepath.Join(dir, journalName+newSuffix) + ": read-only file system: patch while the image is built, or mount a writable copy of the folder. Nothing is changed"},
	} {
		if r := runScript(t, scriptUnder(python, readOnly, script, test.arg, "--vllm-dir", dir)); r.code != test.code || r.said() != test.says {
			t.Errorf("%s: exit %d: %s%s", test.arg, r.code, r.out, r.stderr)
		}
	}
}

// scriptMany is a set that takes the script a while.
func scriptMany(t *testing.T, files int) (Set, map[string]string) {
	t.Helper()
	var diff strings.Builder
	all := map[string]string{}
	for i := range files {
		fmt.Fprintf(&diff, "--- a/vllm/d%d/m%d.py\n+++ b/vllm/d%d/m%d.py\n@@ -1,2 +1,3 @@\n A = %d\n+C = 3  # [vllm-timings]\n B = 2\n", i%3, i, i%3, i, i)
		all[fmt.Sprintf("d%d/m%d.py", i%3, i)] = fmt.Sprintf("A = %d\nB = 2\n%s", i, strings.Repeat("# text\n", 100*i))
	}
	diff.WriteString("--- /dev/null\n+++ b/vllm/d0/added.py\n@@ -0,0 +1 @@\n+# [vllm-timings]\n")
	return scriptSet(t, "many", diff.String()), all
}

// scriptSides returns what a tree is before and after.
func scriptSides(t *testing.T, set Set, files map[string]string) (old, new map[string]string) {
	t.Helper()
	dir := scriptTree(t, files)
	old = scriptSnapshot(t, dir)
	tree, err := Open(dir, realPython(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
		t.Fatal(err)
	}
	return old, scriptSnapshot(t, dir)
}

// scriptPutRight lets the engine undo, if it must, what is left of a script that was killed, and the script what is left in
// a copy of that.
func scriptPutRight(t *testing.T, what, dir, script string, set Set, old, new map[string]string) {
	t.Helper()
	tree := engineTree(t, dir)
	twin := filepath.Join(t.TempDir(), "vllm")
	if err := os.CopyFS(twin, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	ctx, r := context.Background(), Request{Sets: []Set{set}}
	if _, found, err := tree.pending(); err != nil {
		t.Errorf("%s: %v", what, err)
	} else if found {
		if _, err := tree.Check(ctx, r); err == nil || !strings.Contains(err.Error(), "a patcher was cut off") {
			t.Errorf("%s: check: %v", what, err)
		}
		if _, err := tree.recover(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if now := scriptSnapshot(t, dir); !maps.Equal(now, old) {
			scriptSame(t, what+", put right", now, new)
		}
	}
	if _, err := tree.Apply(ctx, r); err != nil {
		t.Errorf("%s: apply: %v", what, err)
	}
	scriptSame(t, what+", apply", scriptSnapshot(t, dir), new)
	scriptOK(t, script, twin, "--revert")
	scriptSame(t, what+", --revert of a copy", scriptSnapshot(t, twin), old)
}

// Python tells a process of its own before it opens, renames, removes or changes a file. There the script is killed, at
// the first, the second and each further one.
func TestScriptKilledAtEachStep(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, scriptThreeFiles)
	const kill = `
import os, signal, sys
left = int(sys.argv.pop(1))
tree = os.path.realpath(sys.argv[-1])
def hook(event, args):
    global left
    if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if event in ("open", "os.rename", "os.remove", "os.chmod", "os.chown") and str(args[0]).startswith(tree):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)`
	for _, way := range []string{"--force", "--revert"} {
		at := 0
		for ; ; at++ {
			dir := scriptTree(t, scriptThreeFiles)
			if way == "--revert" {
				if _, err := engineTree(t, dir).Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command(python, "-S", "-c", kill+"\nimport runpy\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n", fmt.Sprint(at), script, way, "--vllm-dir", dir)
			r := runScript(t, cmd)
			if r.code == 0 {
				break
			}
			if r.code != -1 {
				t.Fatalf("%s, step %d: exit %d: %s", way, at, r.code, r.stderr)
			}
			scriptPutRight(t, fmt.Sprintf("%s, killed at step %d", way, at), dir, script, set, old, new)
		}
		t.Logf("%s has %d steps", way, at)
		if at < 15 {
			t.Errorf("%s: only %d steps were seen", way, at)
		}
	}
}

func TestScriptKilledAtAnyTime(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set, files := scriptMany(t, 12)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, files)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	journals := 0
	for i := range 40 {
		dir := scriptTree(t, files)
		args := []string{"-S", script, "--vllm-dir", dir}
		if i%2 == 1 {
			if _, err := engineTree(t, dir).Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
				t.Fatal(err)
			}
			args = append(args, "--revert")
		}
		cmd := exec.Command(python, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(ended)
		}()
		// Most of the time it starts and reads. What counts is from the journal on.
		journal := filepath.Join(dir, journalName)
	wait:
		for {
			if _, err := os.Lstat(journal); err == nil {
				break
			}
			select {
			case <-ended:
				break wait
			case <-time.After(100 * time.Microsecond):
			}
		}
		delay := time.Duration(random.Int64N(int64(80 * time.Millisecond)))
		if i%4 > 1 {
			delay /= 10 // on a fast disk it takes only some milliseconds
		}
		time.Sleep(delay)
		_ = cmd.Process.Kill()
		<-ended
		if _, err := os.Lstat(journal); err == nil {
			journals++
		}
		scriptPutRight(t, fmt.Sprintf("seed %d, run %d, %v", seed, i, args[4:]), dir, script, set, old, new)
	}
	t.Logf("seed %d: %d of 40 left a journal", seed, journals)
}

func TestScriptPutsTheEngineRight(t *testing.T) {
	t.Parallel()
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, scriptThreeFiles)
	dead := errors.New("dead")
	for _, d := range []direction{forward, backward} {
		for at := 0; ; at++ {
			dir := scriptTree(t, scriptThreeFiles)
			tree := engineTree(t, dir)
			ctx, r := context.Background(), Request{Sets: []Set{set}}
			if d == backward {
				if _, err := tree.Apply(ctx, r); err != nil {
					t.Fatal(err)
				}
			}
			left, last := at, ""
			tree.before = func(step, path string) error {
				if left == 0 {
					return dead
				}
				left--
				last = step + " " + path
				return nil
			}
			if _, err := tree.run(ctx, r, d); err == nil {
				break
			}
			twin := filepath.Join(t.TempDir(), "vllm")
			if err := os.CopyFS(twin, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			what := fmt.Sprintf("cut off after %q", last)
			scriptOK(t, script, dir)
			scriptSame(t, what+", apply", scriptSnapshot(t, dir), new)
			scriptOK(t, script, twin, "--revert")
			scriptSame(t, what+", --revert", scriptSnapshot(t, twin), old)
		}
	}
}

func TestScriptOnAFullDisk(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set, files := scriptMany(t, 4) // each file is longer than the one before
	script := scriptFile(t, "", false, set)
	const limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
	for _, way := range []string{"--force", "--revert"} {
		dir := scriptTree(t, files)
		if way == "--revert" {
			scriptOK(t, script, dir)
		}
		was := scriptSnapshot(t, dir)
		r := runScript(t, scriptUnder(python, limit, script, way, "--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "file too large. Nothing is changed") {
			t.Errorf("%s: exit %d: %s%s", way, r.code, r.out, r.stderr)
		}
		scriptSame(t, way, scriptSnapshot(t, dir), was)
	}
}

// What fails late is undone: here the text on disk, which somebody spoils in the moment before it is looked at.
func TestScriptUndoesWhatDoesNotCompile(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	script := scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	const fail = `
import builtins
real, calls = compile, []
def late(source, name, *args, **kwargs):
    if name.endswith("b.py"):
        calls.append(name)
        if len(calls) == 2:
            raise SyntaxError("spoilt")
    return real(source, name, *args, **kwargs)
builtins.compile = late`
	dir := scriptTree(t, scriptThreeFiles)
	was := scriptSnapshot(t, dir)
	r := runScript(t, scriptUnder(python, fail, script, "--vllm-dir", dir))
	if r.code != 1 || !strings.Contains(r.said(), "spoilt. Nothing is changed") {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
	}
	scriptSame(t, "undone", scriptSnapshot(t, dir), was)
}

// A signal waits until the files are changed.
func TestScriptInterrupted(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	_, new := scriptSides(t, set, scriptThreeFiles)
	const interrupt = `
import os, signal, sys
def hook(event, args):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)`
	dir := scriptTree(t, scriptThreeFiles)
	r := runScript(t, scriptUnder(python, interrupt, script, "--vllm-dir", dir))
	if r.code != 1 || r.said() != "interrupted" {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
	}
	scriptSame(t, "done all the same", scriptSnapshot(t, dir), new)
}

func TestScriptsAtOnce(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set, files := scriptMany(t, 12)
	script := scriptFile(t, "", false, set)
	_, new := scriptSides(t, set, files)
	for range 5 {
		dir := scriptTree(t, files)
		runs := make([]scriptRun, 3)
		var wg sync.WaitGroup
		for i := range runs {
			wg.Go(func() { runs[i] = runScript(t, exec.Command(python, "-S", script, "--vllm-dir", dir)) })
		}
		tree := engineTree(t, dir)
		wg.Go(func() {
			if _, err := tree.Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		applied := 0
		for _, r := range runs {
			if r.code != 0 {
				t.Errorf("exit %d: %s", r.code, r.stderr)
			}
			applied += strings.Count(r.out, " is applied to ")
		}
		if applied > 1 {
			t.Errorf("%d of them applied it: %v", applied, runs)
		}
		scriptSame(t, "all of them", scriptSnapshot(t, dir), new)
	}
}

func TestScriptLeavesARunningVLLMAlone(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	if _, err := os.Stat("/proc/self/maps"); err != nil {
		t.Skip("no /proc: processes cannot be looked into")
	}
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	dir := scriptTree(t, with(scriptThreeFiles, "_C kernels.so", strings.Repeat("\x00", 8192)))
	serve := exec.Command(python, "-c", "import mmap, sys\nwith open(sys.argv[1], 'rb') as f: m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\nprint('ready', flush=True)\nsys.stdin.read()", filepath.Join(dir, "_C kernels.so"))
	stdin, err := serve.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := serve.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = stdin.Close(), serve.Wait() }()
	if _, err := stdout.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	tree, err := Open(dir, python)
	if err != nil {
		t.Fatal(err)
	}
	was := scriptSnapshot(t, dir)
	_, want := tree.Apply(context.Background(), Request{Sets: []Set{set}})
	r := runScript(t, exec.Command(python, script, "--vllm-dir", dir))
	if r.code != 1 || want == nil || r.said() != want.Error() || !strings.Contains(r.said(), fmt.Sprintf("process %d (", serve.Process.Pid)) {
		t.Errorf("exit %d: %s\nnot: %v", r.code, r.stderr, want)
	}
	scriptSame(t, "refused", scriptSnapshot(t, dir), was)
	scriptOK(t, script, dir, "--check")
	scriptOK(t, script, dir, "--force")
	scriptOK(t, script, dir) // nothing to do
}

// The script runs on each Python that vLLM has had.
func TestScriptOnOtherPythons(t *testing.T) {
	t.Parallel()
	python := realPython(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	t.Run("syntax", func(t *testing.T) {
		out, err := exec.Command(python, "-c", "import ast, sys\nast.parse(open(sys.argv[1], encoding='utf-8').read(), feature_version=(3, 9))", script).CombinedOutput()
		if err != nil {
			t.Errorf("newer than 3.9: %s", out)
		}
		out, err = exec.Command(python, "-W", "error", "-m", "py_compile", script).CombinedOutput()
		if err != nil {
			t.Errorf("%s", out)
		}
	})
	old, new := scriptSides(t, set, scriptThreeFiles)
	root := os.Getenv("PYENV_ROOT")
	if root == "" {
		home, _ := os.UserHomeDir()
		root = filepath.Join(home, ".pyenv")
	}
	for _, version := range []string{"3.9", "3.10", "3.11", "3.12", "3.13"} {
		t.Run(version, func(t *testing.T) {
			candidates, _ := filepath.Glob(filepath.Join(root, "versions", version+".*", "bin", "python3"))
			candidates = append(candidates, "python"+version)
			at := slices.IndexFunc(candidates, func(c string) bool { return exec.Command(c, "-S", "-c", "").Run() == nil })
			if at < 0 {
				t.Skipf("no Python %s at hand", version)
			}
			dir := scriptTree(t, scriptThreeFiles)
			for _, step := range []struct {
				arg  string
				want map[string]string
			}{{"--check", old}, {"--force", new}, {"--check", new}, {"--revert", old}} {
				r := runScript(t, exec.Command(candidates[at], "-S", "-W", "error", script, "--vllm-dir", dir, step.arg))
				if r.code != 0 || r.stderr != "" {
					t.Errorf("%s: exit %d: %s", step.arg, r.code, r.stderr)
				}
				scriptSame(t, step.arg, scriptSnapshot(t, dir), step.want)
			}
			cmd := exec.Command(candidates[at], "-S", script, "--check")
			cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Dir(dir))
			if r := runScript(t, cmd); r.code != 0 {
				t.Errorf("found on the path: exit %d: %s", r.code, r.stderr)
			}
		})
	}
}

package patch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// The exported script and the engine have one set of rules, so most tests here do the same to two copies of a tree, one
// with each, and compare: what they leave, and what they say.
func TestScriptDoesWhatTheEngineDoes(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
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
			name: "one anchor patched already, which looks like both", files: map[string]string{"a.py": "B = 2\nN = 1\n"},
			diffs: []string{"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n B = 2\n+N = 1\n@@ -2 +3 @@\n-A = 1\n\\ No newline at end of file\n+N = 1\n"}, fails: "two anchors stand on the same line",
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

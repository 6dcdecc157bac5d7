package patch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

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
	tree, err := Open(dir, needs.Program(t, "true", "coreutils"))
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
	r := runScript(t, exec.Command(needs.Python(t), append([]string{"-S", script, "--vllm-dir", dir}, args...)...))
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
	tree, err := Open(dir, needs.Python(t))
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

package patch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// writeTree writes files by their path below dir.
func writeTree(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for path, text := range files {
		name := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		writeText(t, name, text)
	}
}

func writeText(t testing.TB, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readText(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// script writes an executable shell script.
func script(t testing.TB, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "python3")
	if err := os.WriteFile(name, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return name
}

// listing is all that is in a folder: kind, mode, owner and bytes.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(name)
		if err != nil {
			return err
		}
		text := ""
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			text, err = os.Readlink(name)
		case info.Mode().IsRegular():
			var b []byte
			b, err = os.ReadFile(name)
			text = string(b)
		}
		path, _ := filepath.Rel(dir, name)
		all[path] = fmt.Sprintf("%s %s\n%s", info.Mode(), ownerOf(info), text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func same(t testing.TB, what string, got, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

// stock is a small package, with files of all line ends.
var stock = map[string]string{
	"__init__.py":    "",
	"_version.py":    "__version__ = version = '9.8.7'\n",
	"a.py":           "import os\n\n\ndef a():\n    return 1\n",
	"v1/b.py":        "import os\r\n\r\n\r\ndef b():\r\n    return 2\r\n",
	"v1/c.py":        "import os\n\n\ndef c():\n    return 3",
	"v1/unedited.py": "x = 1\n",
}

// stockDiff edits three of its files and adds one. It has a gate.
const stockDiff = `--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,1 +1,2 @@
 import os
+import sys  # [vllm-timings]
@@ -4,2 +5,2 @@
 def a():
-    return 1
+    return 10  # [vllm-timings]
--- /dev/null
+++ b/vllm/added.py
@@ -0,0 +1,1 @@
+gate = "@gate@"  # the gate
--- a/vllm/v1/b.py
+++ b/vllm/v1/b.py
@@ -4,2 +4,3 @@
 def b():
+    # [vllm-timings]
     return 2
--- a/vllm/v1/c.py
+++ b/vllm/v1/c.py
@@ -4,2 +4,3 @@
 def c():
-    return 3
\ No newline at end of file
+    x = 3  # [vllm-timings]
+    return x
\ No newline at end of file
`

func stockPatched(gate string) map[string]string {
	patched := maps.Clone(stock)
	patched["a.py"] = "import os\nimport sys  # [vllm-timings]\n\n\ndef a():\n    return 10  # [vllm-timings]\n"
	patched["v1/b.py"] = "import os\r\n\r\n\r\ndef b():\r\n    # [vllm-timings]\r\n    return 2\r\n"
	patched["v1/c.py"] = "import os\n\n\ndef c():\n    x = 3  # [vllm-timings]\n    return x"
	patched["added.py"] = "gate = \"" + gate + "\"  # the gate\n"
	return patched
}

func parse(t testing.TB, name, diff string) Set {
	t.Helper()
	set, err := ParseDiff(name, []byte(diff))
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// memoryDir is a folder of the test, in memory where the system has such a place: there writing down to the disk is quick.
func memoryDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "vllm-timings-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// newTree writes a package into a folder of its own, with a python that takes anything.
func newTree(t testing.TB, files map[string]string) *Tree {
	t.Helper()
	dir := filepath.Join(memoryDir(t), "site-packages", "vllm")
	writeTree(t, dir, files)
	tree, err := Open(dir, script(t, "exit 0"))
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// stockTree is a tree of stock with its request.
func stockTree(t testing.TB) (*Tree, Request) {
	t.Helper()
	return newTree(t, stock), Request{Sets: []Set{parse(t, "mine", stockDiff)}}
}

// texts returns the files of a tree.
func (t *Tree) texts(tb testing.TB) map[string]string {
	tb.Helper()
	all := map[string]string{}
	for path, text := range listing(tb, t.Dir) {
		if first, rest, _ := strings.Cut(text, "\n"); !strings.HasPrefix(first, "d") {
			all[filepath.ToSlash(path)] = rest
		}
	}
	return all
}

// refused makes sure that an error has these texts in it, in this order.
func refused(t testing.TB, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want one with %q", want)
	}
	rest := err.Error()
	for _, w := range want {
		_, after, found := strings.Cut(rest, w)
		if !found {
			t.Fatalf("the error is not what it should be:\n got %s\nwant %q", err, want)
		}
		rest = after
	}
}

func mustApply(t testing.TB, tree *Tree, r Request) Result {
	t.Helper()
	res, err := tree.Apply(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func mustRevert(t testing.TB, tree *Tree, r Request) Result {
	t.Helper()
	res, err := tree.Revert(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func states(res Result) string {
	var all []string
	for _, s := range res.Surveys {
		all = append(all, s.Set+" "+string(s.State))
	}
	return strings.Join(all, ", ")
}

var errMade = errors.New("made up for the test")

package patch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

func TestOpen(t *testing.T) {
	tree := newTree(t, stock)
	parent := filepath.Dir(tree.Dir)
	empty := t.TempDir()
	for _, c := range []struct{ dir, want string }{
		{parent, "no vllm package at " + parent + ", but one below it: give " + tree.Dir},
		{filepath.Join(tree.Dir, "__init__.py"), "no vllm package at " + tree.Dir + "/__init__.py: it is a file; give the folder vllm that holds __init__.py"},
		{filepath.Join(tree.Dir, "v1"), "no vllm package at " + tree.Dir + "/v1: it has no __init__.py; give the folder vllm that holds it"},
		{empty, "no vllm package at " + empty + ": it has no __init__.py"},
		{filepath.Join(empty, "nothing"), "no vllm package at " + empty + "/nothing: no such file or directory"},
	} {
		_, err := Open(c.dir, "python3")
		refused(t, err, c.want)
	}
	if want := tree.Dir + " (vLLM 9.8.7)"; tree.String() != want {
		t.Errorf("%q, not %q", tree, want)
	}
	for text, want := range map[string]string{
		"__version__ = version = '0.11.0'\n":                                       "0.11.0",
		"# file\nversion: str\n__version__ = version = \"0.1.dev1+g0\"\nx = '1'\n": "0.1.dev1+g0",
		"__version__ = '1.2'\n":                                                    "1.2",
		"nothing\n":                                                                "",
	} {
		writeText(t, tree.name("_version.py"), text)
		if got := Version(tree.Dir); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
	t.Run("relative", func(t *testing.T) {
		t.Chdir(parent)
		own, err := Open("vllm", "python3")
		if err != nil || own.Dir != tree.Dir {
			t.Errorf("%v, %v", own, err)
		}
	})
}

// TestApply: to and fro, as it is meant.
func TestApply(t *testing.T) {
	tree, r := stockTree(t)
	tree.Python = needs.Python(t)
	before := listing(t, tree.Dir)
	for range 2 {
		res, err := tree.Check(t.Context(), r)
		if err != nil || states(res) != "mine pristine" {
			t.Fatal(states(res), err)
		}
		same(t, "checked", listing(t, tree.Dir), before)
		if res = mustApply(t, tree, r); strings.Join(res.Changed, " ") != "a.py added.py v1/b.py v1/c.py" || states(res) != "mine pristine" {
			t.Errorf("%q %s", res.Changed, states(res))
		}
		same(t, "patched", tree.texts(t), stockPatched(""))
		after := listing(t, tree.Dir)
		if res, err = tree.Check(t.Context(), r); err != nil || states(res) != "mine patched" {
			t.Fatal(states(res), err)
		}
		if res = mustApply(t, tree, r); len(res.Changed) > 0 {
			t.Errorf("again: %q", res.Changed)
		}
		same(t, "checked and applied again", listing(t, tree.Dir), after)
		mustRevert(t, tree, r)
		if res = mustRevert(t, tree, r); len(res.Changed) > 0 {
			t.Errorf("reverted again: %q", res.Changed)
		}
		same(t, "reverted", listing(t, tree.Dir), before)
	}
}

// TestDrift: whatever does not fit, nothing is written, and it is said where.
func TestDrift(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []string
	}{
		{"in the last file", map[string]string{"v1/c.py": "import os\n\n\ndef c():\n    return 4"}, []string{"the set mine does not fit:\n  v1/c.py: anchor 1: the lines to replace are not there; nearest is line 5, \"return 4\" where \"return 3\" should be"}},
		{"a line twice", map[string]string{"a.py": stock["a.py"] + "import os\n"}, []string{"a.py: anchor 1: the lines to replace are there 2 times, not once; nearest is line 1, \"import os\""}},
		{"a final newline", map[string]string{"v1/c.py": stock["v1/c.py"] + "\n"}, []string{"v1/c.py: anchor 1: the lines to replace are not there"}},
		{"mixed line ends", map[string]string{"v1/b.py": "import os\n\r\n\r\ndef b():\r\n    return 2\r\n"}, []string{"v1/b.py: anchor 1: the lines to replace are not there"}},
		{"another file of the name", map[string]string{"added.py": "mine = 1\n"}, []string{"added.py: there is another file of this name"}},
		{"another version", map[string]string{"added.py": "mine = 1  # [vllm-timings]\n"}, []string{"added.py: it is of another version of this set, or was edited: revert with what put it there"}},
		{"a file patched by hand", map[string]string{"v1/b.py": stockPatched("")["v1/b.py"]}, []string{"only a part is patched: v1/b.py is, a.py, added.py, v1/c.py is not"}},
		{"half a file patched by hand", map[string]string{"a.py": "import os\nimport sys  # [vllm-timings]\n\n\ndef a():\n    return 1\n"}, []string{"a.py: some of its anchors are patched and some are not"}},
		{"an empty file", map[string]string{"a.py": ""}, []string{`a.py: anchor 1: the lines to replace are not there; no line of it is, such as "import os"`, "a.py: anchor 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree, r := stockTree(t)
			writeTree(t, tree.Dir, c.files)
			before := listing(t, tree.Dir)
			for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply, (*Tree).Revert} {
				_, err := do(tree, t.Context(), r)
				refused(t, err, c.want...)
				if drift := (*DriftError)(nil); !errors.As(err, &drift) || drift.Set != "mine" || drift.Survey.State != Drifted {
					t.Errorf("%#v", err)
				}
				same(t, "the tree", listing(t, tree.Dir), before)
			}
			if res, err := tree.Status(t.Context(), r); err != nil || states(res) != "mine drifted" {
				t.Error(states(res), err)
			}
		})
	}
	t.Run("a file is gone", func(t *testing.T) {
		tree, r := stockTree(t)
		if err := os.Remove(tree.name("v1/c.py")); err != nil {
			t.Fatal(err)
		}
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "v1/c.py: the file is not there")
	})
	t.Run("a folder is gone", func(t *testing.T) {
		tree, r := stockTree(t)
		if err := os.RemoveAll(tree.name("v1")); err != nil {
			t.Fatal(err)
		}
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "v1/b.py: the file is not there", "v1/c.py: the file is not there")
	})
	t.Run("a folder has the name", func(t *testing.T) {
		tree, r := stockTree(t)
		if err := errors.Join(os.Remove(tree.name("a.py")), os.Mkdir(tree.name("a.py"), 0o755)); err != nil {
			t.Fatal(err)
		}
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, tree.name("a.py")+" is no regular file")
	})
	t.Run("a file for a folder that is not there", func(t *testing.T) {
		tree := newTree(t, stock)
		r := Request{Sets: []Set{parse(t, "mine", "--- /dev/null\n+++ b/vllm/v2/x.py\n@@ -0,0 +1 @@\n+x = 1\n")}}
		for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply} {
			_, err := do(tree, t.Context(), r)
			refused(t, err, "the set mine adds v2/x.py, but vLLM has no folder v2")
		}
	})
}

// TestForeign: a tree that somebody else's script patched.
func TestForeign(t *testing.T) {
	tree, r := stockTree(t)
	writeTree(t, tree.Dir, map[string]string{"v1/unedited.py": "x = 2  # [patch_timings]\n", "new/n.py": "# [patch_timings]\n"})
	before := listing(t, tree.Dir)
	for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply, (*Tree).Revert, (*Tree).Status} {
		_, err := do(tree, t.Context(), r)
		refused(t, err, tree.Dir+` was patched by another script, which left its marker "# [patch_timings]" in new/n.py, v1/unedited.py: revert that one, or install vLLM again, first`)
	}
	same(t, "the tree", listing(t, tree.Dir), before)
}

// TestLinks: what a package manager linked to its cache is replaced by a copy, and the cache stays as it is.
func TestLinks(t *testing.T) {
	for name, link := range map[string]func(old, new string) error{"symbolic": os.Symlink, "hard": os.Link} {
		t.Run(name, func(t *testing.T) {
			tree, r := stockTree(t)
			cache := filepath.Join(memoryDir(t), "vllm")
			writeTree(t, cache, stock)
			for path := range stock {
				if err := errors.Join(os.Remove(tree.name(path)), link(filepath.Join(cache, path), tree.name(path))); err != nil {
					t.Fatal(err)
				}
			}
			before := listing(t, cache)
			mustApply(t, tree, r)
			for _, path := range []string{"a.py", "v1/b.py", "v1/c.py", "added.py"} {
				if info, err := os.Lstat(tree.name(path)); err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o644 {
					t.Errorf("%s: %v, %v", path, info, err)
				}
				if got, want := readText(t, tree.name(path)), stockPatched("")[path]; got != want {
					t.Errorf("%s: %q", path, got)
				}
			}
			same(t, "the cache, patched", listing(t, cache), before)
			mustRevert(t, tree, r)
			same(t, "the cache, reverted", listing(t, cache), before)
			for path, want := range stock {
				if got := readText(t, tree.name(path)); got != want {
					t.Errorf("%s: %q", path, got)
				}
			}
		})
	}
	t.Run("a folder", func(t *testing.T) {
		tree, r := stockTree(t)
		cache := filepath.Join(memoryDir(t), "v1")
		if err := errors.Join(os.Rename(tree.name("v1"), cache), os.Symlink(cache, tree.name("v1"))); err != nil {
			t.Skip("its folders are on two disks: ", err)
		}
		before, cached := listing(t, tree.Dir), listing(t, cache)
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, tree.name("v1")+" is a symbolic link to a folder, maybe into a cache that others use: replace it with a copy, or install vLLM with uv's --link-mode=copy")
		same(t, "the tree", listing(t, tree.Dir), before)
		same(t, "the cache", listing(t, cache), cached)
	})
	t.Run("a link to nothing", func(t *testing.T) {
		tree, r := stockTree(t)
		if err := errors.Join(os.Remove(tree.name("a.py")), os.Symlink("nowhere.py", tree.name("a.py"))); err != nil {
			t.Fatal(err)
		}
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "a.py: the file is not there")
	})
	t.Run("the package itself", func(t *testing.T) {
		tree, r := stockTree(t)
		link := filepath.Join(t.TempDir(), "vllm")
		if err := os.Symlink(tree.Dir, link); err != nil {
			t.Fatal(err)
		}
		own, err := Open(link, tree.Python)
		if err != nil {
			t.Fatal(err)
		}
		mustApply(t, own, r)
		same(t, "the tree", tree.texts(t), stockPatched(""))
	})
}

// TestModes: each file keeps its mode, and one that is added has that of __init__.py.
func TestModes(t *testing.T) {
	tree, r := stockTree(t)
	for path, mode := range map[string]fs.FileMode{"a.py": 0o755, "v1/b.py": 0o444, "v1/c.py": 0o600, "__init__.py": 0o640} {
		if err := os.Chmod(tree.name(path), mode); err != nil {
			t.Fatal(err)
		}
	}
	before := listing(t, tree.Dir)
	mustApply(t, tree, r)
	for path, want := range map[string]fs.FileMode{"a.py": 0o755, "v1/b.py": 0o444, "v1/c.py": 0o600, "added.py": 0o640} {
		if info, err := os.Stat(tree.name(path)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	mustRevert(t, tree, r)
	same(t, "reverted", listing(t, tree.Dir), before)
}

// TestCompiled: compiled code of the files that change goes, all other stays.
func TestCompiled(t *testing.T) {
	tree, r := stockTree(t)
	pyc := map[string]string{}
	for _, path := range []string{"__pycache__/a.cpython-311.pyc", "__pycache__/a.cpython-311.opt-1.pyc", "v1/__pycache__/b.cpython-312.pyc"} {
		pyc[path] = "stale"
	}
	kept := map[string]string{"__pycache__/ab.cpython-311.pyc": "x", "v1/__pycache__/a.cpython-311.pyc": "x", "v1/__pycache__/unedited.cpython-311.pyc": "x"}
	for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Apply, (*Tree).Revert} {
		writeTree(t, tree.Dir, pyc)
		writeTree(t, tree.Dir, kept)
		if _, err := do(tree, t.Context(), r); err != nil {
			t.Fatal(err)
		}
		got := tree.texts(t)
		for path := range pyc {
			if _, found := got[path]; found {
				t.Errorf("%s is left", path)
			}
		}
		for path := range kept {
			if got[path] != "x" {
				t.Errorf("%s is gone", path)
			}
		}
	}
	t.Run("Python runs what is on disk", func(t *testing.T) {
		tree, r := stockTree(t)
		tree.Python = needs.Python(t)
		value := func() string {
			cmd := exec.Command(tree.Python, "-c", "import vllm.a; print(vllm.a.a())")
			cmd.Dir = filepath.Dir(tree.Dir)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			return strings.TrimSpace(string(out))
		}
		for range 2 {
			if got := value(); got != "1" {
				t.Error(got)
			}
			mustApply(t, tree, r)
			if got := value(); got != "10" {
				t.Error(got)
			}
			mustRevert(t, tree, r)
		}
	})
}

const brokenDiff = "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+def (\n"

// TestDoesNotCompile: what Python does not take is not written, and what it turns out not to take is undone.
func TestDoesNotCompile(t *testing.T) {
	t.Run("in memory", func(t *testing.T) {
		tree := newTree(t, stock)
		tree.Python = needs.Python(t)
		r := Request{Sets: []Set{parse(t, "mine", brokenDiff)}}
		before := listing(t, tree.Dir)
		tree.before = func(step, path string) error { return fmt.Errorf("%s %s is begun", step, path) }
		for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply} {
			_, err := do(tree, t.Context(), r)
			refused(t, err, "what the patch makes does not compile", tree.name("a.py"), "line 2")
		}
		same(t, "the tree", listing(t, tree.Dir), before)
	})
	t.Run("on disk", func(t *testing.T) {
		tree, r := stockTree(t)
		before := listing(t, tree.Dir)
		tree.Python = script(t, `case "$*" in *py_compile*) echo "  File x, line 2" >&2; echo "SyntaxError: bad" >&2; exit 1;; esac`)
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "py_compile", "SyntaxError: bad", "Nothing is changed")
		same(t, "the tree", listing(t, tree.Dir), before)
	})
	t.Run("no Python", func(t *testing.T) {
		tree, r := stockTree(t)
		before := listing(t, tree.Dir)
		tree.Python = "/nowhere/python3"
		for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply} {
			_, err := do(tree, t.Context(), r)
			refused(t, err, `no Python at "/nowhere/python3": name the one that serves vLLM with --python, such as --python /opt/venv/bin/python`)
		}
		same(t, "the tree", listing(t, tree.Dir), before)
	})
	t.Run("a tree that hides the standard library", func(t *testing.T) {
		tree, r := stockTree(t)
		tree.Python = needs.Python(t)
		writeTree(t, tree.Dir, map[string]string{"json.py": "raise SystemExit('mine')\n", "enum.py": "raise SystemExit('mine')\n"})
		t.Chdir(tree.Dir)
		mustApply(t, tree, r)
	})
	t.Run("the end of the context", func(t *testing.T) {
		tree, r := stockTree(t)
		before := listing(t, tree.Dir)
		ctx, cancel := context.WithCancel(t.Context())
		tree.before = func(step, _ string) error {
			if step == "put "+newSuffix {
				cancel()
			}
			return nil
		}
		_, err := tree.Apply(ctx, r)
		refused(t, err, "context canceled", "Nothing is changed")
		same(t, "the tree", listing(t, tree.Dir), before)
	})
}

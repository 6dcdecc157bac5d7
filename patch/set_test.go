package patch

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func embeddedSets(t testing.TB) []Set {
	t.Helper()
	sets, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	if len(sets) < 2 {
		t.Fatalf("%d sets", len(sets))
	}
	return sets
}

// TestEmbeddedSets: what must be true of each set that is built in.
func TestEmbeddedSets(t *testing.T) {
	for i, set := range embeddedSets(t) {
		t.Run(set.Name, func(t *testing.T) {
			if i > 0 && embeddedSets(t)[i-1].Name >= set.Name {
				t.Error("the sets are not sorted")
			}
			if !set.Gated() {
				t.Error("it has no gate")
			}
			module := false
			for _, f := range set.Files {
				if f.Content != nil {
					if f.Path != moduleName || !bytes.Contains(f.Content, []byte(Marker)) || !bytes.Contains(f.Content, []byte(gateMark)) {
						t.Errorf("%s: not our module, or without marker or gate", f.Path)
					}
					module = true
				}
				for n, a := range f.Anchors {
					if bytes.Contains(a.Old, []byte(Marker)) {
						t.Errorf("%s, anchor %d: it looks for a patched file", f.Path, n+1)
					}
					old := strings.SplitAfter(string(a.Old), "\n")
					added := 0
					for line := range strings.Lines(string(a.New)) {
						if len(old) > 0 && old[0] == line {
							old = old[1:]
							continue
						}
						if len(old) > 0 && strings.TrimSpace(old[0]) != "" && strings.HasPrefix(line, strings.TrimRight(old[0], "\n")) { // the marker is put behind a line
							old = old[1:]
						}
						if added++; !strings.HasSuffix(line, Marker+"\n") {
							t.Errorf("%s, anchor %d: no marker in %q", f.Path, n+1, line)
						}
					}
					if added == 0 {
						t.Errorf("%s, anchor %d: it adds nothing", f.Path, n+1)
					}
				}
			}
			if !module {
				t.Error("it does not add our module")
			}
		})
	}
}

// fitting makes a tree that an embedded set fits: files of just the lines that it looks for.
func fitting(t testing.TB, set Set) *Tree {
	t.Helper()
	files := map[string]string{"__init__.py": ""}
	for _, f := range set.Files {
		for _, a := range f.Anchors {
			files[f.Path] += "# ...\n" + string(a.Old)
		}
	}
	return newTree(t, files)
}

// TestChoose: of the embedded sets, the tree's own is found by its anchors, before and after.
func TestChoose(t *testing.T) {
	for _, set := range embeddedSets(t) {
		t.Run(set.Name, func(t *testing.T) {
			tree := fitting(t, set)
			before := listing(t, tree.Dir)
			check := func(state State) {
				t.Helper()
				res, err := tree.Status(t.Context(), Request{})
				if want := set.Name + " " + string(state); err != nil || states(res) != want {
					t.Fatalf("%q, %v, not %q", states(res), err, want)
				}
			}
			check(Pristine)
			mustApply(t, tree, Request{})
			check(Patched)
			after := listing(t, tree.Dir)
			if res := mustApply(t, tree, Request{}); len(res.Changed) > 0 {
				t.Errorf("again: %q", res.Changed)
			}
			same(t, "again", listing(t, tree.Dir), after)
			mustRevert(t, tree, Request{})
			same(t, "reverted", listing(t, tree.Dir), before)
		})
	}
}

func TestChooseAmong(t *testing.T) {
	small := parse(t, "small", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+import sys\n")
	large := parse(t, "large", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+import sys\n@@ -5 +6 @@\n-    return 1\n+    return 2\n")
	other := parse(t, "other", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+import re\n")
	wrong := parse(t, "wrong", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import nothing\n+import sys\n")
	worse := parse(t, "worse", "--- a/vllm/z.py\n+++ b/vllm/z.py\n@@ -1 +1,2 @@\n import nothing\n+import sys\n@@ -5 +6 @@\n-x\n+y\n--- a/vllm/y.py\n+++ b/vllm/y.py\n@@ -5 +6 @@\n-x\n+y\n")
	for _, c := range []struct {
		name    string
		sets    []Set
		want    string
		refused string
	}{
		{"the one with most edits", []Set{small, large}, "large pristine", ""},
		{"in any order", []Set{large, small}, "large pristine", ""},
		{"one that fits before one that does not", []Set{wrong, small, worse}, "small pristine", ""},
		{"none fits: the nearest", []Set{worse, wrong}, "wrong drifted", ""},
		{"two alike", []Set{small, other}, "", "the sets small and other fit alike; name one with --set"},
		{"none", nil, "", "no set to choose from"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := choose(newTree(t, stock), c.sets)
			if c.refused != "" {
				refused(t, err, c.refused)
				return
			}
			if got := s.Set + " " + string(s.State); err != nil || got != c.want {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestGate(t *testing.T) {
	for _, name := range []string{"VLLM_TIMINGS", "x", "_1"} {
		t.Run(name, func(t *testing.T) {
			tree, r := stockTree(t)
			before := listing(t, tree.Dir)
			r.Gate = name
			mustApply(t, tree, r)
			same(t, "with the gate", tree.texts(t), stockPatched(name))
			if res := mustApply(t, tree, r); len(res.Changed) > 0 || res.Surveys[0].Gate != name {
				t.Errorf("again: %+v", res)
			}
			for _, other := range []string{"", "OTHER"} {
				r.Gate = other
				for _, do := range []func() error{
					func() error { _, err := tree.Apply(t.Context(), r); return err },
					func() error { _, err := tree.Check(t.Context(), r); return err },
				} {
					refused(t, do(), "the set mine is applied with the gate "+name+", and not with "+gateText(other)+": revert it first")
				}
			}
			same(t, "refused", tree.texts(t), stockPatched(name))
			mustRevert(t, tree, r)
			same(t, "reverted", listing(t, tree.Dir), before)
		})
	}
	t.Run("none, then one", func(t *testing.T) {
		tree, r := stockTree(t)
		mustApply(t, tree, r)
		r.Gate = "VLLM_TIMINGS"
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "the set mine is applied with no gate, and not with the gate VLLM_TIMINGS: revert it first")
	})
	for _, name := range []string{"1x", "a-b", "a b", "ä", "a=1", `a"`, "a\n", "$x"} {
		tree, r := stockTree(t)
		r.Gate = name
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "is no name of an environment variable, such as VLLM_TIMINGS")
		same(t, "refused", tree.texts(t), stock)
	}
	t.Run("a set without gate", func(t *testing.T) {
		_, err := newTree(t, stock).Apply(t.Context(), Request{Gate: "X", Sets: []Set{parse(t, "mine", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+import sys\n")}})
		refused(t, err, "the set mine has no gate: its files do not have @gate@ in them")
	})
	t.Run("CRLF", func(t *testing.T) { // the gate is in an edit, not in a file that the set adds
		tree := newTree(t, stock)
		r := Request{Gate: "ON", Sets: []Set{parse(t, "mine", "--- a/vllm/v1/b.py\n+++ b/vllm/v1/b.py\n@@ -1 +1,2 @@\n import os\n+gate = os.environ.get('@gate@')\n")}}
		mustApply(t, tree, r)
		r.Gate = ""
		if res, err := tree.Status(t.Context(), r); err != nil || res.Surveys[0].Gate != "ON" {
			t.Errorf("%+v, %v", res, err)
		}
		mustRevert(t, tree, r)
		same(t, "reverted", tree.texts(t), stock)
	})
}

// TestSeveralSets: they are applied in their order and taken out in the other one.
func TestSeveralSets(t *testing.T) {
	second := parse(t, "second", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import sys  # [vllm-timings]\n+import re\n")
	first := parse(t, "mine", stockDiff)
	apart := parse(t, "apart", "--- a/vllm/v1/unedited.py\n+++ b/vllm/v1/unedited.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n")
	for _, c := range []struct {
		name string
		sets []Set
	}{
		{"in files of their own", []Set{first, apart}},
		{"the second stands on what the first puts there", []Set{first, second}},
		{"the same twice", []Set{first, first}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree := newTree(t, stock)
			before := listing(t, tree.Dir)
			r := Request{Sets: c.sets}
			mustApply(t, tree, r)
			after := listing(t, tree.Dir)
			if _, err := tree.Check(t.Context(), r); err != nil {
				t.Error(err)
			}
			if res, err := tree.Apply(t.Context(), r); err != nil || len(res.Changed) > 0 {
				t.Errorf("again: %+v, %v", res.Changed, err)
			}
			same(t, "again", listing(t, tree.Dir), after)
			mustRevert(t, tree, r)
			same(t, "reverted", listing(t, tree.Dir), before)
		})
	}
	t.Run("one that is a part of another", func(t *testing.T) {
		part := parse(t, "part", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+import sys  # [vllm-timings]\n")
		tree := newTree(t, stock)
		_, err := tree.Apply(t.Context(), Request{Sets: []Set{first, part}})
		refused(t, err, "the set part makes edits that one before it makes too: give only one of them")
		same(t, "the tree", tree.texts(t), stock)
	})
	t.Run("one after the other", func(t *testing.T) {
		tree := newTree(t, stock)
		mustApply(t, tree, Request{Sets: []Set{first}})
		mustApply(t, tree, Request{Sets: []Set{first, apart}})
		mustRevert(t, tree, Request{Sets: []Set{first}})
		mustRevert(t, tree, Request{Sets: []Set{first, apart}})
		same(t, "reverted", tree.texts(t), stock)
	})
	t.Run("the second does not fit: nothing of the first", func(t *testing.T) {
		tree := newTree(t, stock)
		before := listing(t, tree.Dir)
		wrong := parse(t, "wrong", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import nothing\n+import sys\n")
		_, err := tree.Apply(t.Context(), Request{Sets: []Set{first, wrong}})
		refused(t, err, "the set wrong does not fit", "a.py: anchor 1")
		same(t, "the tree", listing(t, tree.Dir), before)
	})
}

// TestNoVLLMInTheTree: vLLM's files are never committed.
func TestNoVLLMInTheTree(t *testing.T) {
	err := filepath.WalkDir(".", func(name string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(name) == ".py" && bytes.Contains([]byte(readText(t, name)), []byte("contributors to the vLLM project")) {
			t.Errorf("%s is of vLLM", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

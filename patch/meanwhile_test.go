package patch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestEditedMeanwhile: what somebody else does to a file while it is patched is not overwritten.
func TestEditedMeanwhile(t *testing.T) {
	const edit = "mine = True\n"
	for _, path := range []string{"a.txt", "v1/b.txt", "v1/c.txt", "added.txt"} {
		t.Run("between plan and swap, "+path, func(t *testing.T) {
			tree, r, old := acts()[0].tree(t)
			tree.before = func(step, _ string) error {
				if step == "journal "+string(committing) {
					writeText(t, tree.name(path), edit)
				}
				return nil
			}
			_, err := tree.Apply(t.Context(), r)
			refused(t, err, tree.name(path)+": somebody else changed it just now. Nothing is changed")
			writeOver(t, old, tree, path)
			same(t, "the tree", listing(t, tree.Dir), old)
		})
		t.Run("while it is compiled, "+path, func(t *testing.T) {
			tree, _ := stockTree(t)
			r := Request{Sets: []Set{parse(t, "mine", stockDiff)}}
			path := strings.ReplaceAll(path, ".txt", ".py")
			old := listing(t, tree.Dir)
			tree.Python = script(t, fmt.Sprintf("printf '%s' > '%s'", strings.TrimSpace(edit)+`\n`, tree.name(path)))
			_, err := tree.Apply(t.Context(), r)
			refused(t, err, tree.name(path)+": somebody else changed it just now. Nothing is changed")
			writeOver(t, old, tree, path)
			same(t, "the tree", listing(t, tree.Dir), old)
		})
		t.Run("not swapped yet, after a crash, "+path, func(t *testing.T) {
			tree, r, old := acts()[0].tree(t)
			tree.before = dead("put " + newSuffix)
			if _, err := tree.Apply(t.Context(), r); !errors.Is(err, errMade) {
				t.Fatal(err)
			}
			writeText(t, tree.name(path), edit)
			tree.before = nil
			_, err := tree.Apply(t.Context(), r)
			refused(t, err, "the set mine does not fit", path)
			writeOver(t, old, tree, path)
			same(t, "the tree", listing(t, tree.Dir), old)
		})
		t.Run("swapped, after a crash, "+path, func(t *testing.T) {
			tree, r, old := acts()[0].tree(t)
			tree.before = dead("journal " + string(done))
			if _, err := tree.Apply(t.Context(), r); !errors.Is(err, errMade) {
				t.Fatal(err)
			}
			writeText(t, tree.name(path), edit)
			tree.before = nil
			for range 2 {
				_, err := tree.Apply(t.Context(), r)
				if path == "added.txt" {
					refused(t, err, tree.name(path)+": somebody else changed it meanwhile, and it was not there before: take it away")
				} else {
					refused(t, err, tree.name(path)+": somebody else changed it meanwhile: keep a copy of that, and put "+tree.beside(path, oldSuffix)+", its text from before, in its place")
				}
				if readText(t, tree.name(path)) != edit {
					t.Fatal("what somebody did is lost")
				}
			}
			// What the sentence says to do.
			var err error
			if path == "added.txt" {
				err = os.Remove(tree.name(path))
			} else {
				err = os.Rename(tree.beside(path, oldSuffix), tree.name(path))
			}
			if err != nil {
				t.Fatal(err)
			}
			mustRevert(t, tree, r)
			same(t, "the tree", listing(t, tree.Dir), old)
		})
	}
}

// dead returns what makes all steps fail from the first of a name on.
func dead(first string) func(step, path string) error {
	died := false
	return func(step, _ string) error {
		if died = died || step == first; died {
			return errMade
		}
		return nil
	}
}

// writeOver puts a file as it is on disk into a listing.
func writeOver(t *testing.T, all map[string]string, tree *Tree, path string) {
	t.Helper()
	now, found := listing(t, tree.Dir)[path]
	if !found || !strings.HasSuffix(now, "mine = True\n") {
		t.Fatalf("what somebody did to %s is lost: %q", path, now)
	}
	all[path] = now
}

// TestOddJournals: a journal that nobody could have left.
func TestOddJournals(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "is no journal"},
		{"{\"phase\": \"comm", "is no journal"},
		{"{}", `has the phase "", which this vllm-timings does not know`},
		{`{"phase": "melting", "files": []}`, `has the phase "melting"`},
		{`{"phase": "committing", "files": [{"path": "../../x.py", "old": "", "new": "00"}]}`, `names "../../x.py", which is outside of the package`},
		{`{"phase": "committing", "files": [{"path": "/etc/passwd", "old": "", "new": "00"}]}`, `names "/etc/passwd", which is outside of the package`},
	} {
		tree, r, _ := acts()[0].tree(t)
		writeText(t, tree.name(journalName), c.text)
		before := listing(t, tree.Dir)
		for _, do := range []func(*Tree, context.Context, Request) (Result, error){(*Tree).Check, (*Tree).Apply, (*Tree).Revert, (*Tree).Status} {
			_, err := do(tree, t.Context(), r)
			refused(t, err, tree.name(journalName), c.want)
		}
		same(t, "the tree", listing(t, tree.Dir), before)
	}
}

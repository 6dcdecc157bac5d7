package patch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// act is one of the two commands that write.
type act struct {
	name     string
	do       func(*Tree, context.Context, Request) (Result, error)
	from, to map[string]string
}

func acts() []act {
	return []act{
		{"apply", (*Tree).Apply, stock, stockPatched("")},
		{"revert", (*Tree).Revert, stockPatched(""), stock},
	}
}

// plain has other names for the modules in a text, which no Python is asked about: that would take most of the time.
func plain(text string) string { return strings.ReplaceAll(text, ".py", ".txt") }

// tree returns the tree in which an act begins, and a listing of how it is.
func (a act) tree(t testing.TB) (*Tree, Request, map[string]string) {
	t.Helper()
	files := map[string]string{"__init__.py": ""}
	for path, text := range a.from {
		files[plain(path)] = text
	}
	tree := newTree(t, files)
	return tree, Request{Sets: []Set{parse(t, "mine", plain(stockDiff))}}, listing(t, tree.Dir)
}

// dieAt makes each step from the nth on fail, as in a dead process. It returns the steps that were begun.
func dieAt(tree *Tree, n int) *[]string {
	var steps []string
	tree.before = func(step, path string) error {
		steps = append(steps, step+" "+filepath.Base(path))
		if n > 0 && len(steps) >= n {
			return errMade
		}
		return nil
	}
	return &steps
}

// failAt makes only the nth step fail.
func failAt(tree *Tree, n int) *[]string {
	var steps []string
	tree.before = func(step, path string) error {
		steps = append(steps, step+" "+filepath.Base(path))
		if len(steps) == n {
			return errMade
		}
		return nil
	}
	return &steps
}

// finals returns how the tree is wholly old and wholly new, as its modes and owners are.
func (a act) finals(t *testing.T) (old, new map[string]string, steps int) {
	tree, r, old := a.tree(t)
	done := dieAt(tree, 0)
	if _, err := a.do(tree, t.Context(), r); err != nil {
		t.Fatal(err)
	}
	to := map[string]string{"__init__.py": ""}
	for path, text := range a.to {
		to[plain(path)] = text
	}
	same(t, "what it is to become", tree.texts(t), to)
	return old, listing(t, tree.Dir), len(*done)
}

// nowWhole makes sure that a cut off tree is told of by check and status, which change nothing, and then comes to one of
// two states, with nothing left over, by the command.
func nowWhole(t *testing.T, tree *Tree, r Request, a act, old, new map[string]string, what string) {
	t.Helper()
	tree.before = nil
	cut := listing(t, tree.Dir)
	_, err := tree.Check(t.Context(), r)
	_, statusErr := tree.Status(t.Context(), r)
	_, diffErr := tree.Diff(t.Context(), r)
	if _, found := cut[journalName]; found {
		for _, err := range []error{err, statusErr, diffErr} {
			refused(t, err, "a patcher was cut off at "+tree.Dir, "`apply` or `revert` puts it right first")
		}
	} else {
		for _, err := range []error{err, statusErr, diffErr} {
			if err != nil {
				t.Fatalf("%s: without a journal: %v", what, err)
			}
		}
		delete(cut, journalName+newSuffix)
		if cut[firstFile] != old[firstFile] {
			same(t, what+": without a journal", cut, new)
		} else {
			same(t, what+": without a journal", cut, old)
		}
	}
	res, err := a.do(tree, t.Context(), r)
	if err != nil {
		t.Fatalf("%s: %s after it: %v", what, a.name, err)
	}
	got := listing(t, tree.Dir)
	same(t, what+": after "+a.name, got, new)
	if s := states(res); s != "mine pristine" && s != "mine patched" {
		t.Fatalf("%s: %s", what, s)
	}
}

const firstFile = "a.txt" // the first file that is swapped

// TestKilled: a patcher that dies at any step, and the next command that comes, whichever it is.
func TestKilled(t *testing.T) {
	for _, a := range acts() {
		old, new, steps := a.finals(t)
		if steps < 15 {
			t.Fatal(steps)
		}
		for n := 1; n <= steps; n++ {
			for _, next := range acts() {
				t.Run(fmt.Sprintf("%s %d then %s", a.name, n, next.name), func(t *testing.T) {
					tree, r, _ := a.tree(t)
					done := dieAt(tree, n)
					if _, err := a.do(tree, t.Context(), r); !errors.Is(err, errMade) {
						t.Fatal(err)
					}
					to, from := new, old
					if next.name != a.name {
						to, from = old, new
					}
					nowWhole(t, tree, r, next, from, to, strings.Join((*done)[:n], ", "))
				})
			}
		}
	}
}

// TestKilledWhileUndoing: the next one dies too, at any step.
func TestKilledWhileUndoing(t *testing.T) {
	for _, a := range acts() {
		old, new, steps := a.finals(t)
		for n := 1; n <= steps; n++ {
			for m := 1; ; m++ {
				tree, r, _ := a.tree(t)
				dieAt(tree, n)
				if _, err := a.do(tree, t.Context(), r); !errors.Is(err, errMade) {
					t.Fatal(err)
				}
				done := dieAt(tree, m)
				_, err := a.do(tree, t.Context(), r)
				if err == nil && m > len(*done) {
					same(t, "whole", listing(t, tree.Dir), new)
					break
				}
				if !errors.Is(err, errMade) {
					t.Fatal(err)
				}
				if m == len(*done) && strings.HasPrefix((*done)[m-1], "journal staging") { // undone, and begun anew
					break
				}
				nowWhole(t, tree, r, a, old, new, fmt.Sprintf("%s %d, %d", a.name, n, m))
			}
		}
	}
}

// TestKilledRandom: any commands, each dying somewhere or not, and torn writes; then one that lives.
func TestKilledRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	both := acts()
	old, new, _ := both[0].finals(t)
	for range 150 {
		tree, r, _ := both[0].tree(t)
		var story []string
		for range 1 + random.IntN(5) {
			a, n := both[random.IntN(2)], 1+random.IntN(40)
			var torn string
			steps := 0
			tree.before = func(step, path string) error {
				steps++
				if steps < n {
					return nil
				}
				if steps == n && random.IntN(2) == 0 { // it dies in the middle of a write
					torn = step
					tear(t, tree, step, path)
				}
				return errMade
			}
			_, err := a.do(tree, t.Context(), r)
			story = append(story, fmt.Sprintf("%s dies at %d %s: %v", a.name, n, torn, err))
		}
		i := random.IntN(2)
		to := []map[string]string{new, old}[i]
		tree.before = nil
		if _, err := both[i].do(tree, t.Context(), r); err != nil {
			t.Fatalf("%s\nat last %s: %v", strings.Join(story, "\n"), both[i].name, err)
		}
		same(t, strings.Join(story, "\n")+"\nat last "+both[i].name, listing(t, tree.Dir), to)
	}
}

// tear leaves what a process does that dies while it writes: the beginning of a file.
func tear(t testing.TB, tree *Tree, step, path string) {
	switch {
	case strings.HasPrefix(step, "journal"):
		writeText(t, tree.name(journalName+newSuffix), "{\n  \"pha")
	case strings.HasPrefix(step, "lay"):
		writeText(t, tree.beside(path, strings.TrimPrefix(step, "lay ")), "imp")
	}
}

// TestTornWrite: a process that dies in the middle of writing the journal or a file.
func TestTornWrite(t *testing.T) {
	for _, a := range acts() {
		old, new, steps := a.finals(t)
		for n := 1; n <= steps; n++ {
			tree, r, _ := a.tree(t)
			all := dieAt(tree, n)
			die := tree.before
			tree.before = func(step, path string) error {
				if len(*all) == n-1 {
					tear(t, tree, step, path)
				}
				return die(step, path)
			}
			if _, err := a.do(tree, t.Context(), r); !errors.Is(err, errMade) {
				t.Fatal(err)
			}
			nowWhole(t, tree, r, a, old, new, fmt.Sprintf("%s %v", a.name, *all))
		}
	}
	t.Run("nothing to do is left to do", func(t *testing.T) {
		tree, r, old := acts()[0].tree(t)
		writeText(t, tree.name(journalName+newSuffix), "{")
		mustRevert(t, tree, r)
		same(t, "the tree", listing(t, tree.Dir), old)
	})
}

// TestFailure: a step that fails, while the process lives: all is undone at once, and the error says so.
func TestFailure(t *testing.T) {
	for _, a := range acts() {
		old, new, steps := a.finals(t)
		for n := 1; n <= steps; n++ {
			tree, r, _ := a.tree(t)
			done := failAt(tree, n)
			_, err := a.do(tree, t.Context(), r)
			what := fmt.Sprintf("%s fails at %q: %v", a.name, (*done)[n-1], err)
			if !errors.Is(err, errMade) {
				t.Fatal(what)
			}
			tree.before = nil
			if strings.Contains(err.Error(), "it is done, but") {
				nowWhole(t, tree, r, a, old, new, what)
				continue
			}
			refused(t, err, errMade.Error()+". Nothing is changed")
			same(t, what, listing(t, tree.Dir), old)
		}
	}
}

// TestFailureNames: what the error of the disk says to a person.
func TestFailureNames(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want []string
	}{
		{"full", &fs.PathError{Op: "write", Path: "/x/.a.py.vllm-timings.new", Err: syscall.ENOSPC}, []string{"write /x/.a.py.vllm-timings.new: no space left on device. Nothing is changed"}},
		{"forbidden", &fs.PathError{Op: "open", Path: "/x/.a.py.vllm-timings.new", Err: syscall.EACCES}, []string{"open /x/.a.py", "permission denied: this user may not write there; run it as the user that installed vLLM, or as root. Nothing is changed"}},
		{"chown", &fs.PathError{Op: "chown", Path: "/x/.a.py.vllm-timings.new", Err: syscall.EPERM}, []string{"operation not permitted: this user may not write there"}},
		{"read-only", &fs.PathError{Op: "open", Path: "/x/.a.py.vllm-timings.new", Err: syscall.EROFS}, []string{"read-only file system: patch while the image is built, or mount a writable copy of the folder. Nothing is changed"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree, r, old := acts()[0].tree(t)
			tree.before = func(step, _ string) error {
				if step == "lay "+newSuffix {
					return c.err
				}
				return nil
			}
			_, err := tree.Apply(t.Context(), r)
			refused(t, err, c.want...)
			same(t, "the tree", listing(t, tree.Dir), old)
		})
	}
	t.Run("undoing fails as well", func(t *testing.T) {
		tree, r, old := acts()[0].tree(t)
		tree.before = func(step, path string) error {
			if step == "put "+newSuffix && path == "v1/c.txt" || step == "put "+oldSuffix {
				return &fs.PathError{Op: "rename", Path: path, Err: syscall.EIO}
			}
			return nil
		}
		_, err := tree.Apply(t.Context(), r)
		refused(t, err, "rename v1/c.txt: input/output error; and it could not be undone yet: rename a.txt: input/output error", "the next `apply` or `revert` undoes it first")
		tree.before = nil
		mustRevert(t, tree, r)
		same(t, "the tree", listing(t, tree.Dir), old)
	})
}

// TestRecovered: what is told of a cut off patcher by the one that puts it right.
func TestRecovered(t *testing.T) {
	steps := map[string]string{
		"lay " + newSuffix: "a.txt added.txt v1/b.txt v1/c.txt",
		"put " + newSuffix: "a.txt added.txt v1/b.txt v1/c.txt",
		"remove":           "", // it was done
	}
	for step, want := range steps {
		tree, r, _ := acts()[0].tree(t)
		dead := false
		tree.before = func(s, _ string) error {
			if dead = dead || s == step; dead {
				return errMade
			}
			return nil
		}
		if _, err := tree.Apply(t.Context(), r); err == nil {
			t.Fatal("it lives")
		}
		tree.before = nil
		if res := mustApply(t, tree, r); strings.Join(res.Recovered, " ") != want {
			t.Errorf("%s: %q", step, res.Recovered)
		}
	}
}

// TestTwoAtOnce: the second waits, and finds nothing to do.
func TestTwoAtOnce(t *testing.T) {
	a := acts()[0]
	_, new, _ := a.finals(t)
	tree, r, _ := a.tree(t)
	var wg sync.WaitGroup
	changed := make(chan int, 8)
	for range cap(changed) {
		wg.Go(func() {
			own := *tree
			res, err := own.Apply(context.Background(), r)
			if err != nil {
				t.Error(err)
			}
			changed <- len(res.Changed)
		})
	}
	wg.Wait()
	close(changed)
	counts := map[int]int{}
	for n := range changed {
		counts[n]++
	}
	if !maps.Equal(counts, map[int]int{4: 1, 0: 7}) {
		t.Errorf("files changed: times: %v", counts)
	}
	same(t, "the tree", listing(t, tree.Dir), new)
}

// TestLockEndsWithContext: who waits for another patcher can be ended.
func TestLockEndsWithContext(t *testing.T) {
	tree, r, old := acts()[0].tree(t)
	unlock, err := tree.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := tree.Apply(ctx, r); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	same(t, "the tree", listing(t, tree.Dir), old)
}

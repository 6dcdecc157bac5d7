package patch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
)

// Request says what to do to a tree.
type Request struct {
	Sets  []Set  // in the order in which they are applied; none: the embedded one that fits
	Gate  string // for Apply: the environment variable that switches the patch on; "": always on
	Force bool   // also where a process has the tree loaded
}

// Result says what became of a request.
type Result struct {
	Surveys   []Survey // where the tree stood towards each set, before
	Changed   []string // files that changed
	Recovered []string // files of a patcher that was cut off; its work was undone first
}

// Check makes sure, without writing anything, that every set can be applied or is, and that what comes of it compiles.
func (t *Tree) Check(ctx context.Context, r Request) (Result, error) {
	unlock, err := t.lockSettled(ctx)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	res, after, err := t.plan(r, forward)
	if err != nil {
		return res, err
	}
	return res, t.compile(ctx, after)
}

// Apply applies every set that is not applied yet.
func (t *Tree) Apply(ctx context.Context, r Request) (Result, error) {
	return t.run(ctx, r, forward)
}

// Revert takes every set that is applied out again, the last one first. The bytes are then those from before.
func (t *Tree) Revert(ctx context.Context, r Request) (Result, error) {
	return t.run(ctx, r, backward)
}

// Status says where the tree stands towards each set; of none named, towards the embedded one that fits best. Unlike the
// others it has no error for a tree that drifted; and where another script has patched the tree, it says where the tree
// stands as well as that.
func (t *Tree) Status(ctx context.Context, r Request) (Result, error) {
	unlock, err := t.lockSettled(ctx)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	res, _, err := t.survey(r)
	if err == nil {
		err = t.ours()
	}
	return res, err
}

// ours is an error where another script has patched the tree.
func (t *Tree) ours() error {
	foreign, err := t.foreign()
	if err == nil && len(foreign) > 0 {
		err = fmt.Errorf("%s was patched by another script, which left its marker %q in %s: revert that one, or install vLLM again, first",
			t.Dir, foreignMarker, strings.Join(foreign, ", "))
	}
	return err
}

// lockSettled is lock for those that change nothing: where a patcher was cut off it is an error.
func (t *Tree) lockSettled(ctx context.Context) (unlock func(), err error) {
	unlock, err = t.lock(ctx)
	if err != nil {
		return nil, err
	}
	_, found, err := t.pending()
	if err == nil && found {
		err = fmt.Errorf("a patcher was cut off at %s, which may be half patched: `apply` or `revert` puts it right first", t.Dir)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

func (t *Tree) run(ctx context.Context, r Request, d direction) (Result, error) {
	unlock, err := t.lock(ctx)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	recovered, err := t.recover()
	if err != nil {
		return Result{}, err
	}
	res, after, err := t.plan(r, d)
	res.Recovered = recovered
	if err != nil {
		return res, err
	}
	if d == forward {
		if err := t.compile(ctx, after); err != nil {
			return res, err
		}
	}
	var changes []change
	for _, p := range after.paths() {
		if c := (change{p, after.was[p], after.files[p]}); hash(c.old) != hash(c.new) {
			changes = append(changes, c)
		}
	}
	if len(changes) == 0 {
		return res, nil
	}
	if !r.Force {
		if err := t.notServing(); err != nil {
			return res, err
		}
	}
	err = t.commit(changes, func() error { return t.verify(ctx, changes, d) })
	if err != nil {
		return res, err
	}
	for _, c := range changes {
		res.Changed = append(res.Changed, c.path)
	}
	return res, nil
}

// recover undoes what a patcher that was cut off has left.
func (t *Tree) recover() (files []string, err error) {
	j, found, err := t.pending()
	if err != nil {
		return nil, err
	}
	if !found { // one that was cut off even before its journal was there
		return nil, t.remove(t.name(journalName + newSuffix))
	}
	if err := t.undo(j); err != nil {
		return nil, explain(err)
	}
	if j.Phase == done { // only what was laid ready was still there
		return nil, nil
	}
	for _, f := range j.Files {
		files = append(files, f.Path)
	}
	return files, nil
}

// verify looks at changed files on disk: no stale compiled code, and Python takes them.
func (t *Tree) verify(ctx context.Context, changes []change, d direction) error {
	var names []string
	for _, c := range changes {
		if err := t.forget(c.path); err != nil {
			return err
		}
		if c.new != nil && d == forward { // the other way they are the files that came with vLLM
			names = append(names, t.name(c.path))
		}
	}
	return t.compileFiles(ctx, names)
}

// survey says where the tree stands towards each set, and returns the tree without those that are applied. A set may stand
// on what one before it puts there: so one that is applied is looked at without those behind it, another one with those
// before it.
func (t *Tree) survey(r Request) (Result, overlay, error) {
	without := newOverlay(t)
	sets := r.Sets
	if len(sets) == 0 {
		all, err := Load()
		if err != nil {
			return Result{}, without, err
		}
		s, err := choose(without, all)
		if err != nil {
			return Result{}, without, err
		}
		sets = []Set{s.raw}
	}
	res := Result{Surveys: make([]Survey, len(sets))}
	for i, set := range slices.Backward(sets) {
		s, err := survey(without, set)
		if err == nil && s.State == Patched {
			err = without.turn(s.set, backward)
		}
		if err != nil {
			return Result{}, without, err
		}
		res.Surveys[i] = s
	}
	with := without.clone()
	for i, was := range res.Surveys {
		s, err := survey(with, was.raw)
		if err != nil {
			return Result{}, without, err
		}
		if was.State != Patched && s.State != Patched {
			res.Surveys[i] = s
		}
		if s.State == Pristine { // where that cannot be, Apply says why
			_ = with.turn(was.raw.replaceGate([]byte(was.Gate)), forward)
		}
	}
	return res, without, nil
}

type direction int

const (
	forward direction = iota
	backward
)

// plan works out all files in memory: in the direction forward as the sets leave them, else as they were.
func (t *Tree) plan(r Request, d direction) (Result, overlay, error) {
	if err := t.ours(); err != nil {
		return Result{}, overlay{}, err
	}
	res, o, err := t.survey(r)
	if err != nil {
		return res, o, err
	}
	for _, s := range res.Surveys {
		if s.State == Drifted {
			return res, o, s.drifted()
		}
	}
	if d == forward {
		err = o.apply(res, r.Gate)
	}
	return res, o, err
}

// apply puts the sets of a survey into the overlay, in which none of them is.
func (o overlay) apply(res Result, gate string) error {
	for i, s := range res.Surveys {
		set, err := s.raw.WithGate(gate)
		if err != nil {
			return err
		}
		if s.State == Patched && s.Gate != gate {
			return fmt.Errorf("the set %s is applied with %s, and not with %s: revert it first", s.Set, gateText(s.Gate), gateText(gate))
		}
		now, err := survey(o, set)
		if err == nil && now.State == Patched {
			if slices.ContainsFunc(res.Surveys[:i], func(other Survey) bool { return reflect.DeepEqual(other.raw.Files, s.raw.Files) }) {
				continue // it is named twice
			}
			err = fmt.Errorf("the set %s makes edits that one before it makes too: give only one of them", s.Set)
		}
		if err == nil {
			err = o.turn(set, forward)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// turn puts a set, which has its gate, into the overlay, or takes it out.
func (o overlay) turn(set Set, d direction) error {
	for _, f := range set.Files {
		if folder := path.Dir(f.Path); d == forward && f.Content != nil && !o.tree.hasFolder(folder) {
			return fmt.Errorf("the set %s adds %s, but vLLM has no folder %s", set.Name, f.Path, folder)
		}
		before, _, err := o.read(f.Path)
		if err != nil {
			return err
		}
		turned, err := f.turn(before, d)
		if err != nil {
			return fmt.Errorf("the set %s: %s: %w", set.Name, f.Path, err)
		}
		o.files[f.Path] = turned
	}
	return nil
}

func gateText(gate string) string {
	if gate == "" {
		return "no gate"
	}
	return "the gate " + gate
}

func (o overlay) paths() []string {
	var paths []string
	for p := range o.files {
		paths = append(paths, p)
	}
	slices.Sort(paths)
	return paths
}

// turn returns the file with every anchor replaced. The way back from there must lead to the very same bytes.
func (f File) turn(content []byte, d direction) ([]byte, error) {
	turned, err := f.replace(content, d)
	if err != nil {
		return nil, err
	}
	back, err := f.replace(turned, 1-d)
	if err != nil || !bytes.Equal(back, content) || (back == nil) != (content == nil) {
		return nil, errors.New("its anchors get in each other's way: what they leave could not be taken back exactly")
	}
	return turned, nil
}

func (f File) replace(content []byte, d direction) ([]byte, error) {
	if f.Content != nil {
		if d == backward {
			return nil, nil
		}
		return f.Content, nil
	}
	type edit struct {
		at       int
		old, new []byte
	}
	var edits []edit
	for i, a := range f.Anchors {
		a = a.ends(content)
		p := a.in(content)
		want, old, new := Pristine, a.Old, a.New
		if d == backward {
			want, old, new = Patched, a.New, a.Old
		}
		if p.state != want {
			return nil, fmt.Errorf("anchor %d is %s: %s", i+1, p.state, p.reason)
		}
		edits = append(edits, edit{p.at, old, new})
	}
	slices.SortFunc(edits, func(a, b edit) int { return a.at - b.at })
	out := make([]byte, 0, len(content)+1024)
	from := 0
	for _, e := range edits {
		if e.at < from {
			return nil, errors.New("two anchors stand on the same line")
		}
		out = append(append(out, content[from:e.at]...), e.new...)
		from = e.at + len(e.old)
	}
	return append(out, content[from:]...), nil
}

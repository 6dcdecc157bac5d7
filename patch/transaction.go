package patch

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Several files cannot change in one instant. So before the first one changes, a journal in the package folder says which
// will, and the bytes of both sides lie beside each of them: from there every step is a rename, which needs no space on
// the disk and can be undone by another one. Whoever comes next after a crash finds the journal and undoes.
const (
	journalName = ".vllm-timings.journal"
	newSuffix   = ".vllm-timings.new"
	oldSuffix   = ".vllm-timings.old"
)

// change is what happens to one file. nil content: the file is not there.
type change struct {
	path     string
	old, new []byte
}

// phase of a transaction.
type phase string

const (
	staging    phase = "staging"    // files are laid ready, none is changed
	committing phase = "committing" // files may be changed
	done       phase = "done"       // all are changed, and they compile
)

type journal struct {
	Phase phase         `json:"phase"`
	Files []journalFile `json:"files"`
}

// journalFile has the SHA-256 of a file before and after, "" where it is not there.
type journalFile struct {
	Path string `json:"path"`
	Old  string `json:"old"`
	New  string `json:"new"`
}

func hash(content []byte) string {
	if content == nil {
		return ""
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// step runs one change of the disk.
func (t *Tree) step(name, path string, do func() error) error {
	if t.before != nil {
		if err := t.before(name, path); err != nil {
			return err
		}
	}
	return do()
}

// beside returns the name of a file laid ready beside path.
func (t *Tree) beside(path, suffix string) string {
	dir, base := filepath.Split(t.name(path))
	return filepath.Join(dir, "."+base+suffix)
}

// commit makes all changes, or none. verify is called when they are made; its error undoes them.
func (t *Tree) commit(changes []change, verify func() error) error {
	j := journal{Phase: staging}
	for _, c := range changes {
		j.Files = append(j.Files, journalFile{Path: c.path, Old: hash(c.old), New: hash(c.new)})
	}
	err := t.writeJournal(j)
	if err == nil {
		err = t.stage(changes)
	}
	if err == nil {
		j.Phase = committing
		err = t.writeJournal(j)
	}
	if err == nil {
		err = t.swap(j)
	}
	if err == nil {
		err = verify()
	}
	if err == nil {
		err = t.writeJournal(journal{Phase: done, Files: j.Files})
		// It may have failed after the rename. Once the journal says so it is done: whoever comes after a crash in the
		// middle of an undo would believe that journal.
		if now, found, readErr := t.pending(); readErr == nil && found && now.Phase == done {
			err = nil
		}
	}
	if err != nil {
		if undoErr := t.undo(j); undoErr != nil {
			return fmt.Errorf("%w; and it could not be undone yet: %w. Once that is put right, the next `apply` or `revert` undoes it first", explain(err), undoErr)
		}
		return fmt.Errorf("%w. Nothing is changed", explain(err))
	}
	if err := t.clean(j); err != nil {
		return fmt.Errorf("it is done, but what was laid ready could not be removed: %w. The next `apply` or `revert` does that first", explain(err))
	}
	return nil
}

// explain adds to an error of the disk what to do about it.
func explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: this user may not write there; run it as the user that installed vLLM, or as root", err)
	case isReadOnly(err):
		return fmt.Errorf("%w: patch while the image is built, or mount a writable copy of the folder", err)
	}
	return err
}

// stage lays both sides of each file ready.
func (t *Tree) stage(changes []change) error {
	for _, c := range changes {
		like := t.name(c.path)
		if c.old != nil {
			if err := t.lay(c.path, oldSuffix, c.old, like); err != nil {
				return err
			}
		} else {
			like = filepath.Join(t.Dir, "__init__.py")
		}
		if c.new != nil {
			if err := t.lay(c.path, newSuffix, c.new, like); err != nil {
				return err
			}
		}
	}
	return nil
}

// lay writes a file beside path, with the mode and owner of another one, down to the disk.
func (t *Tree) lay(path, suffix string, content []byte, like string) error {
	return t.step("lay "+suffix, path, func() error {
		info, err := os.Stat(like)
		if err != nil {
			return err
		}
		name := t.beside(path, suffix)
		if err := writeFile(name, content, 0o600); err != nil {
			return err
		}
		if err := keepOwner(name, info); err != nil {
			return err
		}
		return os.Chmod(name, info.Mode().Perm()) // after the owner: changing that drops bits
	})
}

// writeFile writes a new file down to the disk; one of that name that somebody left is taken away first.
func writeFile(name string, content []byte, mode fs.FileMode) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}

// swap puts the new side in the place of each file, if that is still what was read.
func (t *Tree) swap(j journal) error {
	for _, f := range j.Files {
		now, err := t.hashOf(f.Path)
		if err != nil {
			return err
		}
		if now != f.Old {
			return fmt.Errorf("%s: somebody else changed it just now", t.name(f.Path))
		}
		if err := t.put(f.Path, newSuffix, f.New != ""); err != nil {
			return err
		}
	}
	return nil
}

// put renames what was laid ready to path, which breaks hard and symbolic links and leaves what they share as it is; or
// removes path, where there is to be nothing.
func (t *Tree) put(path, suffix string, there bool) error {
	return t.step("put "+suffix, path, func() error {
		var err error
		if there {
			err = os.Rename(t.beside(path, suffix), t.name(path))
		} else {
			err = os.Remove(t.name(path))
		}
		if err != nil {
			return err
		}
		return syncDir(filepath.Dir(t.name(path)))
	})
}

func (t *Tree) hashOf(path string) (string, error) {
	content, ok, err := t.read(path)
	if err != nil || !ok {
		return "", err
	}
	if content == nil {
		content = []byte{}
	}
	return hash(content), nil
}

// undo brings every file back to its old side. It may be cut off anywhere and begun anew.
func (t *Tree) undo(j journal) error {
	if j.Phase == committing {
		for _, f := range j.Files {
			now, err := t.hashOf(f.Path)
			switch {
			case err != nil:
				return err
			case now == f.Old:
			case now == f.New:
				if err := t.put(f.Path, oldSuffix, f.Old != ""); err != nil {
					return err
				}
			case t.untouched(f): // what somebody else did to it stays
			case f.Old == "":
				return fmt.Errorf("%s: somebody else changed it meanwhile, and it was not there before: take it away", t.name(f.Path))
			default:
				return fmt.Errorf("%s: somebody else changed it meanwhile: keep a copy of that, and put %s, its text from before, in its place",
					t.name(f.Path), t.beside(f.Path, oldSuffix))
			}
		}
		for _, f := range j.Files {
			if err := t.forget(f.Path); err != nil {
				return err
			}
		}
	}
	return t.clean(j)
}

// untouched reports whether a file was not swapped, or put back already: swapping takes away what was laid ready as its
// new side, and putting back its old one.
func (t *Tree) untouched(f journalFile) bool {
	there := func(suffix string) bool {
		_, err := os.Lstat(t.beside(f.Path, suffix))
		return err == nil
	}
	return there(newSuffix) || f.Old != "" && !there(oldSuffix)
}

// clean removes what was laid ready, the new side last (see untouched), and at the end the journal.
func (t *Tree) clean(j journal) error {
	for _, f := range j.Files {
		for _, suffix := range []string{oldSuffix, newSuffix} {
			if err := t.remove(t.beside(f.Path, suffix)); err != nil {
				return err
			}
		}
	}
	if err := t.remove(t.name(journalName + newSuffix)); err != nil {
		return err
	}
	return t.remove(t.name(journalName))
}

func (t *Tree) remove(name string) error {
	if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) { // a read-only disk would not even say so
		return nil
	}
	return t.step("remove", name, func() error {
		if err := os.Remove(name); err != nil {
			return err
		}
		return syncDir(filepath.Dir(name))
	})
}

// forget removes the compiled code of a module, which Python would otherwise take for the new text if both had one time.
func (t *Tree) forget(path string) error {
	dir, base := filepath.Split(t.name(path))
	compiled, err := filepath.Glob(filepath.Join(globQuote(dir), "__pycache__", globQuote(trimExt(base))+".*.pyc"))
	if err != nil {
		return err
	}
	for _, name := range compiled {
		if err := t.remove(name); err != nil {
			return err
		}
	}
	return nil
}

func trimExt(base string) string { return base[:len(base)-len(filepath.Ext(base))] }

// globQuote makes a pattern that matches just this path.
func globQuote(path string) string {
	if filepath.Separator != '/' { // no quoting there; such a name is rare, and its compiled code harmless
		return path
	}
	var b bytes.Buffer
	for i := range len(path) {
		if c := path[i]; c == '*' || c == '?' || c == '[' || c == '\\' {
			b.WriteByte('\\')
		}
		b.WriteByte(path[i])
	}
	return b.String()
}

func (t *Tree) writeJournal(j journal) error {
	text, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return err
	}
	name := t.name(journalName)
	return t.step("journal "+string(j.Phase), journalName, func() error {
		if err := writeFile(name+newSuffix, append(text, '\n'), 0o644); err != nil {
			return err
		}
		if err := os.Rename(name+newSuffix, name); err != nil {
			return err
		}
		return syncDir(t.Dir)
	})
}

// pending returns the journal of a patcher that was cut off.
func (t *Tree) pending() (j journal, found bool, err error) {
	text, err := os.ReadFile(t.name(journalName))
	if errors.Is(err, fs.ErrNotExist) {
		return j, false, nil
	}
	if err != nil {
		return j, false, err
	}
	if err := json.Unmarshal(text, &j); err != nil {
		return j, false, fmt.Errorf("%s is no journal: %w; remove it if you know that no patch was cut off", t.name(journalName), err)
	}
	if !slices.Contains([]phase{staging, committing, done}, j.Phase) {
		return j, false, fmt.Errorf("%s has the phase %q, which this vllm-timings does not know", t.name(journalName), j.Phase)
	}
	for _, f := range j.Files {
		if !filepath.IsLocal(filepath.FromSlash(f.Path)) {
			return j, false, fmt.Errorf("%s names %q, which is outside of the package", t.name(journalName), f.Path)
		}
	}
	return j, true, nil
}

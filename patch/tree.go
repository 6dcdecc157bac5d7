package patch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Tree is a vllm package folder on disk.
type Tree struct {
	Dir     string // the folder itself, absolute
	Version string // what its _version.py says; "" where that is not there
	Python  string // the Python that serves it: what makes sure that an edit compiles

	// before, where a test sets it, is called before each step that changes the disk; its error is that step's.
	before func(step, path string) error
}

// Open returns the tree at dir, the folder `vllm` that has an __init__.py.
func Open(dir, python string) (*Tree, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return nil, fmt.Errorf("no vllm package at %s: %w", dir, bare(err))
	case !info.IsDir():
		return nil, fmt.Errorf("no vllm package at %s: it is a file; give the folder vllm that holds __init__.py", dir)
	case !isFile(filepath.Join(dir, "__init__.py")):
		if inner := filepath.Join(dir, "vllm"); isFile(filepath.Join(inner, "__init__.py")) {
			return nil, fmt.Errorf("no vllm package at %s, but one below it: give %s", dir, inner)
		}
		return nil, fmt.Errorf("no vllm package at %s: it has no __init__.py; give the folder vllm that holds it", dir)
	}
	return &Tree{Dir: dir, Version: Version(dir), Python: python}, nil
}

func isFile(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular()
}

// bare returns an error without the path that it repeats.
func bare(err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		return e.Err
	}
	return err
}

var versionLine = regexp.MustCompile(`(?m)^\s*(?:__version__ = )?(?:version|__version__) = ['"]([^'"]+)['"]`)

// Version reads what setuptools-scm wrote into the _version.py of a vllm package folder; "" where that says none. It is only
// shown: sets are chosen by their anchors.
func Version(dir string) string {
	text, err := os.ReadFile(filepath.Join(dir, "_version.py"))
	if err != nil {
		return ""
	}
	if m := versionLine.FindSubmatch(text); m != nil {
		return string(m[1])
	}
	return ""
}

func (t *Tree) String() string {
	if t.Version == "" {
		return t.Dir
	}
	return fmt.Sprintf("%s (vLLM %s)", t.Dir, t.Version)
}

func (t *Tree) name(path string) string { return filepath.Join(t.Dir, filepath.FromSlash(path)) }

func (t *Tree) hasFolder(path string) bool {
	info, err := os.Stat(t.name(path))
	return err == nil && info.IsDir()
}

// read returns a file of the tree. A symbolic link to a file is read through: a package manager may have linked it to its
// cache. One to a folder is refused, as what was written below it would be written into that cache.
func (t *Tree) read(path string) ([]byte, bool, error) {
	parts := strings.Split(path, "/")
	for i := 1; i < len(parts); i++ {
		folder := t.name(strings.Join(parts[:i], "/"))
		info, err := os.Lstat(folder)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, false, nil
		case err != nil:
			return nil, false, err
		case info.Mode()&fs.ModeSymlink != 0:
			return nil, false, fmt.Errorf("%s is a symbolic link to a folder, maybe into a cache that others use: replace it with a copy, or install vLLM with uv's --link-mode=copy", folder)
		case !info.IsDir():
			return nil, false, nil
		}
	}
	info, err := os.Stat(t.name(path))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, false, nil
	case err != nil:
		return nil, false, err
	case !info.Mode().IsRegular():
		return nil, false, fmt.Errorf("%s is no regular file", t.name(path))
	}
	content, err := os.ReadFile(t.name(path))
	return content, err == nil, err
}

// foreign returns the files that another script has patched.
func (t *Tree) foreign() ([]string, error) {
	var found []string
	err := filepath.WalkDir(t.Dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() && d.Type()&fs.ModeSymlink == 0 || filepath.Ext(name) != ".py" {
			return nil // what cannot be read is told where it is needed
		}
		if !isFile(name) { // a link to something that never ends, maybe
			return nil
		}
		text, err := os.ReadFile(name)
		if err == nil && bytes.Contains(text, []byte(foreignMarker)) {
			path, _ := filepath.Rel(t.Dir, name)
			found = append(found, filepath.ToSlash(path))
		}
		return nil
	})
	slices.Sort(found)
	return found, err
}

// overlay is a tree with changes that are not yet on disk.
type overlay struct {
	tree  *Tree
	was   map[string][]byte // what was read from the disk, once: who edits a file later must not have that overwritten
	files map[string][]byte // in both nil: not there
}

func newOverlay(t *Tree) overlay {
	return overlay{tree: t, was: map[string][]byte{}, files: map[string][]byte{}}
}

func (o overlay) clone() overlay {
	return overlay{tree: o.tree, was: o.was, files: maps.Clone(o.files)}
}

func (o overlay) read(path string) ([]byte, bool, error) {
	for _, files := range []map[string][]byte{o.files, o.was} {
		if content, ok := files[path]; ok {
			return content, content != nil, nil
		}
	}
	content, ok, err := o.tree.read(path)
	if err == nil {
		o.was[path] = content
	}
	return content, ok, err
}

// lockWait is how long a patcher waits for another one at the same tree, which takes a second or two.
const lockWait = 60 * time.Second

// lock keeps other patchers out until unlock is called. It locks the folder itself, so it leaves no file behind and ends
// with the process. Where the file system cannot lock, the journal alone has to do.
func (t *Tree) lock(ctx context.Context) (unlock func(), err error) {
	dir, err := os.Open(t.Dir)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockWait)
	for {
		taken, err := tryLock(dir)
		if err != nil || taken {
			return func() { _ = dir.Close() }, nil
		}
		if time.Now().After(deadline) {
			_ = dir.Close()
			return nil, fmt.Errorf("another vllm-timings has been patching %s for %s: wait for it, or end it", t.Dir, lockWait)
		}
		select {
		case <-ctx.Done():
			_ = dir.Close()
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

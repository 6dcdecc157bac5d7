package patch

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/bluekeyes/go-gitdiff/gitdiff"
)

// ParseDiff reads a unified diff as a set. Each hunk becomes an anchor: its context and removed lines are the old side,
// its context and added lines the new one. Line numbers are not used. Paths are those below a folder `vllm`, as in a diff
// made in vLLM's repository or in site-packages.
//
// What cannot be undone by its own text is an error: deleted, renamed, copied and binary files, changes of a mode, and
// hunks that leave nothing by which they could be found again.
func ParseDiff(name string, diff []byte) (Set, error) {
	if diff = lf(diff); !bytes.HasSuffix(diff, []byte("\n")) { // as when it was pasted: that says nothing of its last line
		diff = append(diff, '\n')
	}
	files, _, err := gitdiff.Parse(bytes.NewReader(diff))
	if err != nil {
		return Set{}, fmt.Errorf("%s: not a unified diff: %w", name, err)
	}
	if err := leftOut(diff); err != nil {
		return Set{}, fmt.Errorf("%s: %w", name, err)
	}
	if len(files) == 0 {
		return Set{}, fmt.Errorf("%s: no change in it: not a unified diff, or an empty one", name)
	}
	set := Set{Name: name}
	for _, f := range files {
		file, err := fileOf(f)
		if err != nil {
			return Set{}, fmt.Errorf("%s: %w", name, err)
		}
		if slices.ContainsFunc(set.Files, func(other File) bool { return other.Path == file.Path }) {
			return Set{}, fmt.Errorf("%s: %s is in it twice", name, file.Path)
		}
		set.Files = append(set.Files, file)
	}
	return set, nil
}

func fileOf(f *gitdiff.File) (File, error) {
	named := f.NewName
	if f.IsDelete {
		named = f.OldName
	}
	where, err := packagePath(named)
	if err != nil {
		return File{}, err
	}
	switch {
	case f.IsDelete:
		return File{}, fmt.Errorf("%s: it deletes a file; a set may only edit and add", where)
	case f.IsRename, f.IsCopy:
		return File{}, fmt.Errorf("%s: it renames or copies a file; a set may only edit and add", where)
	case f.IsBinary:
		return File{}, fmt.Errorf("%s: it is binary; a set has text only", where)
	case !f.IsNew && f.NewMode != 0 && f.NewMode != f.OldMode:
		return File{}, fmt.Errorf("%s: it changes a file's mode; a set may only edit and add", where)
	case f.IsNew && len(f.TextFragments) == 0:
		return File{}, fmt.Errorf("%s: it adds an empty file; put a line into it", where)
	case len(f.TextFragments) == 0:
		return File{}, fmt.Errorf("%s: no hunk for it", where)
	}
	file := File{Path: where}
	for i, hunk := range f.TextFragments {
		old, new, err := sides(hunk)
		if err != nil {
			return File{}, fmt.Errorf("%s, hunk %d: %w", where, i+1, err)
		}
		if f.IsNew {
			if len(f.TextFragments) > 1 {
				return File{}, fmt.Errorf("%s: a new file in several hunks", where)
			}
			file.Content = new
			return file, nil
		}
		if err := usable(old, new); err != nil {
			return File{}, fmt.Errorf("%s, hunk %d: %w", where, i+1, err)
		}
		file.Anchors = append(file.Anchors, Anchor{Old: old, New: new})
	}
	return file, nil
}

func sides(hunk *gitdiff.TextFragment) (old, new []byte, err error) {
	add := func(side *[]byte, line string) {
		if n := len(*side); n > 0 && (*side)[n-1] != '\n' {
			err = errors.New(`there are lines behind "\ No newline at end of file"`)
		}
		*side = append(*side, line...)
	}
	for _, line := range hunk.Lines {
		if line.Old() {
			add(&old, line.Line)
		}
		if line.New() {
			add(&new, line.Line)
		}
	}
	return old, new, err
}

// lf returns text with LF ends: in which ends a diff was sent around says nothing of the files, which are matched in
// their own.
func lf(text []byte) []byte { return bytes.ReplaceAll(text, []byte("\r\n"), []byte("\n")) }

var (
	hunkHeader = regexp.MustCompile(`^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@`)
	notInDiff  = regexp.MustCompile(`^(?:Only in .*: .*|(?:Binary f|F)iles .* differ)\n?$`)
)

// leftOut is an error where a diff has or names changes that its parser takes for the text between two files: lines of a
// hunk behind what its header counts, and what diff -r only mentions.
func leftOut(diff []byte) error {
	old, new, hunk := 0, 0, 0 // lines still to come, and where the last hunk began while nothing else came
	number := 0
	for line := range bytes.Lines(diff) {
		number++
		m := hunkHeader.FindSubmatch(line)
		switch {
		case old > 0 || new > 0:
			switch line[0] {
			case ' ', '\n':
				old, new = old-1, new-1
			case '-':
				old--
			case '+':
				new--
			}
		case m != nil:
			old, new, hunk = count(m[1]), count(m[2]), number
		case hunk > 0 && (line[0] == '\\' || line[0] == '\n'):
		case hunk > 0 && bytes.IndexByte([]byte(" +-"), line[0]) >= 0 && !bytes.HasPrefix(line, []byte("--- ")) && !bytes.HasPrefix(line, []byte("-- ")):
			return fmt.Errorf("line %d: the hunk of line %d has more lines than its header counts", number, hunk)
		case notInDiff.Match(line) && !bytes.Contains(line, []byte("__pycache__")):
			return fmt.Errorf("line %d: %q: what this names is not in the diff; make it with diff -ruN -x __pycache__, and without binary files", number, bytes.TrimSpace(line))
		default:
			hunk = 0
		}
	}
	return nil
}

// count reads a number of lines in a hunk's header, which is left out for one.
func count(digits []byte) int {
	if len(digits) == 0 {
		return 1
	}
	n, _ := strconv.Atoi(string(digits))
	return n
}

func usable(old, new []byte) error {
	switch {
	case bytes.Equal(old, new):
		return errors.New("it changes nothing")
	case len(bytes.TrimSpace(old)) == 0:
		return errors.New("it has no line to find its place by; make the diff with context lines (diff -U3)")
	case len(bytes.TrimSpace(new)) == 0:
		return errors.New("it leaves no line to find it again by; make the diff with context lines (diff -U3)")
	}
	return nil
}

// packagePath returns what is below the folder vllm in a path of a diff.
func packagePath(name string) (string, error) {
	parts := strings.Split(filepath.ToSlash(name), "/")
	for i := len(parts) - 2; i >= 0; i-- {
		if parts[i] != "vllm" {
			continue
		}
		below := path.Clean(strings.Join(parts[i+1:], "/"))
		if below != "." && filepath.IsLocal(filepath.FromSlash(below)) {
			return below, nil
		}
		break
	}
	return "", fmt.Errorf("%q is not below a folder vllm; make the diff with git in vLLM's repository (without --no-prefix), or with diff -ruN a/vllm b/vllm", name)
}

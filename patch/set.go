// Package patch edits the source of an installed vLLM, so that vLLM itself puts `timings` into its answers.
//
// A set is a list of anchors: old lines, which must be in a file exactly once, and the new lines for their place. Which
// version of vLLM it is does not matter, only whether every anchor fits. From there:
//
//	Load, ParseDiff   read a set                     (set.go, diff.go)
//	Find, Open        find the vllm package folder   (find.go, tree.go)
//	Survey            where does the tree stand      (anchor.go, survey.go)
//	Apply, Revert     change it, all files or none   (apply.go, transaction.go)
//	Diff, Script      say it without this program    (export.go)
package patch

import (
	"bytes"
	"cmp"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
)

const (
	// Marker is in each line that our sets put into a file of vLLM.
	Marker = "# [vllm-timings]"
	// foreignMarker is in the edits of a public script that does something alike.
	foreignMarker = "# [patch_timings]"
	// gateMark stands in a set for the name of the environment variable that switches the patch on.
	gateMark = "@gate@"
)

// Set is a named list of changes, all of which are made or none.
type Set struct {
	Name  string
	Files []File
}

// File is what a set does to one file.
type File struct {
	Path    string   // below the package folder, with slashes: "v1/engine/async_llm.py"
	Content []byte   // of a file that the set adds; nil where it edits one
	Anchors []Anchor // where it edits one, in the order of the diff
}

// Anchor is one edit: whole lines with LF. Neither side is empty, so that both states can be told apart.
type Anchor struct {
	Old, New []byte
}

//go:embed sets/vllm_timings.py sets/*/*.patch
var embedded embed.FS

// moduleName is the file that our sets add to the package folder.
const moduleName = "vllm_timings.py"

// Load returns the embedded sets, sorted by name. Each is a folder of diffs, and adds our module as well: that is kept
// once and as a file of its own, so that it can be read and tested.
func Load() ([]Set, error) {
	module, err := embedded.ReadFile("sets/" + moduleName)
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(embedded, "sets/*/*.patch")
	if err != nil {
		return nil, err
	}
	var sets []Set
	for _, name := range names {
		diff, err := embedded.ReadFile(name)
		if err != nil {
			return nil, err
		}
		set, err := ParseDiff(path.Base(path.Dir(name)), diff)
		if err != nil {
			return nil, err
		}
		if n := len(sets); n > 0 && sets[n-1].Name == set.Name {
			sets[n-1].Files = append(sets[n-1].Files, set.Files...)
			continue
		}
		set.Files = append(set.Files, File{Path: moduleName, Content: module})
		sets = append(sets, set)
	}
	slices.SortFunc(sets, func(a, b Set) int { return cmp.Compare(a.Name, b.Name) })
	return sets, nil
}

// edits counts what the set changes; of two sets that fit, the one with more says more of the tree.
func (s Set) edits() int {
	n := 0
	for _, f := range s.Files {
		n += max(1, len(f.Anchors))
	}
	return n
}

// Gated reports whether the set can be switched by an environment variable.
func (s Set) Gated() bool {
	return slices.ContainsFunc(s.Files, func(f File) bool {
		return bytes.Contains(f.Content, []byte(gateMark)) || slices.ContainsFunc(f.Anchors, func(a Anchor) bool {
			return bytes.Contains(a.New, []byte(gateMark))
		})
	})
}

var gateName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// WithGate returns the set with the name of an environment variable where its gate is; with "" it is always on.
func (s Set) WithGate(name string) (Set, error) {
	if name != "" && !gateName.MatchString(name) {
		return s, fmt.Errorf("%q is no name of an environment variable, such as VLLM_TIMINGS", name)
	}
	if name != "" && !s.Gated() {
		return s, fmt.Errorf("the set %s has no gate: its files do not have %s in them", s.Name, gateMark)
	}
	return s.replaceGate([]byte(name)), nil
}

func (s Set) replaceGate(name []byte) Set {
	gate := func(b []byte) []byte {
		if b == nil {
			return nil
		}
		return bytes.ReplaceAll(b, []byte(gateMark), name)
	}
	out := Set{Name: s.Name}
	for _, f := range s.Files {
		to := File{Path: f.Path, Content: gate(f.Content)}
		for _, a := range f.Anchors {
			to.Anchors = append(to.Anchors, Anchor{Old: a.Old, New: gate(a.New)})
		}
		out.Files = append(out.Files, to)
	}
	return out
}

// gateIn returns the gate with which the set was put into content, the file f, where it can be seen there: the line with
// the mark is looked for with a name, or nothing, in its place.
func gateIn(f File, content []byte) (string, bool) {
	texts := [][]byte{f.Content}
	for _, a := range f.Anchors {
		texts = append(texts, a.New)
	}
	for _, text := range texts {
		for line := range bytes.Lines(text) {
			before, after, found := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(gateMark))
			if !found || bytes.Contains(after, []byte(gateMark)) {
				continue
			}
			pattern := `(?m)^` + regexp.QuoteMeta(string(before)) + `([A-Za-z0-9_]*)` + regexp.QuoteMeta(string(after)) + `\r?$`
			if m := regexp.MustCompile(pattern).FindSubmatch(content); m != nil {
				return string(m[1]), true
			}
		}
	}
	return "", false
}

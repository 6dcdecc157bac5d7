package main

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// try runs all that can be done with the patch over one release.
func (m *matrix) try(version string) row {
	r := row{version: version, set: "-"}
	source, err := m.source(version)
	if err != nil {
		r.engine = said(err)
		return r
	}
	r.endpoints = endpoints(source)
	before, err := listing(source)
	if err != nil {
		r.engine = said(err)
		return r
	}
	patched, set, err := m.engine(source, before)
	r.set, r.engine = set, said(err)
	if err != nil {
		return r
	}
	r.script = said(m.patchAndBack(source, before, patched, "python3", m.script))
	r.diff = said(m.diff(source, patched))
	return r
}

func said(err error) string {
	if err == nil {
		return ok
	}
	return strings.ReplaceAll(strings.ReplaceAll(err.Error(), "\n", "; "), "|", "/")
}

// engine patches a copy and takes the patch out again. It returns the listing of the patched tree and the set.
func (m *matrix) engine(source string, before tree) (patched tree, set string, err error) {
	dir, err := m.copy(source)
	if err != nil {
		return nil, "", err
	}
	at := []string{"--vllm-dir", filepath.Join(dir, "vllm"), "--python", "python3"}
	patch := func(command string) error {
		_, err := m.run("", m.program, append([]string{"patch", command}, at...)...)
		return err
	}
	out, err := m.run("", m.program, append([]string{"patch", "status", "--json"}, at...)...)
	if err != nil {
		return nil, "", err
	}
	var status struct {
		Sets []struct{ Set string }
	}
	if err := json.Unmarshal([]byte(out), &status); err != nil || len(status.Sets) != 1 {
		return nil, "", fmt.Errorf("patch status: %w: %s", err, out)
	}
	set = status.Sets[0].Set
	if err := patch("check"); err != nil {
		return nil, set, err
	}
	if err := same(dir, before); err != nil {
		return nil, set, fmt.Errorf("check changed %w", err)
	}
	if err := patch("apply"); err != nil {
		return nil, set, err
	}
	patched, err = listing(dir)
	if err != nil {
		return nil, set, err
	}
	changed := changed(before, patched)
	if len(changed) < 3 {
		return nil, set, fmt.Errorf("apply changed only %v", changed)
	}
	if err := patch("check"); err != nil {
		return nil, set, err
	}
	if err := m.compile(dir, changed); err != nil {
		return nil, set, err
	}
	if err := patch("apply"); err != nil {
		return nil, set, err
	}
	if err := same(dir, patched); err != nil {
		return nil, set, fmt.Errorf("a second apply changed %w", err)
	}
	if err := patch("revert"); err != nil {
		return nil, set, err
	}
	if err := same(dir, before); err != nil {
		return nil, set, fmt.Errorf("revert did not restore %w", err)
	}
	return patched, set, nil
}

// patchAndBack does with the script what engine does.
func (m *matrix) patchAndBack(source string, before, patched tree, command ...string) error {
	dir, err := m.copy(source)
	if err != nil {
		return err
	}
	for _, step := range []struct {
		flags []string
		then  tree
	}{
		{[]string{"--check"}, before}, {nil, patched}, {[]string{"--check"}, patched}, {nil, patched}, {[]string{"--revert"}, before},
	} {
		args := slices.Concat(command[1:], []string{"--vllm-dir", filepath.Join(dir, "vllm")}, step.flags)
		if _, err := m.run("", command[0], args...); err != nil {
			return err
		}
		if err := same(dir, step.then); err != nil {
			return fmt.Errorf("script %v: %w", step.flags, err)
		}
	}
	return nil
}

// diff exports a diff and applies it with git and with patch.
func (m *matrix) diff(source string, patched tree) error {
	for _, how := range [][][]string{
		{{"git", "apply", "--check"}, {"git", "apply"}},
		{{"patch", "--quiet", "--strip=1", "--no-backup-if-mismatch", "--input"}},
	} {
		dir, err := m.copy(source)
		if err != nil {
			return err
		}
		file := filepath.Join(m.work, "timings.diff")
		if _, err := m.run("", m.program, "patch", "export", "--format", "diff", "--vllm-dir", filepath.Join(dir, "vllm"), "--output", file); err != nil {
			return err
		}
		for _, command := range how {
			if _, err := m.run(dir, command[0], append(command[1:], file)...); err != nil {
				return err
			}
		}
		if err := same(dir, patched); err != nil {
			return fmt.Errorf("%s: %w", how[0][0], err)
		}
	}
	return nil
}

func (m *matrix) compile(dir string, files []string) error {
	for _, f := range files {
		script := "import py_compile, sys; py_compile.compile(sys.argv[1], cfile=sys.argv[2], doraise=True)"
		if _, err := m.run("", "python3", "-c", script, filepath.Join(dir, f), filepath.Join(m.work, "out.pyc")); err != nil {
			return err
		}
	}
	return nil
}

// copy makes a fresh copy of a release's files.
func (m *matrix) copy(source string) (string, error) {
	dir := filepath.Join(m.work, "site-packages")
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	return dir, os.CopyFS(dir, os.DirFS(source))
}

// tree has a text for each file that changes with its bytes and mode.
type tree map[string]string

func listing(dir string) (tree, error) {
	t := tree{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(name)
		path, _ := filepath.Rel(dir, name)
		t[path] = fmt.Sprintf("%s %x", info.Mode(), sha256.Sum256(text))
		return err
	})
	return t, err
}

// changed returns the files in which two trees differ.
func changed(a, b tree) []string {
	var paths []string
	for path := range maps.Keys(b) {
		if a[path] != b[path] {
			paths = append(paths, path)
		}
	}
	for path := range maps.Keys(a) {
		if _, there := b[path]; !there {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}

func same(dir string, want tree) error {
	got, err := listing(dir)
	if err != nil {
		return err
	}
	if c := changed(want, got); len(c) > 0 {
		return errors.New(strings.Join(c, ", "))
	}
	return nil
}

// endpoints names those of a release that generate text, by the files that serve them in one layout or another.
func endpoints(source string) string {
	var names []string
	for _, e := range []struct {
		name  string
		files []string
	}{
		{"chat", []string{"openai/serving_chat.py", "openai/chat_completion/serving.py"}},
		{"text", []string{"openai/serving_completion.py", "openai/completion/serving.py"}},
		{"responses", []string{"openai/serving_responses.py", "openai/responses/serving.py"}},
		{"messages", []string{"anthropic/serving_messages.py", "anthropic/serving.py"}},
	} {
		if slices.ContainsFunc(e.files, func(f string) bool {
			_, err := os.Stat(filepath.Join(source, "vllm", "entrypoints", filepath.FromSlash(f)))
			return err == nil
		}) {
			names = append(names, e.name)
		}
	}
	return strings.Join(names, ", ")
}

package dockercheck

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

// root is the top of the repository: what "docker build ." gets.
const root = "../.."

// ignoreMatcher reads .dockerignore.
func ignoreMatcher(t *testing.T) *patternmatcher.PatternMatcher {
	t.Helper()
	f, err := os.Open(filepath.Join(root, ".dockerignore"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	patterns, err := ignorefile.ReadAll(f)
	if err != nil {
		t.Fatalf(".dockerignore: %v", err)
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		t.Fatalf(".dockerignore: %v", err)
	}
	return m
}

// buildContext copies what .dockerignore lets through into a new folder: the
// files that "COPY . ." can see.
func buildContext(t *testing.T) string {
	t.Helper()
	ignored := ignoreMatcher(t)
	if ignored.Exclusions() {
		// With "!" patterns an ignored folder could not be skipped whole.
		t.Fatal(".dockerignore has patterns that begin with '!', which this test does not follow")
	}
	dir := t.TempDir()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil || name == "." {
			return err
		}
		skip, err := ignored.MatchesOrParentMatches(name)
		switch {
		case err != nil:
			return err
		case skip && d.IsDir():
			return filepath.SkipDir
		case skip:
			return nil
		case d.IsDir():
			return os.Mkdir(filepath.Join(dir, name), 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		return copyFile(filepath.Join(dir, name), path)
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

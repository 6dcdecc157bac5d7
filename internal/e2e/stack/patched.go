//go:build unix

package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Site is a folder with a copy of a vLLM's package, to be patched. Its files are hard links to those of the environment,
// as in one that uv made: whoever writes into them spoils the environment of all other tests.
type Site struct {
	Dir     string // to be put into PYTHONPATH
	Package string // Dir/vllm
	Python  string // of the environment

	original string // the package in the environment
}

// NewSite makes a site beside the environment, as hard links need one file system.
func NewSite(ctx context.Context, executable string) (*Site, error) {
	found, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(executable)), "lib", "python3*", "site-packages", "vllm"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("%d vllm packages in the environment of %s (%w)", len(found), executable, err)
	}
	dir, err := os.MkdirTemp(filepath.Dir(filepath.Dir(filepath.Dir(executable))), "patched-")
	if err != nil {
		return nil, err
	}
	s := &Site{Dir: dir, Package: filepath.Join(dir, "vllm"), Python: filepath.Join(filepath.Dir(executable), "python3"), original: found[0]}
	if out, err := exec.CommandContext(ctx, "cp", "-al", s.original, dir).CombinedOutput(); err != nil {
		return s, errors.Join(fmt.Errorf("cp -al: %w: %s", err, out), s.Remove())
	}
	return s, nil
}

// Remove removes the site.
func (s *Site) Remove() error { return os.RemoveAll(s.Dir) }

// Env makes its Python, and all that starts from it, import the site's vllm.
func (s *Site) Env() []string { return []string{"PYTHONPATH=" + s.Dir} }

// Edited returns the files of the package that are not those of the environment any more, or are new.
func (s *Site) Edited() ([]string, error) {
	var edited []string
	err := filepath.WalkDir(s.Package, func(name string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(name, ".pyc") {
			return err
		}
		path, err := filepath.Rel(s.Package, name)
		if err != nil {
			return err
		}
		ours, err := os.Stat(name)
		if err != nil {
			return err
		}
		if theirs, err := os.Stat(filepath.Join(s.original, path)); err != nil || !os.SameFile(ours, theirs) {
			edited = append(edited, path)
		}
		return nil
	})
	return edited, err
}

// Original returns a file of the package in the environment.
func (s *Site) Original(path string) ([]byte, error) {
	return os.ReadFile(filepath.Join(s.original, path))
}

// BootCommand is the shell script with which deploy/patch starts a container, with the patch script at another place.
func BootCommand(script string) (string, error) {
	m, err := deployed("docker-run.sh", regexp.MustCompile(`(?m)^ +-c '(.*)' vllm "\$@"$`))
	return strings.ReplaceAll(m, "/vllm-timings-patch.py", script), err
}

// ImageCommand is the RUN of deploy/patch/Dockerfile.
func ImageCommand() (string, error) {
	return deployed("Dockerfile", regexp.MustCompile(`(?ms)^RUN (.*)\n\z`))
}

func deployed(name string, pattern *regexp.Regexp) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(root, "deploy", "patch", name))
	if err != nil {
		return "", err
	}
	m := pattern.FindSubmatch(text)
	if m == nil {
		return "", fmt.Errorf("deploy/patch/%s has no %s", name, pattern)
	}
	return string(m[1]), nil
}

// Command release builds what a release has into dist: for each platform an archive with the program and an SBOM of what is
// in it, and their checksums. Two runs at the same commit with the same Go write the same bytes, wherever they run.
//
//	go run ./internal/release [--version v1.2.3] [--out dist] [--platforms linux/amd64,...] [--dirty] [--go go]
//
// The time of everything is that of the commit, or SOURCE_DATE_EPOCH. It needs Go and git, and no other program.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
)

const program = "vllm-timings"

// packed are the files and folders, as far as git has them, that go into each archive beside the program.
var packed = []string{"CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "deploy", "docs"}

// options are the flags.
type options struct {
	version   string // "": what git says
	out       string
	platforms string
	goTool    string
	dirty     bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var o options
	flag.StringVar(&o.version, "version", "", "version to give the program, if not what git describe says")
	flag.StringVar(&o.out, "out", "dist", "folder to write to")
	flag.StringVar(&o.platforms, "platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64", "what to build for")
	flag.StringVar(&o.goTool, "go", "go", "the go command")
	flag.BoolVar(&o.dirty, "dirty", false, "build also with changes that are not committed")
	flag.Parse()
	if err := run(ctx, ".", o); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// run makes the release of the work tree that dir is in.
func run(ctx context.Context, dir string, o options) error {
	s, err := readSource(ctx, dir, o.version, o.dirty)
	if err != nil {
		return err
	}
	// A version that is to be released says what is new in it.
	notes := ""
	if isRelease(s.version) {
		text, err := os.ReadFile(filepath.Join(s.root, "CHANGELOG.md"))
		if err != nil {
			return err
		}
		if notes, err = section(string(text), strings.TrimPrefix(s.version, "v")); err != nil {
			return err
		}
	}
	files, err := s.files(ctx, packed)
	if err != nil {
		return err
	}
	if err := empty(o.out); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()

	w := writer{dir: o.out}
	for platform := range strings.SplitSeq(o.platforms, ",") {
		goos, goarch, ok := strings.Cut(platform, "/")
		if !ok {
			return fmt.Errorf("%q is no platform like linux/amd64", platform)
		}
		b, err := s.build(ctx, o.goTool, goos, goarch, filepath.Join(work, goos+"-"+goarch))
		if err != nil {
			return fmt.Errorf("%s: %w", platform, err)
		}
		name := strings.Join([]string{program, strings.TrimPrefix(s.version, "v"), goos, goarch}, "_")
		content := slices.Concat([]file{{name: program, mode: 0o755, data: b.data}}, files, b.licences)
		archive, err := pack(name, content, s.date)
		if err != nil {
			return err
		}
		bom, err := b.sbom(s)
		if err != nil {
			return err
		}
		if err := w.write(name+".tar.gz", archive); err != nil {
			return err
		}
		if err := w.write(name+".cdx.json", bom); err != nil {
			return err
		}
	}
	if notes != "" {
		if err := os.WriteFile(filepath.Join(o.out, "notes.md"), []byte(notes), 0o666); err != nil {
			return err
		}
	}
	return w.sums()
}

// empty makes the folder, without what an earlier release left in it.
func empty(dir string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, program+"_*"))
	if err != nil {
		return err
	}
	for _, name := range append(old, filepath.Join(dir, "SHA256SUMS"), filepath.Join(dir, "notes.md")) {
		if err := os.RemoveAll(name); err != nil {
			return err
		}
	}
	return nil
}

// writer writes files and remembers their checksums.
type writer struct {
	dir   string
	lines []string
}

func (w *writer) write(name string, data []byte) error {
	path := filepath.Join(w.dir, name)
	if err := os.WriteFile(path, data, 0o666); err != nil {
		return err
	}
	w.lines = append(w.lines, fmt.Sprintf("%x  %s\n", sha256.Sum256(data), name))
	fmt.Println(path)
	return nil
}

// sums writes SHA256SUMS, last of all: a folder without it is unfinished.
func (w *writer) sums() error {
	name := func(line string) string { return line[sha256.Size*2:] }
	slices.SortFunc(w.lines, func(a, b string) int { return strings.Compare(name(a), name(b)) })
	path := filepath.Join(w.dir, "SHA256SUMS")
	if err := os.WriteFile(path, []byte(strings.Join(w.lines, "")), 0o666); err != nil {
		return err
	}
	fmt.Println(path)
	return nil
}

// output runs a command and returns what it prints. Its own words are the error.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %s", filepath.Base(name), args[0], cmp.Or(strings.TrimSpace(stderr.String()), err.Error()))
	}
	return stdout.String(), nil
}

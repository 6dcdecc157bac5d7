package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// source is a work tree and what the release says of it.
type source struct {
	root            string
	version, commit string
	date            time.Time // UTC
}

var (
	// versionForm keeps what could be misread in a file's name or in a flag of the linker out.
	versionForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+-]*$`)
	releaseForm = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)
	// sinceForm is how git describe says that there are commits after the tag.
	sinceForm = regexp.MustCompile(`-\d+-g[0-9a-f]+$`)
)

const dirtySuffix = "-dirty"

// isRelease says whether a version is that of a tag, and not of some commit after it.
func isRelease(version string) bool {
	return releaseForm.MatchString(version) && !sinceForm.MatchString(version) && !strings.HasSuffix(version, dirtySuffix)
}

func readSource(ctx context.Context, dir, version string, dirtyToo bool) (*source, error) {
	git := func(args ...string) (string, error) {
		out, err := output(ctx, dir, []string{"LC_ALL=C"}, "git", args...)
		return strings.TrimSuffix(out, "\n"), err
	}
	var s source
	var err error
	if s.root, err = git("rev-parse", "--show-toplevel"); err != nil {
		return nil, err
	}
	if s.commit, err = git("rev-parse", "HEAD"); err != nil {
		return nil, err
	}
	// Also files that git does not know, as go build takes them in.
	changes, err := git("status", "--porcelain", "--untracked-files=all")
	if err != nil {
		return nil, err
	}
	if changes != "" && !dirtyToo {
		return nil, fmt.Errorf("what is built would not be commit %.12s: commit or remove these first, or say --dirty (make release DIRTY=1)\n%s", s.commit, changes)
	}
	// A fixed length of the hash: git's own choice depends on how many commits the clone has.
	s.version = version
	if s.version == "" {
		if s.version, err = git("describe", "--tags", "--always", "--match", "v[0-9]*", "--abbrev=12"); err != nil {
			return nil, err
		}
	}
	if changes != "" {
		s.commit += "+changes"
		if version == "" {
			s.version += dirtySuffix
		}
	}
	if !versionForm.MatchString(s.version) {
		return nil, fmt.Errorf("%q is no version: letters, digits, dots, + and - only", s.version)
	}
	name, epoch := "SOURCE_DATE_EPOCH", os.Getenv("SOURCE_DATE_EPOCH")
	if epoch == "" {
		name = "the commit's date"
		if epoch, err = git("log", "-1", "--format=%ct"); err != nil {
			return nil, err
		}
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil || seconds < 0 {
		return nil, fmt.Errorf("%s is no number of seconds: %q", name, epoch)
	}
	s.date = time.Unix(seconds, 0).UTC()
	return &s, nil
}

// files reads what git has of these files and folders. Modes are git's, as those on disk follow the umask.
func (s *source) files(ctx context.Context, names []string) ([]file, error) {
	list, err := output(ctx, s.root, nil, "git", append([]string{"ls-files", "--stage", "-z", "--"}, names...)...)
	if err != nil {
		return nil, err
	}
	var files []file
	var missing []error
	for _, name := range names {
		missing = append(missing, fmt.Errorf("git has no %s here", name))
	}
	for entry := range strings.SplitSeq(strings.TrimSuffix(list, "\x00"), "\x00") {
		info, name, ok := strings.Cut(entry, "\t")
		if !ok {
			continue
		}
		mode := map[string]int64{"100644": 0o644, "100755": 0o755}[strings.Fields(info)[0]]
		if mode == 0 {
			return nil, fmt.Errorf("%s is no plain file: %s", name, info)
		}
		data, err := os.ReadFile(filepath.Join(s.root, filepath.FromSlash(name)))
		if err != nil {
			return nil, err
		}
		files = append(files, file{name, mode, data})
		top, _, _ := strings.Cut(name, "/")
		if i := slices.Index(names, top); i >= 0 {
			missing[i] = nil
		}
	}
	return files, errors.Join(missing...)
}

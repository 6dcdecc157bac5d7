//go:build unix

package main

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// TestDirty: what is not committed is not released, unless somebody says so.
func TestDirty(t *testing.T) {
	needs.Program(t, "git", "git")
	for name, test := range map[string]struct {
		change func(repo string)
		want   string
	}{
		"clean":     {change: func(string) {}},
		"ignored":   {change: func(repo string) { writeFile(t, filepath.Join(repo, "dist", "x"), "", 0o600) }},
		"changed":   {change: func(repo string) { writeFile(t, filepath.Join(repo, "main.go"), "y", 0o600) }, want: " M main.go"},
		"staged":    {change: func(repo string) { git(t, repo, "rm", "--quiet", "main.go") }, want: "D  main.go"},
		"untracked": {change: func(repo string) { writeFile(t, filepath.Join(repo, "more", "more.go"), "", 0o600) }, want: "?? more/more.go"},
	} {
		t.Run(name, func(t *testing.T) {
			repo := t.TempDir()
			writeFile(t, filepath.Join(repo, ".gitignore"), "/dist/\n", 0o644)
			writeFile(t, filepath.Join(repo, "main.go"), "x", 0o644)
			git(t, repo, "init", "--quiet")
			git(t, repo, "add", "--all")
			git(t, repo, "commit", "--quiet", "-m", "x")
			git(t, repo, "tag", "v1.2.3")
			git(t, repo, "tag", "other") // is no version
			commit := strings.TrimSpace(git(t, repo, "rev-parse", "HEAD"))
			test.change(repo)

			s, err := readSource(t.Context(), repo, "", false)
			wantVersion, wantCommit := "v1.2.3", commit
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
			} else {
				if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "make release DIRTY=1") {
					t.Fatalf("error %v, want one with %q", err, test.want)
				}
				wantVersion, wantCommit = "v1.2.3-dirty", commit+"+changes"
				if s, err = readSource(t.Context(), repo, "", true); err != nil {
					t.Fatal(err)
				}
			}
			if s.version != wantVersion || s.commit != wantCommit {
				t.Errorf("version %s, commit %s", s.version, s.commit)
			}
		})
	}
}

func TestVersions(t *testing.T) {
	for version, want := range map[string]bool{
		"v0.1.0":                    true,
		"v1.2.3-rc.1":               true,
		"v1.2.3-dirty":              false,
		"v1.2.3-4-g0123456789ab":    false,
		"0123456789ab":              false,
		"v1":                        false,
		"1.2.3":                     false,
		"v1.2.3-rc.1-4-g0123456789": false,
	} {
		if got := isRelease(version); got != want {
			t.Errorf("isRelease(%q) = %t", version, got)
		}
	}
	needs.Program(t, "git", "git")
	repo := t.TempDir()
	git(t, repo, "init", "--quiet")
	git(t, repo, "commit", "--quiet", "--allow-empty", "-m", "x")
	for _, version := range []string{"v1 2", "-X", "v1/2", "v1'", "../x"} {
		if _, err := readSource(t.Context(), repo, version, false); err == nil {
			t.Errorf("%q is taken for a version", version)
		}
	}

	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	s, err := readSource(t.Context(), repo, "v1.2.3", false)
	if err != nil || s.version != "v1.2.3" || s.date.String() != "1970-01-02 00:00:00 +0000 UTC" {
		t.Errorf("%+v, %v", s, err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, err := readSource(t.Context(), repo, "v1.2.3", false); err == nil || !strings.Contains(err.Error(), `SOURCE_DATE_EPOCH is no number of seconds: "yesterday"`) {
		t.Error(err)
	}
}

// TestRefused: what is wrong is said before anything is built or written.
func TestRefused(t *testing.T) {
	needs.Program(t, "git", "git")
	repo := t.TempDir()
	writeFile(t, filepath.Join(repo, "CHANGELOG.md"), "# Changelog\n\n## [Unreleased]\n\n- All of it.\n\n## [1.0.0] - 2026-12-01\n\n- Some.\n", 0o644)
	git(t, repo, "init", "--quiet")
	git(t, repo, "add", "--all")
	git(t, repo, "commit", "--quiet", "-m", "x")
	for version, want := range map[string]string{
		"v1.0.1": "CHANGELOG.md has no section for 1.0.1",
		"v1.0.0": "git has no LICENSE here\ngit has no NOTICE here",
	} {
		out := filepath.Join(t.TempDir(), "dist")
		err := run(t.Context(), repo, options{version: version, out: out, goTool: "no-such-go", platforms: "linux/amd64"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", version, err, want)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: something was written", version)
		}
	}
	if err := checkSettings([]debug.BuildSetting{{Key: "GOOS", Value: "linux"}, {Key: "GOEXPERIMENT", Value: "x"}}); err == nil || !strings.Contains(err.Error(), "GOEXPERIMENT=x") {
		t.Error(err)
	}
}

func TestLicences(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"go/LICENSE", "m/COPYING.txt", "m/NOTICE", "m/licenser.go", "m/a/b/LICENCE", "m/a/b/b.go", "m/c/LICENSE", "n/NOTICE"} {
		writeFile(t, filepath.Join(dir, name), name, 0o600)
	}
	of := func(module, below string) listed {
		p := listed{ImportPath: "x", Dir: filepath.Join(dir, module, below)}
		p.Module = &struct {
			Path, Dir string
			Main      bool
		}{Path: "example.com/" + module, Dir: filepath.Join(dir, module)}
		return p
	}
	files, err := licences([]listed{{ImportPath: "fmt", Dir: dir}, of("m", "a/b"), of("m", "a/b"), of("m", ".")}, filepath.Join(dir, "go"))
	var got []string
	for _, f := range files {
		got = append(got, f.name+" "+string(f.data))
	}
	// Not that in m/c, of which there is no package.
	want := "licenses/go/LICENSE go/LICENSE\nlicenses/example.com/m/a/b/LICENCE m/a/b/LICENCE\nlicenses/example.com/m/COPYING.txt m/COPYING.txt\nlicenses/example.com/m/NOTICE m/NOTICE"
	if strings.Join(got, "\n") != want || err != nil {
		t.Errorf("got %v\n%s\nwant\n%s", err, strings.Join(got, "\n"), want)
	}
	if _, err := licences([]listed{of("n", ".")}, filepath.Join(dir, "go")); err == nil || err.Error() != "module example.com/n has no licence" {
		t.Error(err)
	}
	if _, err := licences(nil, dir); err == nil || !strings.Contains(err.Error(), "no licence of Go") {
		t.Error(err)
	}
}

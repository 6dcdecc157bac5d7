//go:build unix

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

const (
	testVersion = "v98.7.6"
	testTime    = "2026-12-01T10:00:00Z"
)

// other is a platform that is not this one.
func other() string {
	if runtime.GOARCH == "arm64" {
		return "linux/amd64"
	}
	return "linux/arm64"
}

// TestRelease makes the same release twice: from a full clone, and from a shallow one in another folder, by somebody with
// another environment.
func TestRelease(t *testing.T) {
	repo := copyOfTree(t)
	here := runtime.GOOS + "/" + runtime.GOARCH
	outs := []string{t.TempDir(), t.TempDir()}
	release := releaseProgram(t)
	platforms := here + "," + other()
	// What an earlier release left does not stay.
	for _, name := range []string{"vllm-timings_1.0.0_plan9_amd64.tar.gz", "mine"} {
		if err := os.WriteFile(filepath.Join(outs[0], name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	release(repo, "--platforms", platforms, "--out", outs[0])
	if err := os.Remove(filepath.Join(outs[0], "mine")); err != nil {
		t.Fatal(err)
	}

	t.Setenv("TZ", "Pacific/Chatham")
	t.Setenv("LC_ALL", "C")
	t.Setenv("USER", "somebody")
	t.Setenv("GOFLAGS", "-buildvcs=true -tags=other")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GOAMD64", "v2")
	clone := filepath.Join(t.TempDir(), "a longer name", "clone")
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	git(t, ".", "clone", "--quiet", "--depth=1", "--branch="+testVersion, "file://"+repo, clone)
	release(filepath.Join(clone, "docs"), "--platforms", platforms, "--out", outs[1])
	first, second := readAll(t, outs[0]), readAll(t, outs[1])
	for name := range maps.Keys(first) {
		if !bytes.Equal(first[name], second[name]) {
			t.Errorf("%s is another one the second time", name)
		}
	}
	names := []string{"SHA256SUMS", "notes.md"}
	for _, platform := range []string{here, other()} {
		name := "vllm-timings_98.7.6_" + strings.ReplaceAll(platform, "/", "_")
		names = append(names, name+".cdx.json", name+".tar.gz")
	}
	slices.Sort(names)
	if diff := cmp.Diff(names, slices.Sorted(maps.Keys(second))); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if got := string(first["notes.md"]); got != "- All of it.\n" {
		t.Errorf("notes: %q", got)
	}
	checkSums(t, first)

	commit := strings.TrimSpace(git(t, repo, "rev-parse", "HEAD"))
	name := "vllm-timings_98.7.6_" + runtime.GOOS + "_" + runtime.GOARCH
	binary := checkArchive(t, repo, name, first[name+".tar.gz"])
	out, err := exec.Command(binary, "version").Output()
	if want := fmt.Sprintf("vllm-timings %s, commit %s, %s, %s\n", testVersion, commit, testTime, runtime.Version()); err != nil || string(out) != want {
		t.Errorf("version prints %q, want %q: %v", out, want, err)
	}
	checkSBOM(t, binary, first[name+".cdx.json"])
}

// TestUntagged: without a tag the version is the commit, of one length in every clone.
func TestUntagged(t *testing.T) {
	repo := copyOfTree(t)
	clone := filepath.Join(t.TempDir(), "clone")
	git(t, ".", "clone", "--quiet", "--depth=1", "--no-tags", "file://"+repo, clone)
	commit := strings.TrimSpace(git(t, repo, "rev-parse", "HEAD"))
	out := t.TempDir()
	releaseProgram(t)(clone, "--platforms", runtime.GOOS+"/"+runtime.GOARCH, "--out", out)
	name := "vllm-timings_" + commit[:12] + "_" + runtime.GOOS + "_" + runtime.GOARCH
	binary := unpack(t, name, readAll(t, out)[name+".tar.gz"])
	printed, err := exec.Command(binary, "version").Output()
	if want := fmt.Sprintf("vllm-timings %s, commit %s, %s, %s\n", commit[:12], commit, testTime, runtime.Version()); err != nil || string(printed) != want {
		t.Errorf("version prints %q, want %q: %v", printed, want, err)
	}
	if _, err := os.Stat(filepath.Join(out, "notes.md")); err == nil {
		t.Error("there are notes for what is no release")
	}
}

// releaseProgram builds the release program, without the race detector, with which to compress takes minutes. The
// function runs it in a folder.
func releaseProgram(t *testing.T) func(dir string, args ...string) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "release")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return func(dir string, args ...string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("release %q: %v\n%s", args, err, out)
		}
	}
}

// checkSums reads SHA256SUMS as sha256sum does: it has every file but the notes and itself.
func checkSums(t *testing.T, files map[string][]byte) {
	t.Helper()
	var want strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name != "SHA256SUMS" && name != "notes.md" {
			fmt.Fprintf(&want, "%x  %s\n", sha256.Sum256(files[name]), name)
		}
	}
	if diff := cmp.Diff(want.String(), string(files["SHA256SUMS"])); diff != "" {
		t.Errorf("SHA256SUMS (-want +got):\n%s", diff)
	}
}

// checkArchive compares an archive with what git has, and returns the path of the program in it.
func checkArchive(t *testing.T, repo, name string, data []byte) string {
	t.Helper()
	want := map[string]string{"vllm-timings": "755"}
	for line := range strings.Lines(git(t, repo, "ls-files", "--stage", "CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "deploy", "docs")) {
		info, path, _ := strings.Cut(strings.TrimSpace(line), "\t")
		want[path] = info[3:6]
	}
	when, err := time.Parse(time.RFC3339, testTime)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	licences := map[string]bool{}
	for _, h := range headers(t, data) {
		path, below := strings.CutPrefix(h.Name, name+"/")
		if !below || !filepath.IsLocal(path) || h.Typeflag != tar.TypeReg || !h.ModTime.Equal(when) || h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" {
			t.Errorf("header %+v", h)
		}
		if rest, ok := strings.CutPrefix(path, "licenses/"); ok && h.Mode == 0o644 {
			licences[rest] = true
			continue
		}
		got[path] = fmt.Sprintf("%o", h.Mode)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	// Of a module, of a package that a module has copied, and of Go.
	for _, path := range []string{"github.com/alecthomas/kong/COPYING", "github.com/prometheus/client_golang/NOTICE", "github.com/prometheus/client_golang/internal/github.com/golang/gddo/LICENSE", "go/LICENSE"} {
		if !licences[path] {
			t.Errorf("no licenses/%s", path)
		}
	}
	return unpack(t, name, data)
}

// checkSBOM compares an SBOM with what `go version -m` says of the program.
func checkSBOM(t *testing.T, binary string, data []byte) {
	t.Helper()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(data), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "version", "-m", binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"std": strings.TrimPrefix(runtime.Version(), "go")}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); f[0] == "dep" {
			want[f[1]] = f[2]
		}
	}
	got, refs := map[string]string{}, map[string]bool{bom.Metadata.Component.BOMRef: true}
	for _, c := range *bom.Components {
		got[c.Name], refs[c.BOMRef] = c.Version, true
	}
	if diff := cmp.Diff(want, got); diff != "" || len(refs) != len(want)+1 {
		t.Errorf("modules (-want +got), %d references:\n%s", len(refs), diff)
	}
	program, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	self := bom.Metadata.Component
	if sum := fmt.Sprintf("%x", sha256.Sum256(program)); self.Version != testVersion || bom.Metadata.Timestamp != testTime || (*self.Hashes)[0].Value != sum {
		t.Errorf("metadata %+v of %+v, want %s", *bom.Metadata, *self, sum)
	}
	// All is reached from the program, and nothing else is.
	on := map[string][]string{}
	for _, d := range *bom.Dependencies {
		if d.Dependencies != nil {
			on[d.Ref] = *d.Dependencies
		}
	}
	reached := map[string]bool{}
	var reach func(ref string)
	reach = func(ref string) {
		if !reached[ref] {
			reached[ref] = true
			for _, next := range on[ref] {
				reach(next)
			}
		}
	}
	reach(self.BOMRef)
	if diff := cmp.Diff(refs, reached); diff != "" {
		t.Errorf("reached from the program (-want +got):\n%s", diff)
	}
	if direct := on[self.BOMRef]; slices.Contains(direct, "pkg:golang/github.com/tidwall/match@"+want["github.com/tidwall/match"]+"?type=module") {
		t.Errorf("the program imports %q", direct)
	}
}

// copyOfTree makes a repository of this work tree's files as they are now, with one commit and a tag for which the
// changelog has a section.
func copyOfTree(t *testing.T) string {
	t.Helper()
	needs.Program(t, "git", "git")
	out, err := exec.Command("git", "-C", "../..", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		needs.Unable(t, "needs a Git checkout: ", err)
	}
	repo := t.TempDir()
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		from := filepath.Join("../..", name)
		info, err := os.Stat(from)
		if os.IsNotExist(err) {
			continue // removed, but not yet for Git
		} else if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if name == "CHANGELOG.md" {
			data = append(data, "\n## [98.7.6] - 2026-12-01\n\n- All of it.\n"...)
		}
		writeFile(t, filepath.Join(repo, name), string(data), info.Mode())
	}
	git(t, repo, "init", "--quiet")
	git(t, repo, "add", "--all")
	git(t, repo, "commit", "--quiet", "-m", "x")
	git(t, repo, "tag", "-a", "-m", "x", testVersion)
	return repo
}

func writeFile(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_COMMITTER_DATE="+testTime, "GIT_AUTHOR_DATE=2001-01-01T00:00:00Z")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, &stderr)
	}
	return string(out)
}

func readAll(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, e := range entries {
		if files[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

func headers(t *testing.T, data []byte) []*tar.Header {
	t.Helper()
	var all []*tar.Header
	each(t, data, func(h *tar.Header, _ io.Reader) { all = append(all, h) })
	return all
}

// unpack writes the program in an archive and returns its path.
func unpack(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "vllm-timings")
	each(t, data, func(h *tar.Header, r io.Reader) {
		if h.Name != name+"/vllm-timings" {
			return
		}
		program, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, string(program), 0o700)
	})
	return path
}

func each(t *testing.T, data []byte, do func(*tar.Header, io.Reader)) {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(unzipped); ; {
		h, err := r.Next()
		if err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		do(h, r)
	}
}

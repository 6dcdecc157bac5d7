package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// patchDir makes a package that the diff of patchFile fits.
func patchDir(t *testing.T) string {
	t.Helper()
	t.Setenv("PATH", filepath.Dir(needs.Python(t))+string(os.PathListSeparator)+os.Getenv("PATH"))
	dir := filepath.Join(t.TempDir(), "vllm")
	for name, text := range map[string]string{"__init__.py": "", "_version.py": "__version__ = version = '9.8.7'\n", "a.py": "import os\n\nx = 1\n", "b.py": "y = 1\n"} {
		writeFile(t, filepath.Join(dir, name), text)
	}
	return dir
}

func patchFile(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "mine.patch")
	writeFile(t, name, "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n import os\n+GATE = '@gate@'\n--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1 +1 @@\n-y = 1\n+y = 2\n--- /dev/null\n+++ b/vllm/c.py\n@@ -0,0 +1 @@\n+z = 3\n")
	return name
}

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// files are all in a folder.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, n := range names {
		text, err := os.ReadFile(filepath.Join(dir, n.Name()))
		if err != nil {
			t.Fatal(err)
		}
		all[n.Name()] = string(text)
	}
	return all
}

// TestPatchCommands: what each says, in the order in which one would give them.
func TestPatchCommands(t *testing.T) {
	dir, diff := patchDir(t), patchFile(t)
	before := files(t, dir)
	tree := dir + " (vLLM 9.8.7)"
	on := ", on where the environment has VLLM_TIMINGS=1"
	for _, c := range []struct {
		args           string
		code           int
		stdout, stderr string
	}{
		{"check", exitOK, "mine fits " + tree + "; it is not applied\n", ""},
		{"status", exitOK, tree + "\nmine: pristine\n  pristine  a.py (its anchor fits)\n  pristine  b.py (its anchor fits)\n  pristine  c.py (added by the set)\n", ""},
		{"revert", exitOK, "mine is not applied to " + tree + ": nothing to do\n", ""},
		{"apply --gate VLLM_TIMINGS", exitOK, "mine is applied to " + tree + on + ": a.py, b.py, c.py\n", ""},
		{"check --gate VLLM_TIMINGS", exitOK, "mine is applied to " + tree + on + "\n", ""},
		{"apply --gate VLLM_TIMINGS", exitOK, "mine is applied already to " + tree + on + ": nothing to do\n", ""},
		{"apply", exitFailed, "", "vllm-timings: the set mine is applied with the gate VLLM_TIMINGS, and not with no gate: revert it first\n"},
		{"check --gate OTHER", exitFailed, "", "vllm-timings: the set mine is applied with the gate VLLM_TIMINGS, and not with the gate OTHER: revert it first\n"},
		{"status", exitOK, tree + "\nmine: patched" + on + "\n  patched   a.py (its anchor fits)\n  patched   b.py (its anchor fits)\n  patched   c.py (added by the set)\n", ""},
		{"revert", exitOK, "mine is taken out of " + tree + ": a.py, b.py, c.py\n", ""},
		{"apply", exitOK, "mine is applied to " + tree + ": a.py, b.py, c.py\n", ""},
		{"apply --force", exitOK, "mine is applied already to " + tree + ": nothing to do\n", ""},
		{"revert --force", exitOK, "mine is taken out of " + tree + ": a.py, b.py, c.py\n", ""},
		{"apply --gate a-b", exitFailed, "", "vllm-timings: \"a-b\" is no name of an environment variable, such as VLLM_TIMINGS\n"},
	} {
		code, stdout, stderr := run(append(append([]string{"patch"}, strings.Fields(c.args)...), "--vllm-dir", dir, "--patch-file", diff)...)
		if code != c.code || stdout != c.stdout || stderr != c.stderr {
			t.Errorf("%s: exit code %d\n%s%s", c.args, code, cmp.Diff(c.stdout, stdout), cmp.Diff(c.stderr, stderr))
		}
	}
	if d := cmp.Diff(before, files(t, dir)); d != "" {
		t.Error(d)
	}
}

// TestPatchDrifted: what is said of a tree that the set does not fit.
func TestPatchDrifted(t *testing.T) {
	dir, diff := patchDir(t), patchFile(t)
	writeFile(t, filepath.Join(dir, "b.py"), "y = 5\n")
	before := files(t, dir)
	const where = "b.py: anchor 1: the lines to replace are not there; nearest is line 1, \"y = 5\" where \"y = 1\" should be\n"
	for _, command := range []string{"check", "apply", "revert", "export --format diff"} {
		code, stdout, stderr := run(append(append([]string{"patch"}, strings.Fields(command)...), "--vllm-dir", dir, "--patch-file", diff)...)
		if want := "vllm-timings: the set mine does not fit:\nvllm-timings:   " + where; code != exitFailed || stdout != "" || stderr != want {
			t.Errorf("%s: exit code %d, %q, %q", command, code, stdout, stderr)
		}
	}
	code, stdout, stderr := run("patch", "status", "--vllm-dir", dir, "--patch-file", diff)
	if want := dir + " (vLLM 9.8.7)\nmine: drifted\n  pristine  a.py (its anchor fits)\n  drifted   b.py (0 of 1 anchors fit)\n            " + strings.TrimPrefix(where, "b.py: ") + "  pristine  c.py (added by the set)\n"; code != exitFailed || stdout != want || stderr != "vllm-timings: the set mine does not fit "+dir+" (vLLM 9.8.7)\n" {
		t.Errorf("exit code %d, %q\n%s", code, stderr, cmp.Diff(want, stdout))
	}
	if d := cmp.Diff(before, files(t, dir)); d != "" {
		t.Error(d)
	}
}

// TestPatchJSON: the members that machines read.
func TestPatchJSON(t *testing.T) {
	dir, diff := patchDir(t), patchFile(t)
	read := func(want int, args ...string) map[string]any {
		t.Helper()
		code, stdout, stderr := run(append([]string{"patch"}, append(args, "--json", "--vllm-dir", dir, "--python", "python3", "--patch-file", diff)...)...)
		var got map[string]any
		if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != want || (stderr == "") != (code == exitOK) {
			t.Fatalf("exit code %d, %v: %s %s", code, err, stdout, stderr)
		}
		return got
	}
	file := func(path, state string, anchors float64) map[string]any {
		return map[string]any{"path": path, "state": state, "anchors": anchors}
	}
	want := map[string]any{"dir": dir, "version": "9.8.7", "python": "python3", "ok": true, "sets": []any{
		map[string]any{"set": "mine", "state": "pristine", "files": []any{file("a.py", "pristine", 1), file("b.py", "pristine", 1), file("c.py", "pristine", 0)}},
	}}
	for _, command := range []string{"status", "check"} {
		if d := cmp.Diff(want, read(exitOK, command)); d != "" {
			t.Errorf("%s: %s", command, d)
		}
	}
	if code, _, stderr := run("patch", "apply", "--gate", "ON", "--vllm-dir", dir, "--patch-file", diff); code != exitOK {
		t.Fatal(stderr)
	}
	set := read(exitOK, "status")["sets"].([]any)[0].(map[string]any)
	if set["state"] != "patched" || set["gate"] != "ON" {
		t.Error(set)
	}
	writeFile(t, filepath.Join(dir, "b.py"), "y = 1\ny = 1\n")
	got := read(exitFailed, "status")
	drift := got["sets"].([]any)[0].(map[string]any)["files"].([]any)[1]
	if d := cmp.Diff(map[string]any{"path": "b.py", "state": "drifted", "anchors": 1.0, "drifts": []any{map[string]any{
		"anchor": 1.0, "reason": "the lines to replace are there 2 times, not once", "line": 1.0, "found": "y = 1", "wanted": "y = 1",
	}}}, drift); d != "" {
		t.Error(d)
	}
	if got["ok"] != false || got["error"] == "" {
		t.Error(got["ok"], got["error"])
	}
	writeFile(t, filepath.Join(dir, "a.py"), "# [patch_timings]\n")
	if got := read(exitFailed, "check"); len(got["sets"].([]any)) != 0 || !strings.Contains(got["error"].(string), "patched by another script") {
		t.Error(got)
	}
}

// TestPatchWrong: command lines that cannot be right, and what to write instead.
func TestPatchWrong(t *testing.T) {
	dir := patchDir(t)
	empty := filepath.Join(t.TempDir(), "empty.patch")
	writeFile(t, empty, "")
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"apply --set nothing", exitUsage, "--set: there is no \"nothing\"; `vllm-timings patch list` names them"},
		{"export --format python --set nothing", exitUsage, "--set: there is no \"nothing\""},
		{"apply --patch-file /nowhere/x.patch", exitUsage, "--patch-file: open /nowhere/x.patch: no such file or directory"},
		{"apply --patch-file " + empty, exitUsage, "--patch-file: empty: no change in it: not a unified diff, or an empty one"},
		{"export --format tar", exitUsage, `--format: "tar" is neither diff nor python`},
		{"export", exitUsage, "missing flags: --format=FORMAT"},
		{"aply", exitUsage, "unexpected argument aply"},
		{"apply --vlm-dir x", exitUsage, "unknown flag --vlm-dir"},
		{"apply --vllm-dir /nowhere", exitFailed, "no vllm package at /nowhere: no such file or directory"},
		{"apply --vllm-dir " + filepath.Dir(dir), exitFailed, "but one below it: give " + dir},
		{"check --python /nowhere/python3", exitFailed, `no Python at "/nowhere/python3"`},
		{"check --vllm-dir " + dir + " --python /nowhere/python3 --patch-file " + patchFile(t), exitFailed, `no Python at "/nowhere/python3"`},
		{"status --vllm-dir " + dir, exitFailed, "does not fit " + dir},
		{"export --format python --gate a-b", exitFailed, `"a-b" is no name of an environment variable`},
	} {
		code, stdout, stderr := run(append([]string{"patch"}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(stderr, "vllm-timings: ") || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, %q %q", c.args, code, stdout, stderr)
		}
	}
}

// TestPatchEnvironment: each flag has its variable.
func TestPatchEnvironment(t *testing.T) {
	dir := patchDir(t)
	t.Setenv("VLLM_TIMINGS_PATCH_VLLM_DIR", dir)
	t.Setenv("VLLM_TIMINGS_PATCH_FILE", patchFile(t))
	t.Setenv("VLLM_TIMINGS_PATCH_GATE", "ON")
	if code, stdout, stderr := run("patch", "apply"); code != exitOK || !strings.Contains(stdout, "ON=1") {
		t.Fatal(code, stdout, stderr)
	}
	t.Setenv("VLLM_TIMINGS_PATCH_JSON", "true")
	if code, stdout, stderr := run("patch", "status"); code != exitOK || !strings.Contains(stdout, `"gate": "ON"`) {
		t.Fatal(code, stdout, stderr)
	}
	t.Setenv("VLLM_TIMINGS_PATCH_PYTHON", "/nowhere/python3")
	if code, _, stderr := run("patch", "check"); code != exitFailed || !strings.Contains(stderr, "/nowhere/python3") {
		t.Fatal(code, stderr)
	}
	t.Setenv("VLLM_TIMINGS_PATCH_SET", "nothing")
	if code, _, stderr := run("patch", "check"); code != exitUsage || !strings.Contains(stderr, `there is no "nothing"`) {
		t.Fatal(code, stderr)
	}
}

func TestPatchExport(t *testing.T) {
	dir, diff := patchDir(t), patchFile(t)
	code, text, stderr := run("patch", "export", "--format", "diff", "--vllm-dir", dir, "--patch-file", diff)
	if code != exitOK || stderr != "" || !strings.HasPrefix(text, "diff --git a/vllm/a.py b/vllm/a.py\n") {
		t.Fatal(code, text, stderr)
	}
	out := filepath.Join(t.TempDir(), "x.patch")
	if code, stdout, stderr := run("patch", "export", "--format", "diff", "--vllm-dir", dir, "--patch-file", diff, "--output", out); code != exitOK || stdout+stderr != "" {
		t.Fatal(code, stdout, stderr)
	}
	if got, err := os.ReadFile(out); err != nil || string(got) != text {
		t.Error(err, cmp.Diff(text, string(got)))
	}
	code, text, stderr = run("patch", "export", "--format", "python", "--gate", "ON")
	if code != exitOK || stderr != "" || !strings.Contains(text, "\nGATE = \"ON\"\n") {
		t.Fatal(code, stderr)
	}
	if code, _, stderr := run("patch", "export", "--format", "diff", "--vllm-dir", dir, "--patch-file", diff, "--output", "/nowhere/x"); code != exitFailed || !strings.Contains(stderr, "/nowhere/x") {
		t.Error(code, stderr)
	}
}

func TestPatchListAndHelp(t *testing.T) {
	code, stdout, stderr := run("patch", "list")
	if code != exitOK || stderr != "" || !regexp.MustCompile(`(?m)^timings-\S+\n(  (adds|edits) .*\n)+`).MatchString(stdout) {
		t.Error(code, stdout, stderr)
	}
	for args, want := range map[string][]string{
		"patch --help":        {"patch check", "patch apply", "patch revert", "patch status", "patch export", "patch list"},
		"patch check --help":  {"--python=PYTHON", "--vllm-dir=DIR", "--set=NAME", "--patch-file=FILE", "--gate=NAME", "--json", "($VLLM_TIMINGS_PATCH_VLLM_DIR)"},
		"patch apply --help":  {"--gate=NAME", "--force", "all files, or none"},
		"patch revert --help": {"--force", "the bytes are those from before"},
		"patch status --help": {"--json", "drifted"},
		"patch export --help": {"--format=FORMAT", "--output=FILE", "git apply or patch -p1"},
	} {
		code, stdout, stderr := run(strings.Fields(args)...)
		flat := strings.Join(strings.Fields(stdout), " ")
		for _, w := range want {
			if code != exitOK || stderr != "" || !strings.Contains(flat, w) {
				t.Errorf("%s: exit code %d, %q, without %q:\n%s", args, code, stderr, w, stdout)
			}
		}
	}
}

// TestPatchProcesses: two at once.
func TestPatchProcesses(t *testing.T) {
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	dir, diff := patchDir(t), patchFile(t)
	var wg sync.WaitGroup
	outputs := make([]string, 3)
	for i := range outputs {
		wg.Go(func() {
			out, err := exec.Command(file, "patch", "apply", "--vllm-dir", dir, "--patch-file", diff).CombinedOutput()
			if outputs[i] = string(out); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	wg.Wait()
	all := strings.Join(outputs, "")
	if strings.Count(all, "mine is applied to") != 1 || strings.Count(all, "is applied already") != len(outputs)-1 {
		t.Error(all)
	}
	if got := files(t, dir); len(got) != 5 || got["b.py"] != "y = 2\n" {
		t.Error(got)
	}
}

package patch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

func TestScriptSays(t *testing.T) {
	t.Parallel()
	dir, script := scriptTree(t, scriptThreeFiles), scriptFile(t, "ON", false, scriptSet(t, "mine", scriptThree))
	tree := dir + " (vLLM 0.32.0)"
	for _, step := range []struct{ arg, want string }{
		{"--check", "mine fits " + tree + "; it is not applied\n"},
		{"--revert", "mine is not applied to " + tree + ": nothing to do\n"},
		{"", "mine is applied to " + tree + ", on where the environment has ON=1: a.py, sub/b.py, sub/added.py\n"},
		{"", "mine is applied already to " + tree + ", on where the environment has ON=1: nothing to do\n"},
		{"--check", "mine is applied to " + tree + ", on where the environment has ON=1\n"},
		{"--revert", "mine is taken out of " + tree + ": a.py, sub/b.py, sub/added.py\n"},
	} {
		r := scriptOK(t, script, dir, strings.Fields(step.arg)...)
		if r.out != step.want || r.stderr != "" {
			t.Errorf("%q: it says %q and %q, not %q", step.arg, r.out, r.stderr, step.want)
		}
	}
}

func TestScriptTakesTheSetThatFits(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	one := scriptSet(t, "one", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 10\n")
	two := scriptSet(t, "two", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 20\n--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1 +1 @@\n-B = 1\n+B = 20\n")
	other := scriptSet(t, "other", "--- a/vllm/c.py\n+++ b/vllm/c.py\n@@ -1,2 +1 @@\n-C = 1\n-C = 2\n+C = 20\n@@ -3 +2 @@\n-D = 1\n+D = 2\n")
	alike := scriptSet(t, "alike", "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 30\n")
	for _, test := range []struct {
		name  string
		files map[string]string
		sets  []Set
	}{
		{"only one", map[string]string{"a.py": "A = 1\n"}, []Set{one, two, other}},
		{"the one with more edits", map[string]string{"a.py": "A = 1\n", "b.py": "B = 1\n"}, []Set{one, two, other}},
		{"two alike", map[string]string{"a.py": "A = 1\n"}, []Set{other, one, alike}},
		{"patched", map[string]string{"a.py": "A = 20\n", "b.py": "B = 20\n"}, []Set{one, two, other}},
		{"none, the one with one drift", map[string]string{"a.py": "A = 2\n", "b.py": "B = 1\n"}, []Set{other, two}},
		{"none, the first of equals", map[string]string{"a.py": "A = 2\n"}, []Set{alike, one}},
		{"none, half of it", map[string]string{"c.py": "D = 1\n", "a.py": "A = 0\n"}, []Set{one, other}},
		{"none at all", nil, []Set{other, two, one}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := scriptTree(t, test.files)
			want, err := choose(&Tree{Dir: dir}, test.sets)
			if err == nil && want.State == Drifted {
				err = want.drifted()
			}
			r := runScript(t, exec.Command(python, scriptFile(t, "", true, test.sets...), "--vllm-dir", dir))
			if err != nil {
				if says, _, _ := strings.Cut(err.Error(), ";"); r.code != 1 || !strings.HasPrefix(r.said(), says) {
					t.Errorf("exit %d: %q, not %q", r.code, r.said(), err)
				}
			} else if !strings.HasPrefix(r.out, want.Set+" ") {
				t.Errorf("exit %d: %q%s, not of %s", r.code, r.out, r.stderr, want.Set)
			}
		})
	}
}

func TestScriptRefusesAnotherGate(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set := scriptSet(t, "mine", scriptThree)
	for _, gates := range [][2]string{{"", "ON"}, {"ON", ""}, {"ON", "OTHER"}} {
		dir := scriptTree(t, scriptThreeFiles)
		before := scriptSnapshot(t, dir)
		first, second := scriptFile(t, gates[0], false, set), scriptFile(t, gates[1], false, set)
		scriptOK(t, first, dir)
		was := scriptSnapshot(t, dir)
		tree, err := Open(dir, python)
		if err != nil {
			t.Fatal(err)
		}
		_, want := tree.Apply(context.Background(), Request{Sets: []Set{set}, Gate: gates[1]})
		for _, arg := range []string{"--force", "--check"} {
			if r := runScript(t, exec.Command(python, second, arg, "--vllm-dir", dir)); r.code != 1 || want == nil || r.said() != want.Error() {
				t.Errorf("%q, %s: exit %d: %s, not: %v", gates, arg, r.code, r.stderr, want)
			}
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), was)
		scriptOK(t, second, dir, "--revert")
		scriptSame(t, "reverted with another gate", scriptSnapshot(t, dir), before)
	}
}

func TestScriptLeavesWhatALinkSharesAlone(t *testing.T) {
	t.Parallel()
	script := scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	for name, link := range map[string]func(old, new string) error{
		"hard": os.Link, "symbolic": func(old, new string) error { return errors.Join(os.Rename(old, new), os.Symlink(new, old)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := scriptTree(t, scriptThreeFiles)
			cached := filepath.Join(filepath.Dir(dir), "cached.py")
			if err := link(filepath.Join(dir, "a.py"), cached); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{nil, {"--revert"}} {
				scriptOK(t, script, dir, args...)
				if text, err := os.ReadFile(cached); err != nil || string(text) != scriptThreeFiles["a.py"] {
					t.Errorf("%v: the cache is %q, %v", args, text, err)
				}
			}
			if info, err := os.Lstat(filepath.Join(dir, "a.py")); err != nil || !info.Mode().IsRegular() {
				t.Errorf("a.py is %v, %v", info.Mode(), err)
			}
		})
	}
}

func TestScriptCommandLine(t *testing.T) {
	t.Parallel()
	python, script := needs.Python(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptPlain))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	dir := scriptTree(t, scriptThreeFiles)
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--help"}, 0, "--revert"},
		{[]string{"--check", "--revert"}, 2, "not allowed with"},
		{[]string{"--vllm", dir}, 2, "--vllm"},
		{[]string{"apply"}, 2, "apply"},
		{[]string{"--vllm-dir"}, 2, "--vllm-dir"},
		{[]string{"--vllm-dir", filepath.Join(dir, "missing")}, 1, "no vllm package at " + filepath.Join(dir, "missing") + ": no such file or directory"},
		{[]string{"--vllm-dir", file}, 1, "it is a file; give the folder vllm"},
		{[]string{"--vllm-dir", filepath.Dir(dir)}, 1, "but one below it: give " + dir},
		{[]string{"--vllm-dir", filepath.Dir(file)}, 1, "it has no __init__.py"},
	} {
		r := runScript(t, exec.Command(python, append([]string{script}, test.args...)...))
		if r.code != test.code || !strings.Contains(r.out+r.stderr, test.says) {
			t.Errorf("%q: exit %d, %s%s", test.args, r.code, r.out, r.stderr)
		}
		if test.code == 1 {
			if _, err := Open(test.args[1], python); err == nil || r.said() != err.Error() {
				t.Errorf("%q: it says %q, and the engine %v", test.args, r.said(), err)
			}
		}
	}
}

func TestScriptFindsVLLM(t *testing.T) {
	t.Parallel()
	python, script := needs.Python(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptPlain))
	installed, shadow, working := scriptTree(t, scriptThreeFiles), scriptTree(t, scriptThreeFiles), scriptTree(t, scriptThreeFiles)
	beside := filepath.Join(filepath.Dir(script), "vllm")
	if err := os.CopyFS(beside, os.DirFS(installed)); err != nil {
		t.Fatal(err)
	}
	// Importing it would fail.
	if err := os.WriteFile(filepath.Join(installed, "__init__.py"), []byte("raise SystemExit(9)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	namespace := t.TempDir()
	if err := os.Mkdir(filepath.Join(namespace, "vllm"), 0o755); err != nil {
		t.Fatal(err)
	}
	editable := t.TempDir()
	if err := os.WriteFile(filepath.Join(editable, "sitecustomize.py"), []byte("import sys\nsys.path.append("+fmt.Sprintf("%q", filepath.Dir(installed))+")\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	command := t.TempDir()
	if err := os.WriteFile(filepath.Join(command, "vllm"), []byte("#!/opt/venv/bin/python3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, path, cwd, bin string
		code                 int
		says                 []string
	}{
		{"installed", filepath.Dir(installed), filepath.Dir(working), "", 0, []string{"mine fits " + installed, "there is another vLLM at " + working}},
		{"two on the path", filepath.Dir(installed) + ":" + filepath.Dir(shadow), "/", "", 0, []string{"mine fits " + installed, "there is another vLLM at " + shadow}},
		{"the working folder is on the path", filepath.Dir(installed), filepath.Dir(installed), "", 0, []string{"mine fits " + installed}},
		{"editable", editable, "/", "", 0, []string{"mine fits " + installed}},
		{"none", "", filepath.Dir(working), "", 1, []string{"has no vllm installed; run this with the Python that serves"}},
		{"none, but a command", "", "/", command, 1, []string{"has no vllm installed; the command " + command + "/vllm has another one: run this with /opt/venv/bin/python3"}},
		{"a folder of that name", namespace, "/", "", 1, []string{"happens to be called so: " + namespace + "/vllm"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.Command(python, script, "--check")
			cmd.Dir = test.cwd
			cmd.Env = append(os.Environ(), "PYTHONPATH="+test.path, "PYTHONDONTWRITEBYTECODE=1")
			if test.bin != "" {
				cmd.Env = append(cmd.Env, "PATH="+test.bin)
			}
			r := runScript(t, cmd)
			for _, says := range test.says {
				if !strings.Contains(r.out+r.stderr, says) {
					t.Errorf("it does not say %q", says)
				}
			}
			if r.code != test.code || len(test.says) == 1 && test.code == 0 && r.stderr != "" {
				t.Errorf("exit %d", r.code)
			}
			if t.Failed() {
				t.Log(r.out + r.stderr)
			}
		})
	}
}

// The script runs on each Python that vLLM has had.
func TestScriptOnOtherPythons(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	t.Run("syntax", func(t *testing.T) {
		out, err := exec.Command(python, "-c", "import ast, sys\nast.parse(open(sys.argv[1], encoding='utf-8').read(), feature_version=(3, 9))", script).CombinedOutput()
		if err != nil {
			t.Errorf("newer than 3.9: %s", out)
		}
		out, err = exec.Command(python, "-W", "error", "-m", "py_compile", script).CombinedOutput()
		if err != nil {
			t.Errorf("%s", out)
		}
	})
	old, new := scriptSides(t, set, scriptThreeFiles)
	root := os.Getenv("PYENV_ROOT")
	if root == "" {
		home, _ := os.UserHomeDir()
		root = filepath.Join(home, ".pyenv")
	}
	for _, version := range []string{"3.9", "3.10", "3.11", "3.12", "3.13"} {
		t.Run(version, func(t *testing.T) {
			candidates, _ := filepath.Glob(filepath.Join(root, "versions", version+".*", "bin", "python3"))
			candidates = append(candidates, "python"+version)
			at := slices.IndexFunc(candidates, func(c string) bool { return exec.Command(c, "-S", "-c", "").Run() == nil })
			if at < 0 {
				t.Skipf("no Python %s at hand", version)
			}
			dir := scriptTree(t, scriptThreeFiles)
			for _, step := range []struct {
				arg  string
				want map[string]string
			}{{"--check", old}, {"--force", new}, {"--check", new}, {"--revert", old}} {
				r := runScript(t, exec.Command(candidates[at], "-S", "-W", "error", script, "--vllm-dir", dir, step.arg))
				if r.code != 0 || r.stderr != "" {
					t.Errorf("%s: exit %d: %s", step.arg, r.code, r.stderr)
				}
				scriptSame(t, step.arg, scriptSnapshot(t, dir), step.want)
			}
			cmd := exec.Command(candidates[at], "-S", script, "--check")
			cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Dir(dir))
			if r := runScript(t, cmd); r.code != 0 {
				t.Errorf("found on the path: exit %d: %s", r.code, r.stderr)
			}
		})
	}
}

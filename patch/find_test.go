package patch

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// environment makes an environment of Python and returns its folder, its python and its site-packages.
func environment(t *testing.T) (dir, python, site string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(needs.Python(t), "-m", "venv", "--without-pip", dir).CombinedOutput(); err != nil {
		needs.Unable(t, "no environment can be made: ", err, " ", string(out))
	}
	python = filepath.Join(dir, "bin", "python3")
	found, err := filepath.Glob(filepath.Join(dir, "lib", "python3*", "site-packages"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	return dir, python, found[0]
}

// minimal is a package that must not be imported.
var minimal = map[string]string{"vllm/__init__.py": "raise SystemExit('imported')\n"}

func TestFind(t *testing.T) {
	_, python, site := environment(t)
	elsewhere := t.TempDir() // the working folder, and the commands in PATH
	t.Chdir(elsewhere)
	t.Setenv("PATH", elsewhere)
	other := t.TempDir()
	reset := func(t *testing.T) {
		t.Helper()
		for _, dir := range []string{site, other, elsewhere} {
			names, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range names {
				if err := os.RemoveAll(filepath.Join(dir, n.Name())); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	in := func(dir string) string { return filepath.Join(dir, "vllm") }
	const advice = "; name the Python that serves with --python, or the package folder with --vllm-dir"
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T)
		want    string
		others  []string
		refused string
	}{
		{name: "normal", want: in(site), prepare: func(t *testing.T) { writeTree(t, site, minimal) }},
		{name: "editable, a folder in a .pth", want: in(other), prepare: func(t *testing.T) {
			writeTree(t, other, minimal)
			writeTree(t, site, map[string]string{"__editable__.vllm.pth": other + "\n"})
		}},
		{name: "editable, of the working folder", want: in(elsewhere), prepare: func(t *testing.T) {
			writeTree(t, elsewhere, minimal)
			writeTree(t, site, map[string]string{"__editable__.vllm.pth": elsewhere + "\n"})
		}},
		{name: "editable, a finder", want: in(other), prepare: func(t *testing.T) {
			writeTree(t, other, minimal)
			writeTree(t, site, map[string]string{
				"__editable__.vllm.pth": "import vllm_finder; vllm_finder.install()\n",
				"vllm_finder.py": "import sys\nfrom importlib.util import spec_from_file_location as spec\n\n\nclass Finder:\n" +
					"    @staticmethod\n    def find_spec(name, path=None, target=None):\n        if name == 'vllm':\n" +
					"            return spec(name, '" + in(other) + "/__init__.py')\n\n\ndef install():\n    sys.meta_path.append(Finder)\n",
			})
		}},
		{name: "a finder that fails", refused: "cannot look for vllm: no wheel", prepare: func(t *testing.T) {
			writeTree(t, site, map[string]string{"x.pth": "import sys; sys.meta_path.insert(0, __import__('finder'))\n",
				"finder.py": "def find_spec(name, path=None, target=None):\n    if name == 'vllm':\n        raise ImportError('no wheel')\n"})
		}},
		{name: "two copies", want: in(other), others: []string{in(site)}, prepare: func(t *testing.T) {
			writeTree(t, site, minimal)
			writeTree(t, other, minimal)
			t.Setenv("PYTHONPATH", other)
		}},
		{name: "a checkout in the working folder", want: in(site), others: []string{in(elsewhere)}, prepare: func(t *testing.T) {
			writeTree(t, site, minimal)
			writeTree(t, elsewhere, minimal)
		}},
		{name: "only a checkout in the working folder", refused: "has no vllm installed" + advice, prepare: func(t *testing.T) { writeTree(t, elsewhere, minimal) }},
		{name: "the standard library's names in the working folder", want: in(site), prepare: func(t *testing.T) {
			writeTree(t, site, minimal)
			writeTree(t, elsewhere, map[string]string{"json.py": "raise SystemExit('mine')\n", "os.py": "raise SystemExit('mine')\n", "importlib/__init__.py": "raise SystemExit('mine')\n"})
		}},
		{name: "none", refused: "has no vllm installed" + advice, prepare: func(*testing.T) {}},
		{name: "a namespace package", refused: "would not import vLLM but a folder or file that happens to be called so: " + in(site), prepare: func(t *testing.T) {
			writeTree(t, site, map[string]string{"vllm/x.py": ""})
		}},
		{name: "a module", refused: "would not import vLLM but a folder or file that happens to be called so: " + site + "/vllm.py", prepare: func(t *testing.T) {
			writeTree(t, site, map[string]string{"vllm.py": ""})
		}},
		{name: "the command is another's", refused: "has no vllm installed; the command " + elsewhere + "/vllm has another one: try --python /opt/other/bin/python3", prepare: func(t *testing.T) {
			command(t, in(elsewhere), "#!/opt/other/bin/python3\nimport vllm\n")
		}},
		{name: "the command is its own", refused: "has no vllm installed" + advice, prepare: func(t *testing.T) {
			command(t, in(elsewhere), "#!"+python+"\nimport vllm\n")
		}},
		{name: "the command is a shell's", refused: "has no vllm installed" + advice, prepare: func(t *testing.T) {
			command(t, in(elsewhere), "#!/bin/sh\n'''exec' /a/long/path/python \"$0\"\n'''\n")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			reset(t)
			c.prepare(t)
			found, err := Find(t.Context(), python)
			if c.refused != "" {
				refused(t, err, python+" "+strings.Split(c.refused, ";")[0], strings.TrimPrefix(c.refused, strings.Split(c.refused, ";")[0]))
				return
			}
			if err != nil || found.Dir != c.want || !slices.Equal(found.Others, c.others) || found.Python != python {
				t.Errorf("%+v, %v", found, err)
			}
		})
	}
	t.Run("in PATH", func(t *testing.T) {
		reset(t)
		writeTree(t, site, minimal)
		t.Setenv("PATH", filepath.Dir(python))
		if found, err := Find(t.Context(), ""); err != nil || found.Dir != in(site) {
			t.Errorf("%+v, %v", found, err)
		}
	})
	t.Run("no Python", func(t *testing.T) {
		for python, named := range map[string]string{"": "python3", "pythonless": "pythonless", "/nowhere/python3": "/nowhere/python3"} {
			_, err := Find(t.Context(), python)
			refused(t, err, `no Python at "`+named+`": name the one that serves vLLM with --python, such as --python /opt/venv/bin/python`)
		}
	})
	t.Run("no Python but something", func(t *testing.T) {
		t.Setenv("PATH", os.Getenv("PATH")+":/bin:/usr/bin")
		_, err := Find(t.Context(), script(t, "echo hello"))
		refused(t, err, "did not say where its vllm is")
		_, err = Find(t.Context(), script(t, "echo hello >&2; exit 3"))
		refused(t, err, "exit status 3: hello")
	})
}

func command(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestPythonBeside(t *testing.T) {
	root := t.TempDir()
	writeTree(t, root, map[string]string{
		"env/bin/python3":                     "",
		"usr/bin/python3":                     "",
		"src/vllm/bin/python3":                "",
		"lone/lib/python3.12/site-packages/x": "",
	})
	for dir, want := range map[string]string{
		"env/lib/python3.12/site-packages/vllm":   "env/bin/python3",
		"env/lib64/python3.12/site-packages/vllm": "env/bin/python3",
		"usr/lib/python3/dist-packages/vllm":      "usr/bin/python3",
		"lone/lib/python3.12/site-packages/vllm":  "",
		"src/else/vllm":                           "",
		"vllm":                                    "",
	} {
		if want != "" {
			want = filepath.Join(root, want)
		}
		if got := PythonBeside(filepath.Join(root, dir)); got != want {
			t.Errorf("%s: %q, not %q", dir, got, want)
		}
	}
}

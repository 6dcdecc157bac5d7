package patch

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Found is where a Python would import vllm from.
type Found struct {
	Python string   `json:"python"` // the interpreter, absolute
	Dir    string   `json:"dir"`    // the package folder
	Others []string `json:"others"` // other copies of vllm on its path, which it does not import
	Error  string   `json:"error"`
}

// findScript prints a Found. It asks importlib for the spec, as importing vllm takes ten seconds and may need a GPU.
//
//go:embed find.py
var findScript string

// Find asks a Python where it would import vllm from. python is a path or a name in PATH; "" is python3.
func Find(ctx context.Context, python string) (Found, error) {
	if python == "" {
		python = "python3"
	}
	path, err := lookPython(python)
	if err != nil {
		return Found{}, err
	}
	out, err := runPython(ctx, path, []string{"-c", findScript}, nil)
	if err != nil {
		return Found{}, err
	}
	var f Found
	if err := json.Unmarshal(out, &f); err != nil {
		return Found{}, fmt.Errorf("%s did not say where its vllm is: %w", path, err)
	}
	if f.Error != "" {
		return f, errors.New(path + " " + f.Error + elsewhere(path))
	}
	return f, nil
}

// elsewhere names the Python of the command `vllm`, where that is another one.
func elsewhere(python string) string {
	const advice = "; name the Python that serves with --python, or the package folder with --vllm-dir"
	script, err := exec.LookPath("vllm")
	if err != nil {
		return advice
	}
	text, err := os.ReadFile(script)
	if err != nil {
		return advice
	}
	line, _, _ := strings.Cut(string(text), "\n")
	if interpreter, ok := strings.CutPrefix(line, "#!"); ok {
		if fields := strings.Fields(interpreter); len(fields) == 1 && fields[0] != python && filepath.IsAbs(fields[0]) && strings.HasPrefix(filepath.Base(fields[0]), "python") {
			return fmt.Sprintf("; the command %s has another one: try --python %s", script, fields[0])
		}
	}
	return advice
}

// PythonBeside returns the Python of the environment that a package folder is installed in, or "" where it is in none:
// ENV/lib/python3.X/site-packages/vllm belongs to ENV/bin/python3.
func PythonBeside(dir string) string {
	for up := filepath.Dir(dir); ; up = filepath.Dir(up) {
		if python := filepath.Join(up, "bin", "python3"); filepath.Base(up) != "lib" && isFile(python) {
			return python
		}
		if up == filepath.Dir(up) || len(dir)-len(up) > 200 {
			return ""
		}
		if base := filepath.Base(up); !strings.HasPrefix(base, "python") && base != "site-packages" && base != "dist-packages" && base != "lib" && base != "lib64" {
			return ""
		}
	}
}

func lookPython(python string) (string, error) {
	path, err := exec.LookPath(python)
	if err != nil {
		return "", fmt.Errorf("no Python at %q: name the one that serves vLLM with --python, such as --python /opt/venv/bin/python", python)
	}
	return filepath.Abs(path)
}

// compileScript reads a list of [path, source] as JSON and compiles each in memory.
const compileScript = `import json, sys
for path, source in json.load(sys.stdin):
    try:
        compile(source.encode("latin-1"), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as e:
        sys.exit(f"{path}: {e}")
`

// compile makes sure that Python takes the files of an overlay, without writing anything.
func (t *Tree) compile(ctx context.Context, o overlay) error {
	var sources [][2]string
	for _, path := range o.paths() {
		if content := o.files[path]; content != nil && strings.HasSuffix(path, ".py") {
			sources = append(sources, [2]string{t.name(path), latin1(content)})
		}
	}
	if len(sources) == 0 {
		return nil
	}
	python, err := lookPython(t.Python)
	if err != nil {
		return err
	}
	text, err := json.Marshal(sources)
	if err != nil {
		return err
	}
	if _, err := runPython(ctx, python, []string{"-I", "-c", compileScript}, text); err != nil {
		return fmt.Errorf("what the patch makes does not compile: %w", err)
	}
	return nil
}

// latin1 says bytes as a text of one character each, so that JSON brings any of them through.
func latin1(b []byte) string {
	runes := make([]rune, len(b))
	for i, c := range b {
		runes[i] = rune(c)
	}
	return string(runes)
}

// compileFiles makes sure that Python takes files as they are on disk. What it compiles goes into a folder that is
// removed: the first import does it again, with the owner and mode that it has there.
func (t *Tree) compileFiles(ctx context.Context, names []string) error {
	var modules []string
	for _, n := range names {
		if strings.HasSuffix(n, ".py") {
			modules = append(modules, n)
		}
	}
	if len(modules) == 0 {
		return nil
	}
	python, err := lookPython(t.Python)
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "vllm-timings-pycache-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	cmd := exec.CommandContext(ctx, python, append([]string{"-I", "-X", "pycache_prefix=" + scratch, "-m", "py_compile"}, modules...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s -m py_compile: %w: %s", python, err, lastLines(out))
	}
	return nil
}

// runPython runs a script and returns what it printed. With -I it finds no modules in the working folder, which may be
// vLLM's own.
func runPython(ctx context.Context, python string, args []string, input []byte) ([]byte, error) {
	cmd := exec.CommandContext(ctx, python, args...)
	cmd.Stdin = bytes.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", python, err, lastLines(stderr.Bytes()))
	}
	return out, nil
}

// lastLines returns the end of what a Python said: of a traceback that is what went wrong.
func lastLines(out []byte) string {
	text := strings.TrimSpace(string(out))
	if lines := strings.Split(text, "\n"); len(lines) > 3 {
		text = strings.Join(lines[len(lines)-3:], "\n")
	}
	return text
}

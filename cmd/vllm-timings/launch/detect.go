package launch

import (
	"bufio"
	"bytes"
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/vllm-timings/vllm-timings/patch"
)

// VLLM is what was found out about the vLLM that a command starts.
type VLLM struct {
	Dir     string // of the package; "": not found
	Version string // "" where it does not say
	native  bool   // it has the flags for exact figures
}

// Find looks for the vLLM that a command starts, without starting anything: only files are read.
func Find(argv []string) (v VLLM, serves bool) {
	s, serves := findServer(argv)
	if !serves {
		return VLLM{}, false
	}
	for _, dir := range s.packages() {
		if _, err := os.Stat(filepath.Join(dir, "vllm", "__init__.py")); err == nil {
			return readVLLM(dir), true
		}
	}
	return VLLM{}, true
}

// packages returns the folders where the server's Python looks for packages, those first that it looks at first.
func (s server) packages() []string {
	var dirs []string
	if path := os.Getenv("PYTHONPATH"); path != "" {
		dirs = append(dirs, filepath.SplitList(path)...)
	}
	python := s.python
	if s.project != "" {
		python = projectPython(s.project)
	} else if s.program != "" {
		python = interpreter(s.program)
	}
	if python == "" {
		return nil
	}
	python, err := exec.LookPath(python)
	if err != nil {
		return nil
	}
	for _, dir := range sitePackages(python) {
		dirs = append(dirs, dir)
		dirs = append(dirs, editable(dir)...)
	}
	return dirs
}

// projectPython returns the Python of uv's project, "" where there is none.
func projectPython(project string) string {
	if dir := os.Getenv("UV_PROJECT_ENVIRONMENT"); dir != "" {
		return filepath.Join(dir, "bin", "python")
	}
	dir, err := filepath.Abs(project)
	for err == nil {
		python := filepath.Join(dir, ".venv", "bin", "python")
		if _, err := os.Stat(python); err == nil {
			return python
		}
		if parent := filepath.Dir(dir); parent != dir {
			dir = parent
			continue
		}
		break
	}
	return ""
}

// interpreter returns the Python that a script names, "" where it names none.
func interpreter(script string) string {
	path, err := exec.LookPath(script)
	if err != nil {
		return ""
	}
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	lines := bufio.NewScanner(&readLimit{f, 4096})
	if !lines.Scan() {
		return ""
	}
	words := strings.Fields(strings.TrimPrefix(lines.Text(), "#!"))
	switch {
	case !strings.HasPrefix(lines.Text(), "#!") || len(words) == 0:
		return ""
	case strings.HasPrefix(filepath.Base(words[0]), "python"):
		return words[0]
	case filepath.Base(words[0]) == "env":
		if i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "python") }); i > 0 {
			return words[i]
		}
	case filepath.Base(words[0]) == "sh" && lines.Scan():
		// pip's form for a path that is too long for a first line: '''exec' /long/path/python "$0" "$@"
		if words = strings.Fields(lines.Text()); len(words) > 1 && words[0] == "'''exec'" {
			return strings.Trim(words[1], `"`)
		}
	}
	return ""
}

// readLimit reads at most n bytes.
type readLimit struct {
	f *os.File
	n int
}

func (r *readLimit) Read(p []byte) (int, error) {
	n, err := r.f.Read(p[:min(len(p), max(r.n, 0))])
	r.n -= n
	if n == 0 && err == nil {
		err = os.ErrClosed
	}
	return n, err
}

// sitePackages returns the folders of a Python's packages: those of its environment and of the one that it is made of, if it
// sees that.
func sitePackages(python string) []string {
	prefix := filepath.Dir(filepath.Dir(python))
	name := filepath.Base(python)
	config, err := os.ReadFile(filepath.Join(prefix, "pyvenv.cfg"))
	if err != nil { // no environment
		if real, err := filepath.EvalSymlinks(python); err == nil {
			prefix, name = filepath.Dir(filepath.Dir(real)), filepath.Base(real)
		}
		if home, err := os.UserHomeDir(); err == nil {
			return append(globPackages(filepath.Join(home, ".local"), name), globPackages(prefix, name)...)
		}
		return globPackages(prefix, name)
	}
	dirs := globPackages(prefix, configValue(config, "version_info"))
	if configValue(config, "include-system-site-packages") == "true" {
		dirs = append(dirs, globPackages(filepath.Dir(configValue(config, "home")), configValue(config, "version_info"))...)
	}
	return dirs
}

func configValue(config []byte, key string) string {
	for line := range strings.Lines(string(config)) {
		if k, v, ok := strings.Cut(line, "="); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

var minor = regexp.MustCompile(`3\.\d+`)

// globPackages returns the folders for packages below a prefix, for one Python if its version is known.
func globPackages(prefix, version string) []string {
	lib := "python" + cmp.Or(minor.FindString(version), "3*")
	prefixes := []string{prefix}
	if prefix == "/usr" {
		prefixes = []string{"/usr/local", "/usr"} // Debian's
	}
	var dirs []string
	for _, p := range prefixes {
		for _, l := range []string{"lib/" + lib, "lib64/" + lib, "lib/python3"} {
			for _, d := range []string{"site-packages", "dist-packages"} {
				found, _ := filepath.Glob(filepath.Join(p, l, d))
				dirs = append(dirs, found...)
			}
		}
	}
	return dirs
}

// editable returns the folders that .pth files add, where a package that is being worked on is. Of a finder written in
// Python, the line that maps vllm is read.
func editable(dir string) []string {
	var dirs []string
	files, _ := filepath.Glob(filepath.Join(dir, "*.pth"))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		for line := range strings.Lines(string(text)) {
			if line = strings.TrimSpace(line); filepath.IsAbs(line) {
				dirs = append(dirs, line)
			}
		}
	}
	finders, _ := filepath.Glob(filepath.Join(dir, "__editable___vllm*finder.py"))
	for _, file := range finders {
		text, _ := os.ReadFile(file)
		if m := regexp.MustCompile(`'vllm': '([^']+)'`).FindSubmatch(text); m != nil {
			dirs = append(dirs, filepath.Dir(string(m[1])))
		}
	}
	return dirs
}

// flagFiles are where vLLM defines its server's flags, in one release or another.
var flagFiles = []string{"entrypoints/openai/cli_args.py", "entrypoints/launchers/cli_args.py", "engine/arg_utils.py"}

// readVLLM reads the vLLM in a folder of packages.
func readVLLM(dir string) VLLM {
	v := VLLM{Dir: filepath.Join(dir, "vllm")}
	v.Version = patch.Version(v.Dir)
	if infos, _ := filepath.Glob(filepath.Join(dir, "vllm-*.dist-info")); v.Version == "" && len(infos) > 0 {
		v.Version = strings.TrimSuffix(strings.TrimPrefix(filepath.Base(infos[0]), "vllm-"), ".dist-info")
	}
	metrics, details := false, false
	for _, file := range flagFiles {
		text, _ := os.ReadFile(filepath.Join(v.Dir, file))
		metrics = metrics || bytes.Contains(text, []byte("enable_per_request_metrics"))
		details = details || bytes.Contains(text, []byte("enable_prompt_tokens_details"))
	}
	v.native = metrics && details
	return v
}

// NativeMetrics returns the flags that make vLLM give exact figures itself, as far as the command has not got them, or says
// why there are none to add.
func NativeMetrics(argv []string, force bool) (flags []string, why string) {
	if !force {
		v, serves := Find(argv)
		switch {
		case !serves || v.Dir == "":
			return nil, "it cannot be told whether the command starts vLLM 0.25 or newer"
		case !v.native:
			return nil, "vLLM " + cmp.Or(v.Version, "of this version") + " is older than 0.25 and has no metrics of single requests"
		}
	}
	if hasSwitch(argv, disableLogStats) || configHas(argv, disableLogStats) {
		return nil, "vLLM is started with " + disableLogStats
	}
	for _, flag := range []string{perRequestMetrics, promptTokensDetails} {
		if !hasSwitch(argv, flag) && !(configHas(argv, flag)) {
			flags = append(flags, flag)
		}
	}
	return flags, ""
}

// SleepMode returns the flag that sleeping needs, if the command starts a vLLM that has not got it.
func SleepMode(argv []string) []string {
	if _, serves := Find(argv); !serves || hasSwitch(argv, sleepMode) || configHas(argv, sleepMode) {
		return nil
	}
	return []string{sleepMode}
}

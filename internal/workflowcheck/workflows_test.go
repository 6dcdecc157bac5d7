package workflowcheck

import (
	"bytes"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rhysd/actionlint"
)

// root is the top of the repository, with the workflows in folder.
const (
	root   = "../.."
	folder = ".github/workflows/"
)

// publishedImage is the image that the release workflow pushes for the repository that go.mod names.
const publishedImage = "ghcr.io/vllm-timings/vllm-timings"

// pin is an action at a commit, with the version that it is in a comment.
var pin = regexp.MustCompile(`^([\w-]+/[\w-]+)@[0-9a-f]{40} # (v\d+)\.\d+\.\d+$`)

// read reads a file of the repository.
func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// workflows reads the workflows with actionlint's parser.
func workflows(t *testing.T) map[string]*actionlint.Workflow {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(root, folder))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*actionlint.Workflow{}
	for _, e := range entries {
		w, errs := actionlint.Parse([]byte(read(t, folder+e.Name())))
		for _, err := range errs {
			t.Errorf("%s: %v", e.Name(), err)
		}
		all[e.Name()] = w
	}
	return all
}

// steps calls do with each step of all workflows.
func steps(t *testing.T, do func(where string, s *actionlint.Step)) {
	t.Helper()
	n := 0
	for file, w := range workflows(t) {
		for name, job := range w.Jobs {
			for _, s := range job.Steps {
				do(file+", job "+name, s)
				n++
			}
		}
	}
	if n == 0 {
		t.Fatal("no steps")
	}
}

// TestWorkflows: actionlint finds nothing. It knows the inputs of actions by version only, so it gets the version in
// place of the commit.
func TestWorkflows(t *testing.T) {
	project, err := actionlint.NewProjects().At(filepath.Join(root, folder))
	if err != nil || project == nil {
		t.Fatalf("no project: %v", err)
	}
	uses := regexp.MustCompile(`(?m)^(\s*(?:- )?uses: )(\S+/\S+@.*)$`)
	for file := range workflows(t) {
		text := uses.ReplaceAllStringFunc(read(t, folder+file), func(line string) string {
			m := uses.FindStringSubmatch(line)
			p := pin.FindStringSubmatch(m[2])
			if p == nil {
				t.Errorf("%s: %s: an action is to be at a commit, with its version behind: # v1.2.3", file, m[2])
				return line
			}
			return m[1] + p[1] + "@" + p[2]
		})
		// Without shellcheck and pyflakes, which not every machine has.
		linter, err := actionlint.NewLinter(io.Discard, &actionlint.LinterOptions{})
		if err != nil {
			t.Fatal(err)
		}
		errs, err := linter.Lint(filepath.Join(root, folder, file), []byte(text), project)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range errs {
			t.Error(err)
		}
	}
	// That it would find something.
	linter, err := actionlint.NewLinter(io.Discard, &actionlint.LinterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wrong := "on: push\njobs:\n  x:\n    runs-on: ubuntu-24.04\n    steps:\n      - uses: actions/checkout@v6\n        with: {depth: 0}\n"
	if errs, err := linter.Lint("<stdin>", []byte(wrong), project); err != nil || len(errs) != 1 {
		t.Errorf("an unknown input: %v, %v", errs, err)
	}
}

// TestWorkflowCalls: what the steps run is in the tree.
func TestWorkflowCalls(t *testing.T) {
	makefile := read(t, "Makefile")
	command := regexp.MustCompile(`(?m)^\s*(make|bash|go run) +([^\s"]+)`)
	called := map[string]bool{}
	steps(t, func(where string, s *actionlint.Step) {
		run, ok := s.Exec.(*actionlint.ExecRun)
		if !ok {
			return
		}
		for _, m := range command.FindAllStringSubmatch(run.Run.Value, -1) {
			called[m[1]+" "+m[2]] = true
			switch m[1] {
			case "make":
				if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(m[2]) + `:`).MatchString(makefile) {
					t.Errorf("%s: there is no target %s", where, m[2])
				}
			case "bash":
				if _, err := os.Stat(filepath.Join(root, m[2])); err != nil {
					t.Errorf("%s: %v", where, err)
				}
			case "go run":
				if _, version, ok := strings.Cut(m[2], "@v"); !ok || version == "" {
					t.Errorf("%s: %s has no version", where, m[2])
				}
			}
		}
	})
	for _, want := range []string{"bash .ci/run", "make release", "make release-check"} {
		if !called[want] {
			t.Errorf("nothing runs %s", want)
		}
	}
}

// TestWorkflowGo: all build with the Go of the Dockerfile.
func TestWorkflowGo(t *testing.T) {
	from := regexp.MustCompile(`(?m)^FROM .*\bgolang:(\S+)`).FindStringSubmatch(read(t, "Dockerfile"))
	if from == nil {
		t.Fatal("the Dockerfile has no Go")
	}
	minor := from[1]
	seen := 0
	steps(t, func(where string, s *actionlint.Step) {
		action, ok := s.Exec.(*actionlint.ExecAction)
		if !ok || !strings.HasPrefix(action.Uses.Value, "actions/setup-go@") {
			return
		}
		seen++
		if v := action.Inputs["go-version"]; v == nil || v.Value.Value != minor {
			t.Errorf("%s: sets up another Go than the Dockerfile's %s", where, minor)
		}
	})
	if seen == 0 {
		t.Error("no step sets Go up")
	}
	container := workflows(t)["ci.yml"].Jobs["ci"].Container
	if container == nil || !strings.HasPrefix(container.Image.Value, "golang:"+minor+"-") {
		t.Errorf("CI's container has another Go than the Dockerfile's %s", minor)
	}
}

// TestPublishedImage: the release builds the Dockerfile with all that it asks for, under the name that the examples use.
func TestPublishedImage(t *testing.T) {
	var push *actionlint.ExecAction
	for _, s := range workflows(t)["release.yml"].Jobs["image"].Steps {
		if a, ok := s.Exec.(*actionlint.ExecAction); ok && strings.HasPrefix(a.Uses.Value, "docker/build-push-action@") {
			push = a
		}
	}
	if push == nil {
		t.Fatal("no image is pushed")
	}
	given := map[string]bool{}
	for line := range strings.Lines(push.Inputs["build-args"].Value.Value) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), "=")
		given[name] = true
	}
	want := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^ARG (\w+)`).FindAllStringSubmatch(read(t, "Dockerfile"), -1) {
		if !strings.HasPrefix(m[1], "TARGET") { // BuildKit gives these
			want[m[1]] = true
		}
	}
	if !maps.Equal(given, want) {
		t.Errorf("build-args %q, the Dockerfile has %q", slices.Sorted(maps.Keys(given)), slices.Sorted(maps.Keys(want)))
	}
	if workflow := read(t, ".github/workflows/release.yml"); !strings.Contains(workflow, "image=ghcr.io/${GITHUB_REPOSITORY,,}\n") {
		t.Error("the image does not have the repository's name")
	}
	module, _, _ := strings.Cut(strings.TrimPrefix(read(t, "go.mod"), "module github.com/"), "\n")
	if publishedImage != "ghcr.io/"+module {
		t.Errorf("the image of module github.com/%s is not %s", module, publishedImage)
	}

	// No example names a registry that is none.
	named := 0
	err := filepath.WalkDir(filepath.Join(root, "deploy"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if bytes.Contains(data, []byte("registry.example.com")) {
			t.Errorf("%s names an image that there is not", path)
		}
		named += bytes.Count(data, []byte(publishedImage))
		return err
	})
	if err != nil || named == 0 {
		t.Errorf("no example has the image: %v", err)
	}
}

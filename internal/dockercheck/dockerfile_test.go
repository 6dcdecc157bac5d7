package dockercheck

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"
)

// The build arguments that the tests give.
const (
	testVersion = "v0.0.0-dockercheck"
	testCommit  = "0123456789abcdef0123456789abcdef01234567"
	testDate    = "2026-01-02T03:04:05Z"
)

// stages parses the Dockerfile; a warning of the parser or of the linter that
// belongs to it fails the test.
func stages(t *testing.T) []instructions.Stage {
	t.Helper()
	found, _ := stagesOf(t, "Dockerfile")
	return found
}

// stagesOf parses a Dockerfile of the repository; it returns the arguments before the first stage too.
func stagesOf(t *testing.T, name string) ([]instructions.Stage, []instructions.ArgCommand) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parser.Parse(bytes.NewReader(data))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, w := range parsed.Warnings {
		t.Errorf("%s: parser warning: %s", name, w.Short)
	}
	lint := linter.New(&linter.Config{
		Warn: func(rule, _, _, message string, at []parser.Range) {
			t.Errorf("%s %v: %s: %s", name, at, rule, message)
		},
	})
	found, arguments, err := instructions.Parse(parsed.AST, lint)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return found, arguments
}

// commands gives the instructions of one kind in a stage.
func commands[T instructions.Command](stage instructions.Stage) []T {
	var found []T
	for _, c := range stage.Commands {
		if c, ok := c.(T); ok {
			found = append(found, c)
		}
	}
	return found
}

// last gives the last instruction of one kind in a stage, which is the one that
// counts for those that only one can count of.
func last[T instructions.Command](t *testing.T, stage instructions.Stage) T {
	t.Helper()
	found := commands[T](stage)
	if len(found) == 0 {
		var want T
		t.Fatalf("the stage %q has no %T", stage.SourceCode, want)
	}
	return found[len(found)-1]
}

// expand takes quotes off and puts the build arguments in.
func expand(word string) (string, error) {
	env := shell.EnvsFromSlice([]string{"VERSION=" + testVersion, "COMMIT=" + testCommit, "DATE=" + testDate})
	expanded, _, err := shell.NewLex('\\').ProcessWord(word, env)
	return expanded, err
}

// image is what the Dockerfile's last stage says about the image.
type image struct {
	env         []string
	entrypoint  []string
	cmd         []string
	healthcheck []string // without the leading "CMD"
}

func finalImage(t *testing.T) image {
	t.Helper()
	all := stages(t)
	final := all[len(all)-1]
	var i image
	for _, c := range commands[*instructions.EnvCommand](final) {
		if err := c.Expand(expand); err != nil {
			t.Fatal(err)
		}
		for _, kv := range c.Env {
			i.env = append(i.env, kv.Key+"="+kv.Value)
		}
	}
	entrypoint := last[*instructions.EntrypointCommand](t, final)
	cmd := last[*instructions.CmdCommand](t, final)
	health := last[*instructions.HealthCheckCommand](t, final).Health
	if entrypoint.PrependShell || cmd.PrependShell || len(health.Test) == 0 || health.Test[0] != "CMD" {
		t.Fatal("ENTRYPOINT, CMD and HEALTHCHECK must be JSON lists: a scratch image has no shell")
	}
	i.entrypoint, i.cmd, i.healthcheck = entrypoint.CmdLine, cmd.CmdLine, health.Test[1:]
	return i
}

func TestStages(t *testing.T) {
	all := stages(t)
	if len(all) < 2 {
		t.Fatalf("%d stages, want a build stage and a final one", len(all))
	}
	build, final := all[0], all[len(all)-1]
	if build.Platform != "$BUILDPLATFORM" {
		t.Errorf("build stage: platform %q: it must cross-compile on $BUILDPLATFORM", build.Platform)
	}
	if final.BaseName != "scratch" {
		t.Errorf("final stage: FROM %s, want scratch", final.BaseName)
	}
	if runs := commands[*instructions.RunCommand](final); len(runs) > 0 {
		t.Errorf("final stage: %q: there is no shell in scratch", runs[0])
	}
}

func TestSyntaxLine(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	// The cache mounts need a Dockerfile frontend that knows them.
	if ref, _, _, ok := parser.DetectSyntax(data); !ok || ref != "docker/dockerfile:1" {
		t.Errorf("syntax line: %q, %t", ref, ok)
	}
}

// The image's Go must be new enough for go.mod.
func TestGoVersion(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	var want string
	for line := range strings.Lines(string(data)) {
		if v, ok := strings.CutPrefix(line, "go "); ok {
			want = strings.TrimSpace(v)
		}
	}
	base := stages(t)[0].BaseName
	minor, ok := strings.CutPrefix(base, "golang:")
	if !ok || !strings.HasPrefix(want+".", minor+".") {
		t.Errorf("Dockerfile builds FROM %s, go.mod says go %s", base, want)
	}
}

func TestModulesBeforeSources(t *testing.T) {
	copies := commands[*instructions.CopyCommand](stages(t)[0])
	if len(copies) < 2 {
		t.Fatalf("build stage: %d COPY, want go.mod and go.sum first, then the rest", len(copies))
	}
	if got := copies[0].SourcePaths; !slices.Equal(got, []string{"go.mod", "go.sum"}) {
		t.Errorf("build stage: first COPY has %q, want go.mod and go.sum: the download of modules stays cached", got)
	}
}

func TestCacheMounts(t *testing.T) {
	var runs []string
	for _, r := range commands[*instructions.RunCommand](stages(t)[0]) {
		runs = append(runs, r.String())
	}
	all := strings.Join(runs, "\n")
	for _, target := range []string{"/go/pkg/mod", "/root/.cache/go-build"} {
		if !strings.Contains(all, "--mount=type=cache,target="+target) {
			t.Errorf("build stage: no cache mount for %s", target)
		}
	}
}

func TestUser(t *testing.T) {
	all := stages(t)
	user := last[*instructions.UserCommand](t, all[len(all)-1]).User
	for part := range strings.SplitSeq(user, ":") {
		// A name would need /etc/passwd; Kubernetes' runAsNonRoot needs a number.
		if id, err := strconv.Atoi(part); err != nil || id <= 0 {
			t.Errorf("USER %s: want the numbers of a user and group that are not root", user)
		}
	}
}

func TestListen(t *testing.T) {
	if env := finalImage(t).env; !slices.Contains(env, "VLLM_TIMINGS_LISTEN=:8010") {
		t.Errorf("ENV %q lacks VLLM_TIMINGS_LISTEN=:8010", env)
	}
	all := stages(t)
	ports := last[*instructions.ExposeCommand](t, all[len(all)-1]).Ports
	if !slices.Equal(ports, []string{"8010"}) {
		t.Errorf("EXPOSE %q, want 8010", ports)
	}
}

func TestCommands(t *testing.T) {
	i := finalImage(t)
	for _, c := range []struct {
		name      string
		got, want []string
	}{
		{"ENTRYPOINT", i.entrypoint, []string{"/vllm-timings"}},
		{"CMD", i.cmd, []string{"serve"}},
		{"HEALTHCHECK CMD", i.healthcheck, []string{"/vllm-timings", "healthcheck"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s %q, want %q", c.name, c.got, c.want)
		}
	}
}

func TestLabels(t *testing.T) {
	all := stages(t)
	final := all[len(all)-1]
	args := map[string]bool{}
	for _, c := range commands[*instructions.ArgCommand](final) {
		for _, a := range c.Args {
			args[a.Key] = true
		}
	}
	for _, name := range []string{"VERSION", "COMMIT", "DATE"} {
		if !args[name] {
			t.Errorf("final stage: no ARG %s, so the labels do not see it", name)
		}
	}
	labels := map[string]string{}
	for _, c := range commands[*instructions.LabelCommand](final) {
		if err := c.Expand(expand); err != nil {
			t.Fatal(err)
		}
		for _, kv := range c.Labels {
			labels[kv.Key] = kv.Value
		}
	}
	for _, name := range []string{"title", "description", "source"} {
		if labels["org.opencontainers.image."+name] == "" {
			t.Errorf("no label org.opencontainers.image.%s", name)
		}
	}
	for name, want := range map[string]string{
		"licenses": "Apache-2.0", "version": testVersion, "revision": testCommit, "created": testDate,
	} {
		if got := labels["org.opencontainers.image."+name]; got != want {
			t.Errorf("label org.opencontainers.image.%s is %q, want %q", name, got, want)
		}
	}
}

// What is copied out of the context must be in it, and what is copied from
// another stage must name one.
func TestCopySources(t *testing.T) {
	all := stages(t)
	ignored := ignoreMatcher(t)
	for _, stage := range all {
		for _, c := range commands[*instructions.CopyCommand](stage) {
			if c.From != "" {
				if _, ok := instructions.HasStage(all, c.From); !ok {
					t.Errorf("%s: no such stage", c)
				}
				// The build stage has the context under /src.
				for _, p := range c.SourcePaths {
					if name, ok := strings.CutPrefix(p, "/src/"); ok {
						checkInContext(t, ignored.MatchesOrParentMatches, c, name)
					}
				}
				continue
			}
			for _, p := range c.SourcePaths {
				checkInContext(t, ignored.MatchesOrParentMatches, c, p)
			}
		}
	}
}

func checkInContext(t *testing.T, ignored func(string) (bool, error), c *instructions.CopyCommand, name string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root, name)); err != nil {
		t.Errorf("%s: %v", c, err)
	}
	out, err := ignored(filepath.Clean(name))
	if err != nil {
		t.Error(err)
	}
	if out {
		t.Errorf("%s: .dockerignore keeps %s out", c, name)
	}
}

// A change to what the build does not need must not reach the build context.
func TestIgnored(t *testing.T) {
	ignored := ignoreMatcher(t)
	for _, name := range []string{
		".git/HEAD", ".ci/run", "bin/vllm-timings", "Dockerfile", "README.md", "docs/accuracy.md",
		"sse/framer_test.go", "proxy/testdata/wire/chat.txt", "internal/e2e/vllm-env.sh", "internal/dockercheck/go.mod", "internal/deploycheck/live/prometheus.go",
	} {
		if out, err := ignored.MatchesOrParentMatches(name); err != nil || !out {
			t.Errorf(".dockerignore lets %s through (%v)", name, err)
		}
	}
}

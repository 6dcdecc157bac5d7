package dockercheck

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/types"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// The examples in deploy/patch are read with the parsers of the programs that they are for. What they run is run by
// TestPatchedAtBoot and TestPatchedImage of internal/e2e.

// TestPatchedImage: the program comes out of our image, and one RUN does all.
func TestPatchedImage(t *testing.T) {
	all, arguments := stagesOf(t, "deploy/patch/Dockerfile")
	defaults := map[string]string{}
	for _, a := range arguments {
		for _, kv := range a.Args {
			defaults[kv.Key] = kv.ValueString()
		}
	}
	final := all[len(all)-1]
	if final.BaseName != "${VLLM}" || !strings.HasPrefix(defaults["VLLM"], "vllm/vllm-openai:v") {
		t.Errorf("FROM %s with %q, want vLLM's own image", final.BaseName, defaults)
	}
	copied := last[*instructions.CopyCommand](t, final)
	from, ok := instructions.HasStage(all, copied.From)
	if !ok || all[from].BaseName != "${TIMINGS}" || defaults["TIMINGS"] != "vllm-timings" {
		t.Errorf("%s: not from the image that make docker makes: %q", copied, defaults)
	}
	if image := finalImage(t); !slices.Equal(copied.SourcePaths, image.entrypoint) {
		t.Errorf("%s: our image has the program at %q", copied, image.entrypoint)
	}
	runs := commands[*instructions.RunCommand](final)
	if len(runs) != 1 {
		t.Fatalf("%d RUN, want one: a layer for each would keep the files from before", len(runs))
	}
	steps := regexp.MustCompile(`patch (check|apply)|compileall`).FindAllString(runs[0].String(), -1)
	if want := []string{"patch check", "patch apply", "patch check", "compileall"}; !slices.Equal(steps, want) {
		t.Errorf("RUN has %q, want %q", steps, want)
	}
}

// TestPatchCompose: docker compose would take it, and its container runs what the other examples run.
func TestPatchCompose(t *testing.T) {
	project := loadCompose(t, "deploy/patch/compose.yaml")
	vllm, err := project.GetService("vllm")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"/bin/sh", "-c", bootCommand(t), "vllm"}
	if !slices.Equal(vllm.Entrypoint, want) {
		t.Errorf("entrypoint %q, docker-run.sh has %q", vllm.Entrypoint, want)
	}
	if i := slices.IndexFunc(vllm.Volumes, func(v types.ServiceVolumeConfig) bool { return v.Target == "/vllm-timings-patch.py" }); i < 0 || !vllm.Volumes[i].ReadOnly {
		t.Errorf("the script is not mounted, read-only: %v", vllm.Volumes)
	}
}

// loadCompose loads compose files of the repository, with the .env beside the first and no other variables.
func loadCompose(t *testing.T, names ...string) *types.Project {
	t.Helper()
	dir := filepath.Join(root, filepath.Dir(names[0]))
	files := make([]string, len(names))
	for i, name := range names {
		files[i] = filepath.Join(root, name)
	}
	project, err := LoadCompose(t.Context(), dir, nil, files...)
	if err != nil {
		t.Fatalf("%q: %v", names, err)
	}
	return project
}

var boot = regexp.MustCompile(`(?m)^ +-c '(.*)' vllm "\$@"$`)

// bootCommand is what docker-run.sh runs in the container, where a shell gets it.
func bootCommand(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy/patch/docker-run.sh"))
	if err != nil {
		t.Fatal(err)
	}
	m := boot.FindSubmatch(text)
	if m == nil {
		t.Fatal("docker-run.sh has no line -c '...' vllm \"$@\"")
	}
	return string(m[1])
}

// TestNix: Nix can parse it, and its container runs the same.
func TestNix(t *testing.T) {
	nix, err := exec.LookPath("nix-instantiate")
	if err != nil {
		unable(t, "needs nix-instantiate (Debian: nix-bin)")
	}
	file := filepath.Join(root, "deploy/patch/oci-container.nix")
	cmd := exec.Command(nix, "--parse", file)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := "''" + bootCommand(t) + "''"; !strings.Contains(string(text), want) {
		t.Errorf("its cmd is not %s", want)
	}
}

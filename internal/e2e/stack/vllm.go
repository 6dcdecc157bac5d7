//go:build unix

package stack

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Model is the name under which the tiny model is served.
const Model = "tiny"

// ExactFlags are the vLLM flags under which its answers carry its own per-request figures, cached tokens included.
var ExactFlags = []string{"--enable-per-request-metrics", "--enable-prompt-tokens-details"}

// startupLimit bounds vLLM's start. It takes a minute on two idle cores, nearly all of it Python imports in three
// processes one after the other, and has taken more than five where two started at once on a busy machine.
const startupLimit = 15 * time.Minute

// Root returns the repository's root: the folder of go.mod, from the working directory upwards.
func Root() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no go.mod in %s or above it: run this inside the repository", wd)
		}
	}
}

// InstallVLLM makes sure that a CPU build of vLLM and the tiny model are there, and returns the `vllm` executable.
// An empty version means the default of vllm-env.sh.
func InstallVLLM(ctx context.Context, version string) (string, error) {
	if version == "" {
		return install(ctx, "vllm-env.sh")
	}
	return install(ctx, "vllm-env.sh", version)
}

// InstallClients makes sure that the client libraries are there, and returns their folder: venv/ and node/ are in it.
func InstallClients(ctx context.Context) (string, error) { return install(ctx, "clients-env.sh") }

// install runs one of the scripts in internal/e2e that install something and print where.
func install(ctx context.Context, script string, args ...string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "internal", "e2e", script), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("internal/e2e/%s failed (see its output above): %w", script, err)
	}
	return string(bytes.TrimSpace(out)), nil
}

// ModelDir returns the folder of the tiny model that belongs to the executable, as vllm-env.sh lays them: DIR/model
// beside DIR/venv/bin/vllm.
func ModelDir(executable string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(executable))), "model")
}

// ServeArgs are the arguments of `vllm serve` for the tiny model, but for where it listens.
//
// Not in bfloat16, which is the model's own: where the processor has AMX, vLLM 0.32.0 then uses it without asking Linux for
// it (ARCH_REQ_XCOMP_PERM), and dies of an illegal instruction with the first request.
func ServeArgs(executable string) []string {
	return []string{ModelDir(executable), "--served-model-name", Model, "--max-model-len", "4096", "--enforce-eager", "--dtype", "float32"}
}

// Env is the environment that vLLM needs besides ours.
func Env(executable string) []string {
	return []string{
		"PATH=" + filepath.Dir(executable) + string(filepath.ListSeparator) + os.Getenv("PATH"), // for its vllm and python3
		"VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind",
		"OMP_NUM_THREADS=1",
		"VLLM_NO_USAGE_STATS=1", // nothing leaves this machine
		"HF_HUB_OFFLINE=1",
	}
}

// Setup is how a vLLM is started.
type Setup struct {
	Executable string // what InstallVLLM returned
	Logs, Name string // folder and name of its log
	Port       int    // of the loopback address
	Flags      []string
	Env        []string // besides ours
	Boot       string   // a shell script that ends in `exec vllm serve "$@"`, to start it with; "": none
}

// VLLM is a running vLLM.
type VLLM struct {
	*Process // nil where somebody else started it
	URL      string

	setup Setup
}

// StartVLLM starts vLLM and waits until it is ready.
func StartVLLM(ctx context.Context, s Setup) (*VLLM, error) {
	v := &VLLM{URL: "http://127.0.0.1:" + strconv.Itoa(s.Port), setup: s}
	return v, v.Restart(ctx)
}

// Restart starts a vLLM that was stopped or killed again, with the same flags at the same address.
func (v *VLLM) Restart(ctx context.Context) error {
	args := slices.Concat(ServeArgs(v.setup.Executable), []string{"--host", "127.0.0.1", "--port", strconv.Itoa(v.setup.Port)}, v.setup.Flags)
	cmd := exec.Command(v.setup.Executable, append([]string{"serve"}, args...)...)
	if v.setup.Boot != "" {
		cmd = exec.Command("/bin/sh", append([]string{"-c", v.setup.Boot, "vllm"}, args...)...)
	}
	cmd.Env = slices.Concat(os.Environ(), Env(v.setup.Executable), v.setup.Env)
	p, err := start(v.setup.Logs, v.setup.Name, cmd)
	if err != nil {
		return err
	}
	if err := p.waitHealthy(ctx, v.URL+"/health", startupLimit); err != nil {
		p.Kill()
		return err
	}
	v.Process = p
	return nil
}

// BuildSidecar builds ./cmd/vllm-timings into dir and returns the binary's path.
func BuildSidecar(ctx context.Context, dir string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "vllm-timings")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", bin, "./cmd/vllm-timings")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as make build does
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the sidecar: %w\n%s", err, out)
	}
	return bin, nil
}

// Sidecar is a running vllm-timings.
type Sidecar struct {
	*Process
	URL string
}

// StartSidecar starts the sidecar's binary before upstream, with more flags of `serve`, and waits until it is ready.
func StartSidecar(ctx context.Context, bin, logs, name, upstream string, flags ...string) (*Sidecar, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	listen := "127.0.0.1:" + strconv.Itoa(port)
	cmd := exec.Command(bin, append([]string{"serve", "--listen", listen, "--upstream", upstream}, flags...)...)
	cmd.Env = CleanEnv()
	p, err := start(logs, name, cmd)
	if err != nil {
		return nil, err
	}
	s := &Sidecar{Process: p, URL: "http://" + listen}
	if err := p.waitHealthy(ctx, s.URL+"/-/healthy", 20*time.Second); err != nil {
		p.Kill()
		return nil, err
	}
	return s, nil
}

// CleanEnv is our environment without the sidecar's own settings: every flag has a twin VLLM_TIMINGS_..., and what a
// developer set there must not change a test.
func CleanEnv() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "VLLM_TIMINGS_") {
			env = append(env, e)
		}
	}
	return env
}

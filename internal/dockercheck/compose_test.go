package dockercheck

import (
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/types"
)

// The stack of deploy/compose. That its services fit one another as running programs is tested by TestCompose of
// internal/e2e.
const stackDir = "deploy/compose"

// variants are the files that make the stack with a GPU and without.
var variants = map[string][]string{
	"gpu": {stackDir + "/compose.yaml"},
	"cpu": {stackDir + "/compose.yaml", stackDir + "/cpu.yaml"},
}

// listens has where each service can be reached, as its image has it.
var listens = map[string]string{
	"vllm": "8000", "vllm-timings": "8010", "llama-swap": "8080", "prometheus": "9090", "grafana": "3000",
}

// eachVariant runs a test with the stack as docker compose understands it.
func eachVariant(t *testing.T, test func(t *testing.T, project *types.Project)) {
	for name, files := range variants {
		t.Run(name, func(t *testing.T) {
			project := loadCompose(t, files...)
			if got, want := slices.Sorted(maps.Keys(project.Services)), slices.Sorted(maps.Keys(listens)); !slices.Equal(got, want) {
				t.Fatalf("services %q, want %q", got, want)
			}
			test(t, project)
		})
	}
}

// TestComposeFile: the line that .env has for those without a GPU does what the command in cpu.yaml does, and without it
// docker compose up is the stack with a GPU.
func TestComposeFile(t *testing.T) {
	m := regexp.MustCompile(`(?m)^#(COMPOSE_FILE=\S+)$`).FindSubmatch(contents(t, stackDir+"/.env"))
	if m == nil {
		t.Fatal(".env has no line #COMPOSE_FILE=")
	}
	want := map[string]*types.Project{}
	for name, files := range variants {
		want[name] = loadCompose(t, files...)
	}
	t.Chdir(filepath.Join(root, stackDir))
	for name, env := range map[string][]string{"gpu": nil, "cpu": {string(m[1])}} {
		got, err := LoadCompose(t.Context(), "", env)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got.Services, want[name].Services) {
			t.Errorf("docker compose up with %q is not the %s stack", env, name)
		}
	}
}

// TestComposeVariables: every variable has a line in .env, and every line there is used.
func TestComposeVariables(t *testing.T) {
	set, err := dotenv.Read(filepath.Join(root, stackDir, ".env"))
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]string{}
	for _, file := range variants["cpu"] {
		for _, m := range regexp.MustCompile(`\$\{?(\w*)`).FindAllSubmatch(contents(t, file), -1) {
			name := string(m[1])
			if _, ok := set[name]; !ok {
				t.Errorf("%s: %s is not in .env", file, m[0])
			}
			used[name] = file
		}
	}
	for name := range set {
		if used[name] == "" {
			t.Errorf("nothing uses %s of .env", name)
		}
	}
	if set["HF_TOKEN"] != "" {
		t.Error("somebody's token is in .env")
	}
}

// TestComposeImages: each is pinned to a version. Ours is built, and never asked of a registry.
func TestComposeImages(t *testing.T) {
	eachVariant(t, func(t *testing.T, project *types.Project) {
		for name, s := range project.Services {
			if name == "vllm-timings" {
				if s.Image != "vllm-timings" || s.PullPolicy != types.PullPolicyBuild || s.Build == nil {
					t.Errorf("%s: image %q, pull_policy %q, build %v", name, s.Image, s.PullPolicy, s.Build)
				} else if top, err := filepath.Abs(root); err != nil || s.Build.Context != top || s.Build.Dockerfile != "Dockerfile" {
					t.Errorf("%s is built from %s, %s: %v", name, s.Build.Context, s.Build.Dockerfile, err)
				}
			} else if !regexp.MustCompile(`^[\w./-]+:v?\d+[\w.-]*$`).MatchString(s.Image) || s.Build != nil {
				t.Errorf("%s: the image %q has no version", name, s.Image)
			}
		}
	})
}

// TestComposeMounts: all that is mounted is there and cannot be changed from within, and what the services look for in
// the container is in it.
func TestComposeMounts(t *testing.T) {
	eachVariant(t, func(t *testing.T, project *types.Project) {
		for name, s := range project.Services {
			for _, v := range s.Volumes {
				if v.Type != types.VolumeTypeBind {
					continue
				}
				if _, err := os.Stat(v.Source); err != nil || !v.ReadOnly {
					t.Errorf("%s mounts %s, read-only: %v; %v", name, v.Source, v.ReadOnly, err)
				}
			}
		}
		grafana := project.Services["grafana"]
		for _, f := range []struct{ service, path string }{
			{"llama-swap", "/app/config.yaml"},               // as its image has -config
			{"prometheus", "/etc/prometheus/prometheus.yml"}, // as its image has --config.file
			{"prometheus", "/etc/prometheus/rules.yml"},      // as prometheus.yml has it
			{"grafana", "/etc/grafana/provisioning/datasources/prometheus.yaml"},
			{"grafana", "/etc/grafana/provisioning/dashboards/vllm-timings.yaml"},
			{"grafana", *grafana.Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]},
		} {
			if host := mounted(project.Services[f.service], f.path); host == "" {
				t.Errorf("%s has no %s", f.service, f.path)
			} else if _, err := os.Stat(host); err != nil {
				t.Errorf("%s: %s: %v", f.service, f.path, err)
			}
		}
		for _, m := range regexp.MustCompile(`\$\{env\.(\w+)\}`).FindAllSubmatch(contents(t, stackDir+"/llama-swap.yaml"), -1) {
			if project.Services["llama-swap"].Environment[string(m[1])] == nil {
				t.Errorf("llama-swap has no variable %s", m[1])
			}
		}
	})
}

// mounted gives the file on this machine that a service has at a path, "" if none.
func mounted(s types.ServiceConfig, name string) string {
	for _, v := range s.Volumes {
		if rest, ok := strings.CutPrefix(name, v.Target); ok && v.Type == types.VolumeTypeBind && (rest == "" || rest[0] == '/') {
			return v.Source + filepath.FromSlash(rest)
		}
	}
	return ""
}

// TestComposeOrder: each service waits for those that its command and its files name, and for no others, until they are
// healthy where that can be told.
func TestComposeOrder(t *testing.T) {
	var names []string
	for name := range listens {
		names = append(names, regexp.QuoteMeta(name))
	}
	slices.SortFunc(names, func(a, b string) int { return len(b) - len(a) }) // vllm-timings before vllm
	address := regexp.MustCompile(`(?:^|[^\w.-])(` + strings.Join(names, "|") + `):(\d+)\b`)
	eachVariant(t, func(t *testing.T, project *types.Project) {
		for name, s := range project.Services {
			needed := map[string]bool{}
			for _, m := range address.FindAllStringSubmatch(texts(t, s), -1) {
				needed[m[1]] = true
				if m[2] != listens[m[1]] {
					t.Errorf("%s asks %s at port %s, it is at %s", name, m[1], m[2], listens[m[1]])
				}
			}
			if got, want := slices.Sorted(maps.Keys(s.DependsOn)), slices.Sorted(maps.Keys(needed)); !slices.Equal(got, want) {
				t.Errorf("%s waits for %q, its files name %q", name, got, want)
			}
			for on, d := range s.DependsOn {
				want := types.ServiceConditionStarted
				if h := project.Services[on].HealthCheck; h != nil && !h.Disable {
					want = types.ServiceConditionHealthy
				}
				if d.Condition != want || !d.Required {
					t.Errorf("%s waits for %s: %s (required %v), want %s", name, on, d.Condition, d.Required, want)
				}
			}
			if name != "vllm" && len(needed) != 1 {
				t.Errorf("%s needs %v, want one service", name, needed)
			}
		}
		for _, name := range []string{"vllm", "vllm-timings", "llama-swap", "prometheus"} {
			h := project.Services[name].HealthCheck
			if h == nil || len(h.Test) < 2 || h.Test[0] != "CMD" {
				t.Errorf("%s: healthcheck %v", name, h)
				continue
			}
			// All but ours, which knows where it listens, ask at the service's own port.
			if want := "127.0.0.1:" + listens[name]; name != "vllm-timings" && !strings.Contains(strings.Join(h.Test, " "), want) {
				t.Errorf("%s: its healthcheck %q does not ask %s", name, h.Test, want)
			}
		}
	})
}

// texts gives what a service is told: its command, its environment and its mounted files, without comments.
func texts(t *testing.T, s types.ServiceConfig) string {
	t.Helper()
	all := slices.Clone([]string(s.Command))
	for name, value := range s.Environment {
		if value != nil {
			all = append(all, name+"="+*value)
		}
	}
	for _, v := range s.Volumes {
		if v.Type != types.VolumeTypeBind {
			continue
		}
		err := filepath.WalkDir(v.Source, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			for line := range strings.Lines(string(text)) {
				line, _, _ = strings.Cut(line, "# ")
				all = append(all, line)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	return strings.Join(all, "\n")
}

// TestComposePorts: what people use can be reached, from this machine only.
func TestComposePorts(t *testing.T) {
	eachVariant(t, func(t *testing.T, project *types.Project) {
		published := map[string]bool{}
		for name, s := range project.Services {
			if s.NetworkMode != "" || s.Privileged || s.Pid != "" {
				t.Errorf("%s: network_mode %q, privileged %v, pid %q", name, s.NetworkMode, s.Privileged, s.Pid)
			}
			for _, p := range s.Ports {
				published[name] = true
				// Docker's own firewall rules go before those of the machine: a port on all interfaces is open to all.
				if ip := net.ParseIP(p.HostIP); ip == nil || !ip.IsLoopback() {
					t.Errorf("%s: port %s at %q", name, p.Published, p.HostIP)
				}
				if listens[name] != itoa(p.Target) {
					t.Errorf("%s: port %d, it listens at %s", name, p.Target, listens[name])
				}
			}
		}
		if got, want := slices.Sorted(maps.Keys(published)), []string{"grafana", "llama-swap", "prometheus"}; !slices.Equal(got, want) {
			t.Errorf("ports of %q, want %q", got, want)
		}
	})
	header := string(contents(t, stackDir+"/compose.yaml"))
	for name, s := range loadCompose(t, variants["gpu"]...).Services {
		for _, p := range s.Ports {
			if !strings.Contains(header, "http://127.0.0.1:"+p.Published+" ") {
				t.Errorf("the comment in compose.yaml does not tell where %s is", name)
			}
		}
	}
}

// TestComposeVLLM: both images get the flags that make all numbers exact, and the GPU is asked for where one is.
func TestComposeVLLM(t *testing.T) {
	eachVariant(t, func(t *testing.T, project *types.Project) {
		vllm := project.Services["vllm"]
		name := *project.Services["llama-swap"].Environment["VLLM_SERVED_NAME"]
		if i := slices.Index(vllm.Command, "--served-model-name"); i != 1 || vllm.Command[2] != name || name == "" {
			t.Errorf("command %q, llama-swap knows the model %q", vllm.Command, name)
		}
		for _, flag := range []string{"--enable-per-request-metrics", "--enable-prompt-tokens-details"} {
			if !slices.Contains(vllm.Command, flag) {
				t.Errorf("command %q lacks %s", vllm.Command, flag)
			}
		}
		cpu := strings.HasPrefix(vllm.Image, "vllm/vllm-openai-cpu:")
		if gpu := vllm.Deploy != nil && vllm.Deploy.Resources.Reservations != nil; cpu != strings.HasSuffix(t.Name(), "/cpu") || gpu == cpu {
			t.Errorf("image %s, deploy %+v", vllm.Image, vllm.Deploy)
		}
	})
}

// TestComposeSidecar: the program takes the command, its healthcheck tells, and the container allows it no more than
// TestStaticBinary, which shows that it needs no more.
func TestComposeSidecar(t *testing.T) {
	s := loadCompose(t, variants["gpu"]...).Services["vllm-timings"]
	image := finalImage(t)
	if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || len(s.CapAdd) > 0 ||
		!slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) || s.User != itoa(imageUser)+":"+itoa(imageUser) || len(s.Volumes) > 0 {
		t.Errorf("read_only %v, cap_drop %q, cap_add %q, security_opt %q, user %q, volumes %v", s.ReadOnly, s.CapDrop, s.CapAdd, s.SecurityOpt, s.User, s.Volumes)
	}
	if s.Entrypoint != nil || !slices.Contains(image.env, "VLLM_TIMINGS_LISTEN=:"+listens["vllm-timings"]) {
		t.Errorf("entrypoint %q, the image's environment %q", s.Entrypoint, image.env)
	}

	binary := program(t)
	help, err := exec.Command(binary, "serve", "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, help)
	}
	m := regexp.MustCompile(`Default\s+(\w+)\s+\(\$VLLM_TIMINGS_DRAIN_TIMEOUT\)`).FindSubmatch(help)
	if m == nil {
		t.Fatalf("no default of --drain-timeout in:\n%s", help)
	}
	drain, err := time.ParseDuration(string(m[1]))
	if err != nil || s.StopGracePeriod == nil || time.Duration(*s.StopGracePeriod) < drain+5*time.Second {
		t.Errorf("stop_grace_period %v, the program may take %s: %v", s.StopGracePeriod, drain, err)
	}

	listen, nobody := free(t), free(t)
	env := []string{"VLLM_TIMINGS_LISTEN=" + listen}
	for name, value := range s.Environment {
		env = append(env, name+"="+*value)
	}
	args := slices.Clone([]string(s.Command))
	const upstream = "http://vllm:8000"
	i := slices.Index(args, upstream)
	if i < 0 {
		t.Fatalf("command %q lacks %s", args, upstream)
	}
	args[i] = "http://" + nobody
	if got := s.HealthCheck.Test; !slices.Equal(got[1:], image.healthcheck) || path.Base(got[1]) != filepath.Base(binary) {
		t.Fatalf("healthcheck %q, the image has %q", got, image.healthcheck)
	}
	healthy := func() error {
		check := exec.Command(binary, s.HealthCheck.Test[2:]...)
		check.Env = env
		return check.Run()
	}
	if healthy() == nil {
		t.Error("it is healthy before it runs")
	}
	stop := serve(t, env, binary, args...)
	for range 200 {
		if err = healthy(); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("it does not become healthy: %v", err)
	}
	stop()
}

func itoa[N int | uint32](n N) string { return strconv.Itoa(int(n)) }

//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/deploycheck/live"
	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestCompose runs the stack of deploy/compose without containers: its own files, with only the addresses replaced that
// services have of one another. llama-swap's Activity page shows the numbers, and Prometheus has data for every panel of
// the dashboard.
func TestCompose(t *testing.T) {
	vllm := shared.exact.get(t)
	c := readCompose(t, "VLLM_SERVED_NAME="+stack.Model)
	c.vllm = strings.TrimPrefix(vllm.URL, "http://")
	c.up(t)

	swap, prometheus := &stack.LlamaSwap{URL: "http://" + c.at["llama-swap"]}, live.Server{URL: c.grafanaSource(t)}
	last := 0
	for _, stream := range []string{"", `"stream":true`} {
		prompt := longPrompt(fmt.Sprint(time.Now().UnixNano())) // not in the cache of a vLLM that was there before
		for _, round := range []string{"first", "second"} {
			a := send(t, swap.URL, newRequest("chat", stack.Model, prompt, 12, stream))
			timings := a.timings(t)
			entry, err := swap.ActivityAfter(t.Context(), last)
			if err != nil {
				t.Fatal(err)
			}
			last = entry.ID
			checkActivity(t, entry, timings)
			checkAlone(t, a, timings, round == "second")
		}
	}
	checkValue(t, prometheus, `up{job="vllm-timings"}`, 1)
	checkValue(t, prometheus, `sum(vllm_timings_timings_total{source="native",exactness="exact"})`, 4)

	// vLLM goes away for one request, so that there are errors to show.
	c.away()
	chat := newRequest("chat", stack.Model, "nobody there", 4, "")
	waitFor(t, 10*time.Second, "a request without vLLM gets 502", func() bool {
		return send(t, swap.URL, chat).status == http.StatusBadGateway
	})
	checkValue(t, prometheus, "vllm_timings_upstream_up", 0)
	c.useVLLM(t, c.services["vllm"], c.at["vllm"])

	composeTraffic(t, swap.URL)
	dashboards, err := filepath.Glob(filepath.Join(c.mount(t, "grafana", "/var/lib/grafana/dashboards"), "*.json"))
	if err != nil || len(dashboards) == 0 {
		t.Fatalf("no dashboards: %v", err)
	}
	for _, file := range dashboards {
		live.ReadDashboard(t, file).Run(t, prometheus, nil)
	}
}

// checkValue waits until a query has one sample with that value.
func checkValue(t *testing.T, s live.Server, query string, want float64) {
	t.Helper()
	live.Wait(t, query, func() error {
		samples, err := s.Query(query)
		if err == nil && (len(samples) != 1 || samples[0].Value() != want) {
			err = fmt.Errorf("%v, want one with %v", samples, want)
		}
		return err
	})
}

// composeTraffic sends requests until the test ends: of every kind that another panel shows.
func composeTraffic(t *testing.T, base string) {
	requests := []request{
		newRequest("chat", stack.Model, longPrompt("traffic"), 12, ""),
		newRequest("chat", stack.Model, longPrompt("traffic"), 12, `"stream":true`),
		{"/v1/completions", `{"model":"tiny","prompt":"several choices have no timings","max_tokens":4,"n":2,"temperature":1}`},
		newRequest("responses", stack.Model, longPrompt("traffic"), 12, ""),
		// These have no figures of vLLM's own, so windows are read. They finish together.
		newRequest("messages", stack.Model, longPrompt("traffic"), 12, `"stream":true`),
		newRequest("messages", stack.Model, longPrompt("traffic"), 12, `"stream":true`),
	}
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, r := range requests {
		all.Go(func() {
			for ctx.Err() == nil {
				if a, err := trySend(t, base, r); err == nil && a.status != http.StatusOK {
					t.Errorf("%s: %d %s", r.path, a.status, a.body)
					return
				}
			}
		})
	}
	t.Cleanup(func() {
		stop()
		all.Wait()
	})
}

// service is one of deploy/compose, as docker compose understands it.
type service struct {
	Command     []string
	Environment map[string]string
	Volumes     []struct{ Type, Source, Target string }
	DependsOn   map[string]struct{} `json:"depends_on"`
	HealthCheck struct{ Test []string }
}

// composed is the stack of deploy/compose, as processes.
type composed struct {
	services map[string]service
	vllm     string            // host:port of the vLLM that is used
	away     func()            // makes it unreachable, until useVLLM is called again
	at       map[string]string // host:port of each service here
}

// inContainer is the port of each service in its container. internal/dockercheck compares it with the files.
var inContainer = map[string]string{"vllm": "8000", "vllm-timings": "8010", "llama-swap": "8080", "prometheus": "9090"}

// readCompose reads the files for the CPU with the parser of docker compose, which stays in a Go module of its own.
func readCompose(t *testing.T, env ...string) *composed {
	t.Helper()
	root, err := stack.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "deploy", "compose")
	cmd := exec.CommandContext(t.Context(), "go", "run", "./composejson", filepath.Join(dir, "compose.yaml"), filepath.Join(dir, "cpu.yaml"))
	cmd.Dir = filepath.Join(root, "internal", "dockercheck")
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("composejson: %v", err)
	}
	var project struct{ Services map[string]service }
	if err := json.Unmarshal(text, &project); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return &composed{services: project.Services, at: map[string]string{}}
}

// up starts the services, each after those that it waits for, and asks for its health as compose.yaml does.
func (c *composed) up(t *testing.T) {
	t.Helper()
	start := map[string]func(*testing.T, service, string){
		"vllm": c.useVLLM, "vllm-timings": c.startSidecar, "llama-swap": c.startLlamaSwap, "prometheus": c.startPrometheus,
	}
	for len(c.at) < len(start) {
		began := len(c.at)
		for name, run := range start {
			s, ok := c.services[name]
			if !ok {
				t.Fatalf("there is no service %s", name)
			}
			waits := slices.ContainsFunc(slices.Collect(maps.Keys(s.DependsOn)), func(on string) bool { return c.at[on] == "" })
			if c.at[name] != "" || waits {
				continue
			}
			port, err := stack.FreePort()
			if err != nil {
				t.Fatal(err)
			}
			address := "127.0.0.1:" + strconv.Itoa(port)
			run(t, s, address)
			c.at[name] = address
			c.checkHealth(t, name)
		}
		if len(c.at) == began {
			t.Fatalf("the services that are left wait for each other; started: %v", c.at)
		}
	}
}

// here puts the addresses that services have here into what a service is told of those that it waits for.
func (c *composed) here(t *testing.T, s service, where, text string) string {
	t.Helper()
	if len(s.DependsOn) == 0 {
		t.Fatalf("%s: its service waits for nobody", where)
	}
	var pairs []string
	for on := range s.DependsOn {
		pairs = append(pairs, on+":"+inContainer[on], c.at[on])
	}
	return live.Replace(t, where, text, pairs...)
}

// mount gives the path of what a service has at a path of its container.
func (c *composed) mount(t *testing.T, name, path string) string {
	t.Helper()
	for _, v := range c.services[name].Volumes {
		if v.Type == "bind" && v.Target == path {
			return v.Source
		}
	}
	t.Fatalf("%s has nothing of ours at %s", name, path)
	return ""
}

// useVLLM takes the suite's vLLM for the one of compose.yaml, which has the same flags.
func (c *composed) useVLLM(t *testing.T, s service, address string) {
	for _, flag := range append([]string{"--served-model-name", stack.Model}, stack.ExactFlags...) {
		if !slices.Contains(s.Command, flag) {
			t.Errorf("vLLM's command %q lacks %s, with which this vLLM runs", s.Command, flag)
		}
	}
	c.away = relay(t, address, c.vllm)
}

func (c *composed) startSidecar(t *testing.T, s service, address string) {
	args := slices.Clone(s.Command)
	i := slices.Index(args, "--upstream") + 1
	if i == 0 || i == len(args) {
		t.Fatalf("the command %q has no --upstream", args)
	}
	args[i] = c.here(t, s, "the command of vllm-timings", args[i])
	// The image has VLLM_TIMINGS_LISTEN=:8010.
	c.start(t, s, "vllm-timings", "http://"+address+"/-/healthy", []string{"VLLM_TIMINGS_LISTEN=" + address}, shared.sidecar, args...)
}

func (c *composed) startLlamaSwap(t *testing.T, s service, address string) {
	text, err := os.ReadFile(c.mount(t, "llama-swap", "/app/config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte(c.here(t, s, "llama-swap.yaml", string(text))), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(t, s, "llama-swap", "http://"+address+"/health", nil, shared.llamaSwap, "-config", config, "-listen", address)
}

func (c *composed) startPrometheus(t *testing.T, s service, address string) {
	program, err := exec.LookPath("prometheus")
	if err != nil {
		t.Fatalf("no prometheus: install the Debian package of that name (%v)", err)
	}
	dir := live.PrometheusFolder(t, c.mount(t, "prometheus", "/etc/prometheus"),
		"vllm-timings:"+inContainer["vllm-timings"], c.at["vllm-timings"], "_interval: 15s", "_interval: 1s")
	c.start(t, s, "prometheus", "http://"+address+"/-/ready", nil, program,
		"--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+t.TempDir(), "--web.listen-address="+address)
}

// start starts a service's program and shows its log if the test fails.
func (c *composed) start(t *testing.T, s service, name, url string, env []string, program string, args ...string) {
	t.Helper()
	for k, v := range s.Environment {
		env = append(env, k+"="+v)
	}
	p, err := stack.Start(t.Context(), t.TempDir(), name, url, env, program, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("the log of %s:\n%s", name, p.Tail(3000))
		}
	})
}

// checkHealth runs the healthcheck of a service.
func (c *composed) checkHealth(t *testing.T, name string) {
	t.Helper()
	test := c.services[name].HealthCheck.Test
	if len(test) < 3 || test[0] != "CMD" {
		t.Fatalf("%s: healthcheck %q", name, test)
	}
	last := test[len(test)-1]
	switch test[1] {
	case "curl", "wget": // not every machine has them
		address := live.Replace(t, "the healthcheck of "+name, last, "127.0.0.1:"+inContainer[name], c.at[name])
		if a := get(t, address); a.status != http.StatusOK {
			t.Errorf("%s: healthcheck %q: status %d", name, test, a.status)
		}
	case "/vllm-timings":
		cmd := exec.Command(shared.sidecar, test[2:]...)
		cmd.Env = []string{"VLLM_TIMINGS_LISTEN=" + c.at[name]}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: healthcheck %q: %v\n%s", name, test, err, out)
		}
	default:
		t.Errorf("%s: healthcheck %q", name, test)
	}
}

// grafanaSource gives the address at which Grafana would ask Prometheus. There is no Grafana here.
func (c *composed) grafanaSource(t *testing.T) string {
	t.Helper()
	const name = "datasources/prometheus.yaml"
	text, err := os.ReadFile(filepath.Join(c.mount(t, "grafana", "/etc/grafana/provisioning"), name))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ +url: (\S+)`).FindStringSubmatch(c.here(t, c.services["grafana"], name, string(text)))
	if m == nil {
		t.Fatalf("%s has no url", name)
	}
	if _, err := url.Parse(m[1]); err != nil {
		t.Fatal(err)
	}
	return m[1]
}

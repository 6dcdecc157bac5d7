package dockercheck

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// pod is what deploy/kubernetes/vllm.yaml makes.
type pod struct {
	deployment appsv1.Deployment
	service    corev1.Service
	sidecar    corev1.Container
	vllm       corev1.Container
}

// decode reads one document against its type: an unknown or doubled member is an error.
func decode(t *testing.T, name string, document []byte, into any) {
	t.Helper()
	if err := yaml.UnmarshalStrict(document, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func kubernetes(t *testing.T) pod {
	t.Helper()
	const name = "deploy/kubernetes/vllm.yaml"
	documents := bytes.Split(contents(t, name), []byte("\n---\n"))
	if len(documents) != 2 {
		t.Fatalf("%s has %d documents", name, len(documents))
	}
	var p pod
	decode(t, name, documents[0], &p.deployment)
	decode(t, name, documents[1], &p.service)
	if p.deployment.APIVersion != "apps/v1" || p.deployment.Kind != "Deployment" || p.service.APIVersion != "v1" || p.service.Kind != "Service" {
		t.Fatalf("%s has %v and %v", name, p.deployment.TypeMeta, p.service.TypeMeta)
	}
	spec := p.deployment.Spec.Template.Spec
	if len(spec.InitContainers) != 1 || len(spec.Containers) != 1 {
		t.Fatal("want one sidecar and one vLLM")
	}
	p.sidecar, p.vllm = spec.InitContainers[0], spec.Containers[0]
	return p
}

func contents(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestKubernetes: the API server would know every member, and they fit one another, the image and vLLM.
func TestKubernetes(t *testing.T) {
	p := kubernetes(t)
	template := p.deployment.Spec.Template
	spec := template.Spec
	for _, labels := range []map[string]string{p.deployment.Spec.Selector.MatchLabels, p.service.Spec.Selector} {
		if !maps.Equal(labels, template.Labels) {
			t.Errorf("the selector %v does not choose %v", labels, template.Labels)
		}
	}
	for _, bad := range validation.ValidateLabels(template.Labels, field.NewPath("labels")) {
		t.Error(bad)
	}
	if spec.EnableServiceLinks == nil || *spec.EnableServiceLinks {
		t.Error("a Service named vllm would set VLLM_PORT")
	}

	volumes := map[string]bool{}
	for _, v := range spec.Volumes {
		volumes[v.Name] = true
	}
	ports := map[string]bool{}
	for _, c := range []corev1.Container{p.sidecar, p.vllm} {
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s mounts %s, which there is not", c.Name, m.Name)
			}
		}
		for _, port := range c.Ports {
			if bad := utilvalidation.IsValidPortName(port.Name); bad != nil || ports[port.Name] {
				t.Errorf("%s: port %q: %v", c.Name, port.Name, bad)
			}
			ports[port.Name] = true
		}
		for name, limit := range c.Resources.Limits {
			if request, ok := c.Resources.Requests[name]; !ok || request.Cmp(limit) > 0 {
				t.Errorf("%s: %s: request %v, limit %v", c.Name, name, request, limit)
			}
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if probe != nil && (probe.HTTPGet == nil || number(c, probe.HTTPGet.Port) == 0) {
				t.Errorf("%s: a probe asks a port that there is not: %v", c.Name, probe)
			}
		}
	}

	// The image says where the program listens; everything that comes from outside goes there.
	image := finalImage(t)
	i := slices.IndexFunc(image.env, func(e string) bool { return strings.HasPrefix(e, "VLLM_TIMINGS_LISTEN=:") })
	if i < 0 {
		t.Fatal("the image does not set VLLM_TIMINGS_LISTEN")
	}
	_, listens, _ := strings.Cut(image.env[i], "=:")
	if got := fmt.Sprint(p.sidecar.Ports[0].ContainerPort); got != listens {
		t.Errorf("the sidecar's port is %s, the image listens at %s", got, listens)
	}
	if s := p.service.Spec.Ports; len(s) != 1 || s[0].TargetPort.String() != listens || fmt.Sprint(s[0].Port) != listens {
		t.Errorf("the Service has the ports %v", s)
	}
	vllmPort := fmt.Sprint(number(p.vllm, intstr.FromString("vllm")))
	if !slices.Contains(p.vllm.Args, "--port="+vllmPort) || !slices.Contains(p.sidecar.Args, "http://127.0.0.1:"+vllmPort) {
		t.Errorf("vLLM's port is %s, the arguments %q and %q", vllmPort, p.vllm.Args, p.sidecar.Args)
	}

	// The order of starting and stopping.
	if always := p.sidecar.RestartPolicy; always == nil || *always != corev1.ContainerRestartPolicyAlways {
		t.Error("an init container without restartPolicy: Always must end before vLLM starts")
	}
	grace, sleep := *spec.TerminationGracePeriodSeconds, p.vllm.Lifecycle.PreStop.Sleep.Seconds
	if drain := int64(30); grace < sleep+drain+10 {
		t.Errorf("%d s are too few to end: %d s of sleep, %d s of --drain-timeout", grace, sleep, drain)
	}

	// The image's user and its read-only root, as TestStaticBinary runs it.
	security := p.sidecar.SecurityContext
	if security == nil || !*security.RunAsNonRoot || *security.RunAsUser != imageUser || !*security.ReadOnlyRootFilesystem ||
		*security.AllowPrivilegeEscalation || !slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
		security.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("securityContext: %+v", security)
	}
	limit := p.sidecar.Resources.Limits.Memory()
	if mib := int64(0); len(p.sidecar.Env) != 1 || p.sidecar.Env[0].Name != "GOMEMLIMIT" {
		t.Errorf("env: %v", p.sidecar.Env)
	} else if n, err := fmt.Sscanf(p.sidecar.Env[0].Value, "%dMiB", &mib); n != 1 || err != nil || mib<<20 >= limit.Value() {
		t.Errorf("GOMEMLIMIT=%s, the limit is %s", p.sidecar.Env[0].Value, limit)
	}
}

// number gives a container's port.
func number(c corev1.Container, port intstr.IntOrString) int32 {
	for _, p := range c.Ports {
		if port == intstr.FromString(p.Name) || port == intstr.FromInt32(p.ContainerPort) {
			return p.ContainerPort
		}
	}
	return 0
}

// TestPodMonitor: prometheus-operator would take it, and it finds the pod's port.
func TestPodMonitor(t *testing.T) {
	const name = "deploy/kubernetes/podmonitor.yaml"
	var m monitoringv1.PodMonitor
	decode(t, name, contents(t, name), &m)
	if m.APIVersion != monitoringv1.SchemeGroupVersion.String() || m.Kind != monitoringv1.PodMonitorsKind {
		t.Errorf("it is a %v", m.TypeMeta)
	}
	p := kubernetes(t)
	if !maps.Equal(m.Spec.Selector.MatchLabels, p.deployment.Spec.Template.Labels) {
		t.Errorf("it chooses %v", m.Spec.Selector.MatchLabels)
	}
	if len(m.Spec.PodMetricsEndpoints) != 1 {
		t.Fatal("want one endpoint")
	}
	e := m.Spec.PodMetricsEndpoints[0]
	if e.Port == nil || *e.Port != p.sidecar.Ports[0].Name || e.Path != "/metrics" {
		t.Errorf("it scrapes %+v", e)
	}
	interval, err1 := time.ParseDuration(string(e.Interval))
	timeout, err2 := time.ParseDuration(string(e.ScrapeTimeout))
	if err1 != nil || err2 != nil || timeout > interval || interval > time.Minute { // the rules' rates are over 5 minutes
		t.Errorf("interval %s, timeout %s", e.Interval, e.ScrapeTimeout)
	}
}

// TestProbes: the program takes the sidecar's arguments, and its probes answer as the pod needs it while vLLM is not
// there, loads, and is ready.
func TestProbes(t *testing.T) {
	p := kubernetes(t)
	var status atomic.Int32
	vllm := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(int(status.Load()))
	}))
	address := vllm.Listener.Addr().String()
	vllm.Listener.Close() // nobody there yet
	listen := free(t)

	args := slices.Clone(p.sidecar.Args)
	for i, a := range args {
		args[i] = strings.Replace(a, "127.0.0.1:8000", address, 1)
	}
	env := []string{"VLLM_TIMINGS_LISTEN=" + listen}
	for _, e := range p.sidecar.Env {
		env = append(env, e.Name+"="+e.Value)
	}
	stop := serve(t, env, program(t), args...)

	// A probe succeeds with a status from 200 to 399.
	check := func(when string, probe *corev1.Probe, want bool) {
		t.Helper()
		var got string
		for range 200 {
			resp, err := http.Get("http://" + listen + probe.HTTPGet.Path)
			if err != nil {
				got = err.Error()
			} else {
				resp.Body.Close()
				got = resp.Status
				if (resp.StatusCode >= 200 && resp.StatusCode < 400) == want {
					return
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Errorf("%s %s: %s, must succeed: %v", when, probe.HTTPGet.Path, got, want)
	}
	all := func(when string, ready bool) {
		check(when, p.sidecar.StartupProbe, true)
		check(when, p.sidecar.LivenessProbe, true)
		check(when, p.sidecar.ReadinessProbe, ready)
	}
	all("before vLLM", false)
	status.Store(http.StatusServiceUnavailable)
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	vllm.Listener = listener
	vllm.Start()
	defer vllm.Close()
	all("while vLLM loads", false)
	status.Store(http.StatusOK)
	all("when vLLM is ready", true)
	stop()
}

// free gives an address that nobody listens at.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

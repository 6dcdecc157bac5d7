package deploycheck

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

const (
	unitFile  = "deploy/systemd/vllm-timings.service"
	installed = "/usr/local/bin/vllm-timings" // where the unit has the program
)

// unit gives the values of the unit's settings. One that stands several times has several.
func unit(t *testing.T) map[string][]string {
	t.Helper()
	settings := map[string][]string{}
	for _, line := range strings.Split(read(t, unitFile), "\n") {
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			settings[key] = append(settings[key], value)
		}
	}
	return settings
}

// TestUnit: systemd takes the unit, finds it safe, and the unit fits the program.
func TestUnit(t *testing.T) {
	analyze := needs.Program(t, "systemd-analyze", "systemd")
	program, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	text := read(t, unitFile)
	if strings.Count(text, "ExecStart="+installed+" serve\n") != 1 {
		t.Fatalf("the unit does not run %s serve", installed)
	}
	file := write(t, t.TempDir(), filepath.Base(unitFile), strings.ReplaceAll(text, "ExecStart="+installed, "ExecStart="+program))
	// Exposure goes from 0 to 10; 20 stands for 2.0.
	for _, args := range [][]string{{"verify", file}, {"security", "--offline=true", "--threshold=20", file}} {
		out, err := exec.Command(analyze, append([]string{"--no-pager"}, args...)...).CombinedOutput()
		if err != nil || args[0] == "verify" && len(out) > 0 { // warnings too
			t.Errorf("systemd-analyze %s: %v\n%s", args[0], err, out)
		}
	}

	settings := unit(t)
	stop, err := time.ParseDuration(settings["TimeoutStopSec"][0])
	if err != nil {
		t.Fatal(err)
	}
	help, err := exec.Command(program, "serve", "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, help)
	}
	m := regexp.MustCompile(`Default\s+(\w+)\s+\(\$VLLM_TIMINGS_DRAIN_TIMEOUT\)`).FindSubmatch(help)
	if m == nil {
		t.Fatalf("no default of --drain-timeout in:\n%s", help)
	}
	drain, err := time.ParseDuration(string(m[1]))
	if err != nil || stop < drain+5*time.Second {
		t.Errorf("TimeoutStopSec is %s, the program may take %s: %v", stop, drain, err)
	}

	// What Restart must not try again is what the program exits with when a flag is wrong.
	wrong := exec.Command(program, "serve")
	wrong.Env = append(os.Environ(), "VLLM_TIMINGS_UPSTREAM=nonsense")
	_ = wrong.Run()
	if got := fmt.Sprint(wrong.ProcessState.ExitCode()); !slices.Equal(settings["RestartPreventExitStatus"], []string{got}) {
		t.Errorf("RestartPreventExitStatus is %q, exit code %s", settings["RestartPreventExitStatus"], got)
	}
}

var (
	systemCall = regexp.MustCompile(`(?m)^(?:\d+ +)?([a-z]\w*)\(`)
	family     = regexp.MustCompile(`(?m)^(?:\d+ +)?socket\((\w+)`)
	executable = regexp.MustCompile(`(?m)^.*\b(?:mmap|mprotect|pkey_mprotect)\(.*PROT_WRITE\|PROT_EXEC.*$`)
)

// TestUnitAllows: no systemd runs here to try the unit. But the system calls of the program, traced while it starts,
// serves, cannot reach vLLM, and stops, are all among those that the unit allows.
func TestUnitAllows(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	analyze := needs.Program(t, "systemd-analyze", "systemd")
	strace := needs.Program(t, "strace", "strace")
	if out, err := exec.Command(strace, "-qq", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("nobody may trace a program here, which no package changes, so CI does without this too: %v: %s", err, out)
	}
	program, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t)
	log := filepath.Join(t.TempDir(), "trace")
	url, stop := start(t, `msg=serving listen=(http://\S+)`, strace, "-D", "-f", "-qq", "-o", log, // -D: the program itself gets the signal
		program, "serve", "--listen", "127.0.0.1:0", "--upstream", strings.Replace(e.url, "127.0.0.1", "localhost", 1))
	e.round(t.Context(), url, 3)
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	stop()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}

	settings := unit(t)
	allowed := map[string]bool{}
	for _, set := range settings["SystemCallFilter"] {
		name, off := strings.CutPrefix(set, "~")
		for _, call := range systemCalls(t, analyze, name) {
			allowed[call] = !off
		}
	}
	used := map[string]bool{}
	for _, m := range systemCall.FindAllSubmatch(text, -1) {
		used[string(m[1])] = true
	}
	if !used["accept4"] || !used["connect"] || !used["exit_group"] {
		t.Errorf("the trace is not whole: %v", used)
	}
	for call := range used {
		if !allowed[call] {
			t.Errorf("the unit forbids the system call %s", call)
		}
	}
	families := strings.Fields(settings["RestrictAddressFamilies"][0])
	for _, m := range family.FindAllSubmatch(text, -1) {
		if !slices.Contains(families, string(m[1])) {
			t.Errorf("the unit forbids sockets of %s", m[1])
		}
	}
	if m := executable.Find(text); m != nil {
		t.Errorf("the unit forbids memory that is written and executed: %s", m)
	}
}

// systemCalls gives the members of a set, those of the sets in it included.
func systemCalls(t *testing.T, analyze, set string) []string {
	t.Helper()
	out, err := exec.Command(analyze, "--no-pager", "syscall-filter", set).Output()
	if err != nil {
		t.Fatalf("systemd-analyze syscall-filter %s: %v", set, err)
	}
	var all []string
	for _, line := range strings.Split(string(out), "\n")[1:] {
		switch name := strings.TrimSpace(line); {
		case name == "" || strings.HasPrefix(name, "#"):
		case strings.HasPrefix(name, "@"):
			all = append(all, systemCalls(t, analyze, name)...)
		default:
			all = append(all, name)
		}
	}
	return all
}

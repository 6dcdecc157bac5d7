package dockercheck

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// The user of the image, as a number of its own on the host too where the test
// runs as root.
const imageUser = 65532

// TestStaticBinary builds the program with the Dockerfile's own RUN line, from
// the files that .dockerignore lets through, and runs it as the image would:
// nothing but the program on a read-only root, another user, no capability,
// process 1 of its own process and network namespaces.
func TestStaticBinary(t *testing.T) {
	line := buildLine(t)
	context := buildContext(t)
	binaries := map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		binaries[arch] = build(t, line, context, arch)
		checkStatic(t, binaries[arch], arch)
	}
	binary, ok := binaries[runtime.GOARCH]
	if !ok {
		t.Skipf("no image for %s to run", runtime.GOARCH)
	}
	for _, tool := range []string{"bwrap", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			unable(t, tool+" is missing: install the Debian packages bubblewrap and util-linux")
		}
	}
	img := finalImage(t)

	t.Run("version", func(t *testing.T) {
		out := output(t, sandbox(t, binary, img, img.entrypoint[0], "version"))
		for _, want := range []string{testVersion, testCommit[:7], testDate} {
			if !strings.Contains(out, want) {
				t.Errorf("version printed %q, without %q", out, want)
			}
		}
	})
	t.Run("healthcheck without a server", func(t *testing.T) {
		cmd := sandbox(t, binary, img, img.healthcheck...)
		if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != 1 {
			// Docker knows 0 (healthy) and 1 (unhealthy) only.
			t.Errorf("want exit code 1: %v\n%s", err, out)
		}
	})
	t.Run("serve", func(t *testing.T) { checkServe(t, binary, img) })
}

// unable ends a test that cannot run here. CI must not pass without it.
func unable(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// buildLine gives the Dockerfile's shell line that builds the program.
func buildLine(t *testing.T) string {
	t.Helper()
	for _, r := range commands[*instructions.RunCommand](stages(t)[0]) {
		if line := strings.Join(r.CmdLine, " "); strings.Contains(line, "go build") {
			return line
		}
	}
	t.Fatal("the Dockerfile's build stage has no RUN with go build")
	return ""
}

func build(t *testing.T, line, context, arch string) string {
	t.Helper()
	const out = "/out/vllm-timings"
	if strings.Count(line, out) != 1 {
		t.Fatalf("the RUN line must write %s: %s", out, line)
	}
	binary := filepath.Join(t.TempDir(), "vllm-timings")
	cmd := exec.Command("/bin/sh", "-c", strings.Replace(line, out, binary, 1))
	cmd.Dir = context
	cmd.Env = append(os.Environ(),
		"TARGETOS=linux", "TARGETARCH="+arch,
		"VERSION="+testVersion, "COMMIT="+testCommit, "DATE="+testDate)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building for %s: %v\n%s", arch, err, out)
	}
	return binary
}

func checkStatic(t *testing.T, binary, arch string) {
	t.Helper()
	f, err := elf.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]; f.Machine != want {
		t.Errorf("%s: the binary is for %s", arch, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("%s: not static: it has a %s", arch, p.Type)
		}
	}
	if s := f.Section(".dynamic"); s != nil {
		t.Errorf("%s: not static: it has a section .dynamic", arch)
	}
}

// sandbox gives a command that runs args with nothing but the program there,
// and an environment that is only the image's.
func sandbox(t *testing.T, binary string, img image, args ...string) *exec.Cmd {
	t.Helper()
	program, err := os.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	id := strconv.Itoa(imageUser)
	cmd := exec.Command("bwrap", append([]string{
		"--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session",
		"--uid", id, "--gid", id, "--cap-drop", "ALL",
		// By descriptor: the other user cannot open the test's folder.
		"--perms", "0555", "--ro-bind-data", "3", img.entrypoint[0],
		"--remount-ro", "/", "--chdir", "/", "--",
	}, args...)...)
	cmd.ExtraFiles = []*os.File{program}
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, img.env...)
	asImageUser(cmd)
	return cmd
}

// asImageUser makes a command run as the image's user, where the test is root.
func asImageUser(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: imageUser, Gid: imageUser}
	}
}

// output runs a command in the sandbox and gives what it printed.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if strings.HasPrefix(stderr.String(), "bwrap:") {
			unable(t, "no sandbox can be made here: "+stderr.String())
		}
		t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
	}
	return stdout.String()
}

// checkServe starts the image's command, asks its health as an engine does,
// by a second process in the same namespaces, and stops it with SIGTERM.
func checkServe(t *testing.T, binary string, img image) {
	cmd := sandbox(t, binary, img, append(append([]string{}, img.entrypoint...), img.cmd...)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	infoR, infoW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer infoR.Close()
	cmd.ExtraFiles = append(cmd.ExtraFiles, infoW)
	cmd.Args = append([]string{cmd.Args[0], "--info-fd", "4"}, cmd.Args[1:]...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	infoW.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // ProcessState has the outcome
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // --die-with-parent ends the rest
		<-ended
		if t.Failed() {
			t.Logf("the program's output:\n%s", log.String())
		}
	})

	var info struct {
		ChildPID int `json:"child-pid"`
	}
	data, _ := io.ReadAll(infoR)
	if err := json.Unmarshal(data, &info); err != nil || info.ChildPID == 0 {
		t.Fatalf("bwrap gave no process id: %q %v", data, err)
	}
	pid := strconv.Itoa(info.ChildPID)

	health := func() ([]byte, error) {
		c := exec.Command("nsenter", append([]string{
			"-t", pid, "-U", "-n", "-m", "-p", "--preserve-credentials", "--wd=/", "--",
		}, img.healthcheck...)...)
		c.Env = append([]string{"PATH=" + os.Getenv("PATH")}, img.env...)
		asImageUser(c)
		return c.CombinedOutput()
	}
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := health()
		if err == nil {
			break
		}
		select {
		case <-deadline:
			t.Fatalf("not healthy after 20 s: %v\n%s", err, out)
		case <-ended:
			t.Fatalf("serve ended: %s", cmd.ProcessState)
		case <-tick.C:
		}
	}
	checkSandbox(t, pid)

	if err := syscall.Kill(info.ChildPID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
		if code := cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("after SIGTERM: exit code %d, want 0", code)
		}
	case <-time.After(20 * time.Second):
		t.Error("still there 20 s after SIGTERM")
	}
}

// checkSandbox shows that the process runs as TestStaticBinary says.
func checkSandbox(t *testing.T, pid string) {
	t.Helper()
	status := read(t, "/proc/"+pid+"/status")
	for _, want := range []string{"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} {
		if !strings.Contains(status, want+"\n") {
			t.Errorf("process %s lacks %q:\n%s", pid, want, status)
		}
	}
	if strings.Contains(status, "Uid:\t0\t") {
		t.Errorf("process %s runs as root", pid)
	}
	var points []string
	for line := range strings.Lines(read(t, "/proc/"+pid+"/mountinfo")) {
		f := strings.Fields(line)
		points = append(points, f[4])
		if !strings.HasPrefix(f[5], "ro,") {
			t.Errorf("mounted writable: %s", line)
		}
	}
	if got := strings.Join(points, " "); got != "/ /vllm-timings" {
		t.Errorf("mounted: %s, want only / and the program", got)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

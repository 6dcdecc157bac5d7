package main

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// TestPatchKilled: a real process that is ended at any moment, and the next one, which puts it right.
func TestPatchKilled(t *testing.T) {
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir, diff := patchDir(t), patchFile(t)
	python := filepath.Join(t.TempDir(), "python3") // one that takes anything, and at once
	if err := os.WriteFile(python, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	args := func(command string) []string {
		return []string{"patch", command, "--vllm-dir", dir, "--patch-file", diff, "--python", python}
	}
	must := func(command string) time.Duration {
		t.Helper()
		began := time.Now()
		if out, err := exec.Command(file, args(command)...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		return time.Since(began)
	}
	states := map[string]map[string]string{"revert": files(t, dir)}
	took := must("apply")
	states["apply"] = files(t, dir)
	journal := filepath.Join(dir, ".vllm-timings.journal")
	cut := 0
	for i := range 40 {
		command := []string{"revert", "apply"}[i%2]
		cmd := exec.Command(file, args(command)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = cmd.Wait() // killed or not
		}()
		if i < 10 { // at any moment
			killer := time.AfterFunc(time.Duration(random.Int64N(int64(took))), func() { _ = cmd.Process.Kill() })
			<-ended
			killer.Stop()
		} else { // in the middle
			for begun := false; !begun; {
				_, err := os.Stat(journal)
				select {
				case <-ended:
					begun = true
				default:
					begun = err == nil
				}
			}
			for end := time.Now().Add(time.Duration(random.Int64N(int64(20 * time.Millisecond)))); time.Now().Before(end); {
				if _, err := os.Stat(journal); err != nil && random.IntN(2) == 0 {
					break
				}
			}
			_ = cmd.Process.Kill()
			<-ended
		}
		before := files(t, dir)
		if _, found := before[filepath.Base(journal)]; found {
			cut++
			code, _, stderr := run(args("check")...)
			if code != exitFailed || !strings.Contains(stderr, "a patcher was cut off at "+dir) {
				t.Fatalf("exit code %d, %s", code, stderr)
			}
			if d := cmp.Diff(before, files(t, dir)); d != "" {
				t.Fatalf("checking changed it: %s", d)
			}
		}
		next := []string{"apply", "revert"}[random.IntN(2)]
		must(next)
		if d := cmp.Diff(states[next], files(t, dir)); d != "" {
			t.Fatalf("after %s: %s", next, d)
		}
		must(command)
	}
	t.Logf("%d of 40 were cut off in the middle", cut)
	if cut == 0 {
		t.Error("none was cut off in the middle")
	}
}

// TestPatchOtherUser: one who may read but not write.
func TestPatchOtherUser(t *testing.T) {
	needs.Root(t, "be somebody else")
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	dir, diff := patchDir(t), patchFile(t)
	for _, name := range []string{filepath.Dir(file), filepath.Dir(filepath.Dir(dir)), filepath.Dir(dir), filepath.Dir(filepath.Dir(diff)), filepath.Dir(diff)} {
		if err := os.Chmod(name, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	before := files(t, dir)
	as := func(uid uint32, command string) (int, string) {
		cmd := exec.Command(file, "patch", command, "--vllm-dir", dir, "--patch-file", diff, "--python", "/usr/bin/python3")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), string(out)
	}
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		needs.Unable(t, "needs a Python that everybody may run (Debian: python3): ", err)
	}
	const advice = "permission denied: this user may not write there; run it as the user that installed vLLM, or as root. Nothing is changed\n"
	if code, out := as(65534, "check"); code != exitOK {
		t.Errorf("exit code %d, %s", code, out)
	}
	if code, out := as(65534, "apply"); code != exitFailed || !strings.HasSuffix(out, advice) {
		t.Errorf("exit code %d, %s", code, out)
	}
	// One who may write into the folder but is not the files' owner cannot keep that.
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if code, out := as(65534, "apply"); code != exitFailed || !strings.Contains(out, "operation not permitted: this user may not write there; run it as") {
		t.Errorf("exit code %d, %s", code, out)
	}
	if d := cmp.Diff(before, files(t, dir)); d != "" {
		t.Error(d)
	}
}

// TestPatchFileSize: a limit on the size of files, which is like a full disk, at whichever write.
func TestPatchFileSize(t *testing.T) {
	file, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	dir, diff := patchDir(t), patchFile(t)
	// The module that is edited first is short, another one long.
	big := "y = 1\n" + strings.Repeat("# more\n", 2000)
	writeFile(t, filepath.Join(dir, "b.py"), big)
	before := files(t, dir)
	for _, blocks := range []string{"0", "1", "8"} { // of 512 bytes
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", `ulimit -f `+blocks+` && exec "$0" "$@"`, file, "patch", "apply", "--vllm-dir", dir, "--patch-file", diff)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		pipe := cmd.Run() // output goes through a pipe, which has no such limit
		if pipe == nil {
			t.Fatalf("%s blocks: it is applied: %s", blocks, &out)
		}
		if cmd.ProcessState.ExitCode() == exitFailed {
			if !strings.Contains(out.String(), "file too large. Nothing is changed") {
				t.Errorf("%s blocks: %s", blocks, &out)
			}
			if d := cmp.Diff(before, files(t, dir)); d != "" {
				t.Errorf("%s blocks: %s", blocks, d)
			}
		}
	}
	for _, command := range []string{"apply", "revert"} {
		if code, _, stderr := run("patch", command, "--vllm-dir", dir, "--patch-file", diff); code != exitOK {
			t.Fatal(stderr)
		}
	}
	if d := cmp.Diff(before, files(t, dir)); d != "" {
		t.Error(d)
	}
}

package patch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// scriptUnder runs some lines of Python, and then the script in the same process, with its arguments.
func scriptUnder(python, prelude, script string, args ...string) *exec.Cmd {
	return exec.Command(python, append([]string{"-c", prelude + "\nimport runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n", script}, args...)...)
}

func TestScriptWithoutTheRight(t *testing.T) {
	t.Parallel()
	python, script := needs.Python(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	// Root may write anywhere, unless it lets go of that: 24 is PR_CAPBSET_DROP, 0 to 2 the rights to give files away and to
	// pass over modes.
	run := func(args ...string) *exec.Cmd {
		drop := "import ctypes, os, sys\nfor c in (0, 1, 2): ctypes.CDLL(None).prctl(24, c, 0, 0, 0)\nos.execv(sys.executable, [sys.executable] + sys.argv[1:])"
		return exec.Command(python, append([]string{"-c", drop, script}, args...)...)
	}
	t.Run("folder", func(t *testing.T) {
		dir := scriptTree(t, scriptThreeFiles)
		before := scriptSnapshot(t, dir)
		sub := filepath.Join(dir, "sub")
		if err := os.Chmod(sub, 0o555); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = os.Chmod(sub, 0o755) }()
		r := runScript(t, run("--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "permission denied: this user may not write there; run it as the user that installed vLLM, or as root. Nothing is changed") {
			t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), before)
		if r := runScript(t, run("--check", "--vllm-dir", dir)); r.code != 0 {
			t.Errorf("--check: exit %d: %s", r.code, r.stderr)
		}
	})
	t.Run("owner", func(t *testing.T) {
		needs.Root(t, "make a file of another user")
		dir := scriptTree(t, scriptThreeFiles)
		if err := os.Chown(filepath.Join(dir, "sub", "b.py"), 12345, 12346); err != nil {
			t.Skipf("this root may not give files away: %v", err)
		}
		before := scriptSnapshot(t, dir)
		r := runScript(t, run("--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "operation not permitted: this user may not write there") {
			t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
		}
		scriptSame(t, "refused", scriptSnapshot(t, dir), before)
		scriptOK(t, script, dir)
		info, err := os.Stat(filepath.Join(dir, "sub", "b.py"))
		if err != nil {
			t.Fatal(err)
		}
		if stat := info.Sys().(*syscall.Stat_t); stat.Uid != 12345 || stat.Gid != 12346 {
			t.Errorf("b.py is now of %d:%d", stat.Uid, stat.Gid)
		}
	})
}

// A read-only disk refuses to remove even what is not there. Python asks before each such step, and may be told no.
func TestScriptOnAReadOnlyDisk(t *testing.T) {
	t.Parallel()
	python, script := needs.Python(t), scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	const readOnly = `
import errno, os, sys
tree = sys.argv[-1]
def hook(event, args):
    write = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (write or event in ("os.rename", "os.remove")) and str(args[0]).startswith(tree):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])
sys.addaudithook(hook)`
	dir := scriptTree(t, scriptThreeFiles)
	for _, test := range []struct {
		arg  string
		code int
		says string
	}{
		{"--check", 0, ""},
		{"--revert", 0, ""},
		{"--force", 1, filepath.Join(dir, journalName+newSuffix) + ": read-only file system: patch while the image is built, or mount a writable copy of the folder. Nothing is changed"},
	} {
		if r := runScript(t, scriptUnder(python, readOnly, script, test.arg, "--vllm-dir", dir)); r.code != test.code || r.said() != test.says {
			t.Errorf("%s: exit %d: %s%s", test.arg, r.code, r.out, r.stderr)
		}
	}
}

// Python tells a process of its own before it opens, renames, removes or changes a file. There the script is killed, at
// the first, the second and each further one.
func TestScriptKilledAtEachStep(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, scriptThreeFiles)
	const kill = `
import os, signal, sys
left = int(sys.argv.pop(1))
tree = os.path.realpath(sys.argv[-1])
def hook(event, args):
    global left
    if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if event in ("open", "os.rename", "os.remove", "os.chmod", "os.chown") and str(args[0]).startswith(tree):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)`
	for _, way := range []string{"--force", "--revert"} {
		at := 0
		for ; ; at++ {
			dir := scriptTree(t, scriptThreeFiles)
			if way == "--revert" {
				if _, err := engineTree(t, dir).Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command(python, "-S", "-c", kill+"\nimport runpy\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n", fmt.Sprint(at), script, way, "--vllm-dir", dir)
			r := runScript(t, cmd)
			if r.code == 0 {
				break
			}
			if r.code != -1 {
				t.Fatalf("%s, step %d: exit %d: %s", way, at, r.code, r.stderr)
			}
			scriptPutRight(t, fmt.Sprintf("%s, killed at step %d", way, at), dir, script, set, old, new)
		}
		t.Logf("%s has %d steps", way, at)
		if at < 15 {
			t.Errorf("%s: only %d steps were seen", way, at)
		}
	}
}

func TestScriptKilledAtAnyTime(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set, files := scriptMany(t, 12)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, files)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	journals := 0
	for i := range 40 {
		dir := scriptTree(t, files)
		args := []string{"-S", script, "--vllm-dir", dir}
		if i%2 == 1 {
			if _, err := engineTree(t, dir).Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
				t.Fatal(err)
			}
			args = append(args, "--revert")
		}
		cmd := exec.Command(python, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(ended)
		}()
		// Most of the time it starts and reads. What counts is from the journal on.
		journal := filepath.Join(dir, journalName)
	wait:
		for {
			if _, err := os.Lstat(journal); err == nil {
				break
			}
			select {
			case <-ended:
				break wait
			case <-time.After(100 * time.Microsecond):
			}
		}
		delay := time.Duration(random.Int64N(int64(80 * time.Millisecond)))
		if i%4 > 1 {
			delay /= 10 // on a fast disk it takes only some milliseconds
		}
		time.Sleep(delay)
		_ = cmd.Process.Kill()
		<-ended
		if _, err := os.Lstat(journal); err == nil {
			journals++
		}
		scriptPutRight(t, fmt.Sprintf("seed %d, run %d, %v", seed, i, args[4:]), dir, script, set, old, new)
	}
	t.Logf("seed %d: %d of 40 left a journal", seed, journals)
}

func TestScriptPutsTheEngineRight(t *testing.T) {
	t.Parallel()
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	old, new := scriptSides(t, set, scriptThreeFiles)
	dead := errors.New("dead")
	for _, d := range []direction{forward, backward} {
		for at := 0; ; at++ {
			dir := scriptTree(t, scriptThreeFiles)
			tree := engineTree(t, dir)
			ctx, r := context.Background(), Request{Sets: []Set{set}}
			if d == backward {
				if _, err := tree.Apply(ctx, r); err != nil {
					t.Fatal(err)
				}
			}
			left, last := at, ""
			tree.before = func(step, path string) error {
				if left == 0 {
					return dead
				}
				left--
				last = step + " " + path
				return nil
			}
			if _, err := tree.run(ctx, r, d); err == nil {
				break
			}
			twin := filepath.Join(t.TempDir(), "vllm")
			if err := os.CopyFS(twin, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			what := fmt.Sprintf("cut off after %q", last)
			scriptOK(t, script, dir)
			scriptSame(t, what+", apply", scriptSnapshot(t, dir), new)
			scriptOK(t, script, twin, "--revert")
			scriptSame(t, what+", --revert", scriptSnapshot(t, twin), old)
		}
	}
}

func TestScriptOnAFullDisk(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set, files := scriptMany(t, 4) // each file is longer than the one before
	script := scriptFile(t, "", false, set)
	const limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
	for _, way := range []string{"--force", "--revert"} {
		dir := scriptTree(t, files)
		if way == "--revert" {
			scriptOK(t, script, dir)
		}
		was := scriptSnapshot(t, dir)
		r := runScript(t, scriptUnder(python, limit, script, way, "--vllm-dir", dir))
		if r.code != 1 || !strings.Contains(r.said(), "file too large. Nothing is changed") {
			t.Errorf("%s: exit %d: %s%s", way, r.code, r.out, r.stderr)
		}
		scriptSame(t, way, scriptSnapshot(t, dir), was)
	}
}

// What fails late is undone: here the text on disk, which somebody spoils in the moment before it is looked at.
func TestScriptUndoesWhatDoesNotCompile(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	script := scriptFile(t, "", false, scriptSet(t, "mine", scriptThree))
	const fail = `
import builtins
real, calls = compile, []
def late(source, name, *args, **kwargs):
    if name.endswith("b.py"):
        calls.append(name)
        if len(calls) == 2:
            raise SyntaxError("spoilt")
    return real(source, name, *args, **kwargs)
builtins.compile = late`
	dir := scriptTree(t, scriptThreeFiles)
	was := scriptSnapshot(t, dir)
	r := runScript(t, scriptUnder(python, fail, script, "--vllm-dir", dir))
	if r.code != 1 || !strings.Contains(r.said(), "spoilt. Nothing is changed") {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
	}
	scriptSame(t, "undone", scriptSnapshot(t, dir), was)
}

// A signal waits until the files are changed.
func TestScriptInterrupted(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	_, new := scriptSides(t, set, scriptThreeFiles)
	const interrupt = `
import os, signal, sys
def hook(event, args):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)`
	dir := scriptTree(t, scriptThreeFiles)
	r := runScript(t, scriptUnder(python, interrupt, script, "--vllm-dir", dir))
	if r.code != 1 || r.said() != "interrupted" {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.stderr)
	}
	scriptSame(t, "done all the same", scriptSnapshot(t, dir), new)
}

func TestScriptsAtOnce(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	set, files := scriptMany(t, 12)
	script := scriptFile(t, "", false, set)
	_, new := scriptSides(t, set, files)
	for range 5 {
		dir := scriptTree(t, files)
		runs := make([]scriptRun, 3)
		var wg sync.WaitGroup
		for i := range runs {
			wg.Go(func() { runs[i] = runScript(t, exec.Command(python, "-S", script, "--vllm-dir", dir)) })
		}
		tree := engineTree(t, dir)
		wg.Go(func() {
			if _, err := tree.Apply(context.Background(), Request{Sets: []Set{set}}); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		applied := 0
		for _, r := range runs {
			if r.code != 0 {
				t.Errorf("exit %d: %s", r.code, r.stderr)
			}
			applied += strings.Count(r.out, " is applied to ")
		}
		if applied > 1 {
			t.Errorf("%d of them applied it: %v", applied, runs)
		}
		scriptSame(t, "all of them", scriptSnapshot(t, dir), new)
	}
}

func TestScriptLeavesARunningVLLMAlone(t *testing.T) {
	t.Parallel()
	python := needs.Python(t)
	if _, err := os.Stat("/proc/self/maps"); err != nil {
		t.Skip("no /proc: processes cannot be looked into")
	}
	set := scriptSet(t, "mine", scriptThree)
	script := scriptFile(t, "", false, set)
	dir := scriptTree(t, with(scriptThreeFiles, "_C kernels.so", strings.Repeat("\x00", 8192)))
	serve := exec.Command(python, "-c", "import mmap, sys\nwith open(sys.argv[1], 'rb') as f: m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\nprint('ready', flush=True)\nsys.stdin.read()", filepath.Join(dir, "_C kernels.so"))
	stdin, err := serve.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := serve.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = stdin.Close(), serve.Wait() }()
	if _, err := stdout.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	tree, err := Open(dir, python)
	if err != nil {
		t.Fatal(err)
	}
	was := scriptSnapshot(t, dir)
	_, want := tree.Apply(context.Background(), Request{Sets: []Set{set}})
	r := runScript(t, exec.Command(python, script, "--vllm-dir", dir))
	if r.code != 1 || want == nil || r.said() != want.Error() || !strings.Contains(r.said(), fmt.Sprintf("process %d (", serve.Process.Pid)) {
		t.Errorf("exit %d: %s\nnot: %v", r.code, r.stderr, want)
	}
	scriptSame(t, "refused", scriptSnapshot(t, dir), was)
	scriptOK(t, script, dir, "--check")
	scriptOK(t, script, dir, "--force")
	scriptOK(t, script, dir) // nothing to do
}

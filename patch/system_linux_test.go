package patch

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// TestServing: a process that has a library of the tree in its memory.
func TestServing(t *testing.T) {
	tree, r := stockTree(t)
	writeText(t, tree.name("_C.abi3.so"), "compiled")
	before := listing(t, tree.Dir)
	server := exec.Command(needs.Python(t), "-c", `import mmap, sys
f = open(sys.argv[1], "rb")
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("serving", flush=True)
sys.stdin.read()
`, tree.name("_C.abi3.so"))
	stdin, err := server.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	stop := func() {
		_ = stdin.Close()
		_ = server.Wait()
	}
	t.Cleanup(stop)
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "serving\n" {
		t.Fatalf("it maps no file: %q, %v", line, err)
	}
	want := fmt.Sprintf("%s is in use by process %d (%s -c import mmap", tree.Dir, server.Process.Pid, needs.Python(t))
	advice := "stop vLLM first, or give --force and start it again afterwards"
	_, err = tree.Apply(t.Context(), r)
	refused(t, err, want, advice)
	same(t, "the tree", listing(t, tree.Dir), before)
	if _, err := tree.Check(t.Context(), r); err != nil {
		t.Errorf("checking changes nothing: %v", err)
	}
	forced := r
	forced.Force = true
	mustApply(t, tree, forced)
	if _, err := tree.Apply(t.Context(), r); err != nil {
		t.Errorf("nothing to do: %v", err)
	}
	_, err = tree.Revert(t.Context(), r)
	refused(t, err, want, advice)
	stop()
	mustRevert(t, tree, r)
	same(t, "reverted", listing(t, tree.Dir), before)
}

// TestOwner: each file keeps its owner, and one that is added has that of __init__.py.
func TestOwner(t *testing.T) {
	needs.Root(t, "give files away")
	tree, r := stockTree(t)
	for path := range stock {
		if err := os.Chown(tree.name(path), 1234, 2345); err != nil {
			t.Fatal(err)
		}
	}
	before := listing(t, tree.Dir)
	mustApply(t, tree, r)
	for _, path := range []string{"a.py", "v1/b.py", "added.py"} {
		if info, err := os.Stat(tree.name(path)); err != nil || ownerOf(info) != "1234:2345" {
			t.Errorf("%s is of %s, %v", path, ownerOf(info), err)
		}
	}
	mustRevert(t, tree, r)
	same(t, "reverted", listing(t, tree.Dir), before)
}

// TestReadOnly: a disk that is mounted so.
func TestReadOnly(t *testing.T) {
	tree, r := stockTree(t)
	before := listing(t, tree.Dir)
	mount := func(args ...string) error {
		out, err := exec.CommandContext(context.Background(), "mount", args...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	if err := mount("--bind", tree.Dir, tree.Dir); err != nil {
		t.Skip("only root can mount, and not everywhere: ", err)
	}
	defer func() {
		if out, err := exec.CommandContext(context.Background(), "umount", tree.Dir).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}()
	if err := mount("-o", "remount,ro,bind", tree.Dir); err != nil {
		t.Skip("only root can mount, and not everywhere: ", err)
	}
	if _, err := tree.Check(t.Context(), r); err != nil {
		t.Error(err)
	}
	_, err := tree.Apply(t.Context(), r)
	refused(t, err, "read-only file system: patch while the image is built, or mount a writable copy of the folder. Nothing is changed")
	if _, err := tree.Revert(t.Context(), r); err != nil {
		t.Errorf("nothing to do: %v", err)
	}
	same(t, "the tree", listing(t, tree.Dir), before)
}

// TestDiskFull: at whichever write.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.CommandContext(context.Background(), "mount", "-t", "tmpfs", "-o", "size=128k", "none", dir).CombinedOutput(); err != nil {
		t.Skip("only root can mount, and not everywhere: ", err, string(out))
	}
	defer func() { _ = exec.CommandContext(context.Background(), "umount", dir).Run() }()
	writeTree(t, dir+"/vllm", stock)
	tree, err := Open(dir+"/vllm", script(t, "exit 0"))
	if err != nil {
		t.Fatal(err)
	}
	_, r := stockTree(t)
	before := listing(t, tree.Dir)
	full := 0
	for blocks := 31; blocks > 0; blocks-- {
		ballast := dir + "/ballast" + strconv.Itoa(blocks)
		if err := os.WriteFile(ballast, make([]byte, 4096), 0o644); err != nil {
			break
		}
		if _, err := tree.Apply(t.Context(), r); err != nil {
			full++
			refused(t, err, "no space left on device", "Nothing is changed")
			same(t, "the tree", listing(t, tree.Dir), before)
			continue
		}
		after := listing(t, tree.Dir)
		if _, err := tree.Revert(t.Context(), r); err != nil { // it needs a block more
			full++
			refused(t, err, "no space left on device", "Nothing is changed")
			same(t, "the tree", listing(t, tree.Dir), after)
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
			mustRevert(t, tree, r)
			writeText(t, ballast, string(make([]byte, 4096)))
		}
	}
	if full < 5 {
		t.Errorf("the disk was full %d times", full)
	}
	same(t, "the tree", listing(t, tree.Dir), before)
}

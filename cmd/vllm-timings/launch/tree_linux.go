package launch

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// selfPath is the executable of this process, also after its file was replaced.
const selfPath = "/proc/self/exe"

// adopt makes orphans among this process's descendants its children.
func adopt() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// programAttributes are those of the program: a process group of its own, and it dies with its parent. The parent is
// the thread that starts it, which must not end before.
func programAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// childInfo is siginfo_t as waitid fills it; of its union unix.Siginfo has nothing.
type childInfo struct {
	signo, errno, code int32
	_                  [0]uintptr // the union is aligned like a pointer
	pid                int32
	uid                uint32
	status             int32
	_                  [128]byte
}

// peek tells whether an own child has ended, and the exit code. It stays there to be waited for: until then its process id
// is its own.
func peek(pid int) (code int, ended bool) {
	var info childInfo
	err := unix.Waitid(unix.P_PID, pid, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	if err != nil || info.pid == 0 {
		return 0, false
	}
	const exited = 1 // CLD_EXITED; the others are signals
	if info.code == exited {
		return int(info.status), true
	}
	return signalBase + int(info.status), true
}

// process is what /proc tells of one.
type process struct {
	pid, parent, group int
	state              byte
	started            string // in clock ticks since boot
}

// readProcess reads /proc/PID/stat, whose second field may hold anything.
func readProcess(pid int) (process, bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	end := bytes.LastIndexByte(text, ')')
	if err != nil || end < 0 {
		return process{}, false
	}
	f := bytes.Fields(text[end+1:])
	if len(f) < 20 {
		return process{}, false
	}
	p := process{pid: pid, state: f[0][0], started: string(f[19])}
	p.parent, _ = strconv.Atoi(string(f[1]))
	p.group, _ = strconv.Atoi(string(f[2]))
	return p, true
}

// readProcesses reads all of them. One that is forked meanwhile may be missing.
func readProcesses() []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var all []process
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, ok := readProcess(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// listable reports whether /proc is there, and of this process's namespace: elsewhere its numbers mean other processes.
func listable() bool {
	self, err := os.Readlink("/proc/self")
	return err == nil && self == strconv.Itoa(os.Getpid())
}

// unlisted ends what children cannot tell of. Only its leader, which was not waited for, may be left of the group then.
func unlisted(group int) bool {
	if !listable() {
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
	return false
}

// children returns the own children. They may lack one that is being born, or whose neighbour in the list is dying.
func children() []process {
	if !listable() {
		return nil
	}
	own, ok := childrenOf(os.Getpid())
	if ok {
		return own
	}
	for _, p := range readProcesses() {
		if p.parent == os.Getpid() {
			own = append(own, p)
		}
	}
	return own
}

// childrenOf reads the kernel's lists of the children of each thread, which is quick also where there are very many
// processes. A kernel that was built without has none.
func childrenOf(parent int) (found []process, ok bool) {
	files, _ := filepath.Glob("/proc/" + strconv.Itoa(parent) + "/task/*/children")
	for _, file := range files {
		text, err := os.ReadFile(file)
		ok = ok || err == nil
		for _, field := range bytes.Fields(text) {
			if pid, err := strconv.Atoi(string(field)); err == nil {
				if p, alive := readProcess(pid); alive && p.parent == parent {
					found = append(found, p)
				}
			}
		}
	}
	return found, ok
}

// descendants returns the own children and all below them.
func descendants() []process {
	if !listable() {
		return nil
	}
	found, ok := childrenOf(os.Getpid())
	if ok {
		for i := 0; i < len(found); i++ {
			below, _ := childrenOf(found[i].pid)
			found = append(found, below...)
		}
		return found
	}
	below := map[int][]process{}
	for _, p := range readProcesses() {
		below[p.parent] = append(below[p.parent], p)
	}
	found = below[os.Getpid()]
	for i := 0; i < len(found); i++ {
		found = append(found, below[found[i].pid]...)
	}
	return found
}

// signal sends a signal to a process that was read, if it is still that one.
func (p process) signal(s syscall.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ENOSYS) { // Linux before 5.3
		if now, ok := readProcess(p.pid); ok && now.started == p.started {
			_ = syscall.Kill(p.pid, s)
		}
		return
	}
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if now, ok := readProcess(p.pid); ok && now.started == p.started {
		_ = unix.PidfdSendSignal(fd, s, nil, 0)
	}
}

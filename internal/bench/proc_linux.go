package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// cpuTime returns the CPU time, of all threads in user and kernel mode, that a process has used. The process's CPU clock
// counts nanoseconds; /proc/PID/stat has the same figure in hundredths of a second.
func cpuTime(pid int) (time.Duration, error) {
	clock := uintptr(^pid<<3 | 2) // as clock_getcpuclockid(3) makes it
	var ts syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clock, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, errno)
	}
	return time.Duration(ts.Nano()), nil
}

// ownMemory returns the bytes of memory that are a process's own: what it allocated, not the pages of its program file.
// It counts garbage that was not collected yet too: that is memory that its user has to provide.
func ownMemory(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) == 3 && string(f[0]) == "Pss_Anon:" {
			kib, err := strconv.ParseInt(string(f[1]), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no Pss_Anon of process %d", pid)
}

// busyTime returns the CPU time that the whole machine has used, and that a hypervisor took from it.
func busyTime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	var ticks int64
	for i, f := range bytes.Fields(line) {
		if i == 0 || i == 4 || i == 5 || i > 8 { // the name, idle, iowait, guest (which is in user)
			continue
		}
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil
}

// family returns pids and all processes below them: a proxy's workers are its own.
func family(pids ...int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		// The name before the last parenthesis may have anything in it. State and parent follow.
		if f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]); len(f) > 1 {
			if parent, err := strconv.Atoi(string(f[1])); err == nil {
				children[parent] = append(children[parent], pid)
			}
		}
	}
	all := slices.Clone(pids)
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all, nil
}

// ownGroup lets a program and its workers be ended together.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func killGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }

// raiseFiles lets this program and all that it starts have as many open files as is allowed. Go does so for itself, but
// gives its children what it had.
func raiseFiles() error {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	l.Cur = l.Max
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l)
}

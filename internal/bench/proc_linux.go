package main

import (
	"bytes"
	"fmt"
	"os"
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

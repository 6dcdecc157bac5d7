package stack

import "syscall"

// processAttributes puts a program in a group of its own, so that its children end with it, and ties it to us: a test
// binary that is killed (the time-out of go test) runs no clean-up.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

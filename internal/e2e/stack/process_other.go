//go:build unix && !linux

package stack

import "syscall"

// processAttributes puts a program in a group of its own, so that its children end with it.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

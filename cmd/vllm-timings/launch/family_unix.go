//go:build unix

package launch

import (
	"errors"
	"syscall"
)

// signalBase plus the number of a signal is the exit code of what that signal ended, as in a shell.
const signalBase = 128

func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return signalBase + int(status.Signal())
	}
	return status.ExitStatus()
}

// family is what is below this process. It waits for every child of the process but for the one that is held back.
type family struct {
	reaped int // how many children were waited for
	held   int // a child that is not waited for before the end, so that its id and its group's stay its own; 0: none
}

// reap waits for the children that have ended, and reports whether the watched one did, and whether by a signal.
func (f *family) reap(watched int) (ended, killed bool) {
	for again := true; again; {
		again = false
		for _, p := range children() {
			if p.pid == f.held || p.state != 'Z' {
				continue
			}
			var status syscall.WaitStatus
			if pid, err := syscall.Wait4(p.pid, &status, syscall.WNOHANG, nil); err == nil && pid == p.pid {
				f.reaped++
				again = true // what was below it may have fallen to us, ended already
				if pid == watched {
					ended, killed = true, status.Signaled()
				}
			}
		}
	}
	if !ended && watched != 0 { // where children cannot be listed
		_, ended = peek(watched)
	}
	return ended, killed
}

// terminate sends SIGTERM to all below, but not to the members of a group that has had it.
func (f *family) terminate(group int) {
	for _, p := range descendants() {
		if p.state != 'Z' && p.pid != f.held && (group == 0 || p.group != group) {
			p.signal(syscall.SIGTERM)
		}
	}
}

// kill sends SIGKILL to all below, and again to the children with their groups: what is missed falls to us when its parent
// has died. This is to be repeated until none is left.
func (f *family) kill() {
	if f.held != 0 {
		_ = syscall.Kill(-f.held, syscall.SIGKILL)
	}
	for _, p := range descendants() {
		if p.state != 'Z' {
			p.signal(syscall.SIGKILL)
		}
	}
	own := syscall.Getpgrp()
	for _, p := range children() {
		if p.state == 'Z' {
			continue
		}
		_ = syscall.Kill(p.pid, syscall.SIGKILL)
		if p.group != own && p.group > 1 {
			_ = syscall.Kill(-p.group, syscall.SIGKILL)
		}
	}
}

// gone reports whether nothing is left but the one that is held back. Where nothing else is seen, that one is waited for,
// and the kernel is asked, which knows of children that a listing may have missed.
func (f *family) gone() bool {
	for _, p := range children() {
		if p.pid != f.held {
			return false
		}
	}
	if f.held != 0 && unlisted(f.held) {
		return false
	}
	if f.held != 0 {
		var status syscall.WaitStatus
		_, _ = syscall.Wait4(f.held, &status, syscall.WNOHANG, nil)
		f.held = 0
	}
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // ECHILD
			return true
		case pid == 0:
			return false
		}
	}
}

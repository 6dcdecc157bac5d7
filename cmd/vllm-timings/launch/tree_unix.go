//go:build unix && !linux

package launch

import (
	"os"
	"syscall"
)

var selfPath, _ = os.Executable()

// adopt has nothing to do: there are no subreapers here.
func adopt() error { return nil }

func programAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// peek waits for an own child that has ended.
func peek(pid int) (code int, ended bool) {
	var status syscall.WaitStatus
	if got, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); err != nil || got != pid {
		return 0, false
	}
	return exitCode(status), true
}

type process struct {
	pid, group int
	state      byte
}

// What is below this process cannot be told here.
func children() []process             { return nil }
func descendants() []process          { return nil }
func (process) signal(syscall.Signal) {}

// unlisted reports whether a group still has members that children cannot tell of.
func unlisted(group int) bool { return syscall.Kill(-group, 0) == nil }

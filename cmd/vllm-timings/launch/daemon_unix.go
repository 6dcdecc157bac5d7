//go:build unix

package launch

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Daemon is a program that outlives this process. It holds a lock for as long as it lives, so that another process knows
// whether there is one, also while it does not answer yet.
type Daemon struct {
	Log string // file with its output

	cmd   *exec.Cmd
	ended chan struct{}
}

// ErrRunning says that there is a daemon already.
var ErrRunning = errors.New("a daemon runs already")

// StartDaemon starts a program that writes to a log file, with the lock beside it. ErrRunning: another one holds that.
func StartDaemon(p Program, log string) (*Daemon, error) {
	if err := os.MkdirAll(filepath.Dir(log), 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(log+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, ErrRunning
		}
		return nil, err
	}
	out, err := os.OpenFile(log, os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	d := &Daemon{Log: log, ended: make(chan struct{}), cmd: &exec.Cmd{
		Path: p.Path, Args: p.Args, Env: p.Env, Stdout: out, Stderr: out,
		ExtraFiles:  []*os.File{lock}, // the lock is held by whoever has it open
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}}
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = d.cmd.Wait() // ProcessState has the outcome
		close(d.ended)
	}()
	return d, nil
}

// PID is the daemon's process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Ended is closed when the daemon has ended.
func (d *Daemon) Ended() <-chan struct{} { return d.ended }

// Code is its exit code then, as Child's.
func (d *Daemon) Code() int {
	<-d.ended
	status, ok := d.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok {
		return 1
	}
	return exitCode(status)
}

// Stop ends the daemon's process group: with SIGTERM, and with SIGKILL when grace is over.
func (d *Daemon) Stop(grace time.Duration) {
	_ = syscall.Kill(-d.PID(), syscall.SIGTERM)
	select {
	case <-d.ended:
	case <-time.After(grace):
	}
	_ = syscall.Kill(-d.PID(), syscall.SIGKILL)
	<-d.ended
}

//go:build !unix

package launch

import (
	"errors"
	"os"
	"time"
)

// Program is what is to be started.
type Program struct {
	Path           string
	Args           []string
	Env            []string
	Stdout, Stderr *os.File
	Grace          time.Duration
}

// Child is a program that was started.
type Child struct{ PID int }

// Start fails: there are no process groups here, so nothing could be promised.
func Start(Program) (*Child, error) { return nil, errors.New("not on this system: use serve") }

// GuardIfAsked does nothing.
func GuardIfAsked() {}

func (c *Child) Ended() <-chan struct{} { return nil }
func (c *Child) Gone() <-chan struct{}  { return nil }
func (c *Child) Code() int              { return 0 }
func (c *Child) Trouble() error         { return nil }
func (c *Child) Stop()                  {}

// Daemon is a program that outlives this process.
type Daemon struct{ Log string }

var ErrRunning = errors.New("a daemon runs already")

// StartDaemon fails, as Start.
func StartDaemon(Program, string) (*Daemon, error) {
	return nil, errors.New("not on this system: use serve")
}

func (d *Daemon) PID() int               { return 0 }
func (d *Daemon) Ended() <-chan struct{} { return nil }
func (d *Daemon) Code() int              { return 0 }
func (d *Daemon) Stop(time.Duration)     {}

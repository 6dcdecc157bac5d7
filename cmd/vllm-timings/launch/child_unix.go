//go:build unix

package launch

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Program is what is to be started.
type Program struct {
	Path           string        // of the executable
	Args           []string      // with the name that it gets as the first
	Env            []string      // nil: this process's
	Stdout, Stderr *os.File      // not closed here
	Grace          time.Duration // between SIGTERM and SIGKILL
}

// Child is a program that was started, and its guard.
type Child struct {
	PID int // of the program

	control *os.File
	guard   int
	ended   chan struct{}
	gone    chan struct{}
	once    sync.Once

	// Set before ended or gone are closed.
	code      int
	abandoned bool // the guard died before the program
	left      bool // something could not be killed
}

// Start starts a program behind a guard. From then on this process waits for all its children, whoever they are, and is
// that of orphans: it should start no others. As process 1 of a container it does so for the whole container.
func Start(p Program) (*Child, error) {
	if err := adopt(); err != nil {
		return nil, fmt.Errorf("this process cannot adopt orphans: %w", err)
	}
	files, err := openPipes()
	if err != nil {
		return nil, err
	}
	defer files.closeGuards()
	env := p.Env
	if env == nil {
		env = os.Environ()
	}
	c := &Child{control: files.controlW, ended: make(chan struct{}), gone: make(chan struct{})}
	childEnded := make(chan os.Signal, 1)
	signal.Notify(childEnded, syscall.SIGCHLD)
	process, err := os.StartProcess(selfPath, append([]string{guardName, p.Grace.String(), p.Path}, p.Args...), &os.ProcAttr{
		Env:   env,
		Files: []*os.File{files.null, p.Stdout, p.Stderr, files.controlR, files.statusW},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		signal.Stop(childEnded)
		_ = files.controlW.Close()
		_ = files.statusR.Close()
		return nil, fmt.Errorf("the guard cannot be started: %w", err)
	}
	c.guard = process.Pid
	_ = process.Release() // run waits for it
	files.closeGuards()   // so that its death is seen at statusR
	status := bufio.NewScanner(files.statusR)
	first := ""
	if status.Scan() {
		first = status.Text()
	}
	told := make(chan struct{})
	message, failed := strings.CutPrefix(first, "failed ")
	go c.readStatus(status, files.statusR, told, failed)
	go c.run(childEnded, told)
	if pid, ok := strings.CutPrefix(first, "started "); ok {
		c.PID, err = strconv.Atoi(pid)
		return c, err
	}
	<-c.gone
	if !failed {
		message = "its guard died"
	}
	return nil, errors.New(message)
}

// Ended is closed when the program has ended. What it started may not have, yet.
func (c *Child) Ended() <-chan struct{} { return c.ended }

// Gone is closed when nothing of it is left.
func (c *Child) Gone() <-chan struct{} { return c.gone }

// Code is the program's exit code, 128 plus the signal's number where a signal ended it. It is there after Ended.
func (c *Child) Code() int {
	<-c.ended
	return c.code
}

// Trouble says, after Gone, what went wrong besides; nil: nothing.
func (c *Child) Trouble() error {
	<-c.gone
	switch {
	case c.left:
		return errors.New("some of its processes could not be killed, and are left")
	case c.abandoned:
		return errors.New("its guard was killed, so it was killed too")
	}
	return nil
}

// Stop sends the program SIGTERM, and SIGKILL to all that is left after Grace. It does not wait.
func (c *Child) Stop() {
	c.once.Do(func() { _, _ = c.control.Write([]byte{stopCommand}) })
}

// readStatus reads what the guard tells until it ends. Whether the program could not be started is known before.
func (c *Child) readStatus(status *bufio.Scanner, file *os.File, told chan<- struct{}, failed bool) {
	defer close(told)
	defer file.Close()
	known := failed
	for status.Scan() {
		word, rest, _ := strings.Cut(status.Text(), " ")
		switch word {
		case "ended":
			c.code, _ = strconv.Atoi(rest)
			known = true
			close(c.ended)
		case "left":
			c.left = true
		}
	}
	switch {
	case failed:
		close(c.ended)
	case !known:
		c.code, c.abandoned = signalBase+int(syscall.SIGKILL), true
		close(c.ended)
	}
}

// run waits for children until the guard is among them. If that was killed, the program's descendants are children of this
// process now, and get killed.
func (c *Child) run(childEnded chan os.Signal, told <-chan struct{}) {
	defer close(c.gone)
	defer signal.Stop(childEnded)
	defer c.control.Close()
	var f family
	killed := false
	for ended := false; !ended; {
		if ended, killed = f.reap(c.guard); !ended {
			<-childEnded
		}
	}
	<-told
	if c.abandoned = c.abandoned || killed; !c.abandoned {
		return
	}
	for end := time.Now().Add(killPatience); !f.gone(); {
		if time.Now().After(end) { // nothing has vanished for long
			c.left = true
			return
		}
		f.kill()
		select {
		case <-childEnded:
		case <-time.After(killEvery):
		}
		before := f.reaped
		if f.reap(0); f.reaped > before {
			end = time.Now().Add(killPatience)
		}
	}
}

// pipes are those between this process and the guard.
type pipes struct {
	null, controlR, controlW, statusR, statusW *os.File
}

func openPipes() (p pipes, err error) {
	if p.null, err = os.Open(os.DevNull); err != nil {
		return p, err
	}
	if p.controlR, p.controlW, err = os.Pipe(); err != nil {
		_ = p.null.Close()
		return p, err
	}
	if p.statusR, p.statusW, err = os.Pipe(); err != nil {
		_ = p.controlW.Close()
		p.closeGuards()
	}
	return p, err
}

// closeGuards closes what only the guard needs.
func (p *pipes) closeGuards() {
	for _, f := range []*os.File{p.null, p.controlR, p.statusW} {
		_ = f.Close()
	}
}

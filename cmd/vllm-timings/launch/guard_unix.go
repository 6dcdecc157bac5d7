//go:build unix

package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const (
	// guardName is what the guard is called in a list of processes, and how it knows that it is one.
	guardName = "vllm-timings guard"

	// Descriptors of the guard besides the program's three.
	controlFD = 3 // commands come here; its end says that the process before the guard is dead
	statusFD  = 4 // what happened goes there, a line each

	stopCommand = 'T'

	// abandonedGrace bounds the time between SIGTERM and SIGKILL when the process before the guard is dead: whoever killed
	// it takes the memory of the GPU for free.
	abandonedGrace = 2 * time.Second
	// leftoverGrace is that time for what a program that ended by itself has left. Python's resource tracker is among it,
	// which cleans up shared memory.
	leftoverGrace = time.Second
	// killPatience is how long it may take until one more of the killed processes has vanished. What is in the kernel's
	// hands, or another user's, stays.
	killPatience = 5 * time.Second
	// killEvery is how often what is left is killed, besides each time that something of it has ended.
	killEvery = 20 * time.Millisecond
)

// Exit codes when the program cannot be started, as a shell has them.
const (
	codeNotStarted = 126
	codeNotFound   = 127
)

// GuardIfAsked makes this process a guard if it was started as one, and does not return then. It is to be called before
// the process does anything else, from an init function.
func GuardIfAsked() {
	if len(os.Args) >= 4 && os.Args[0] == guardName {
		os.Exit(runGuard(os.Args[1], os.Args[2], os.Args[3:]))
	}
}

// guard is the state of the process between us and the program.
type guard struct {
	family
	status   *os.File
	grace    time.Duration
	pid      int
	code     int
	ended    bool // the program; its descendants may not have
	stopping bool
	deadline time.Time // for SIGKILL
}

func runGuard(grace, path string, argv []string) int {
	// The program dies with the thread that started it. This one is the process's first, which lives as long as it.
	runtime.LockOSThread()
	syscall.CloseOnExec(controlFD)
	syscall.CloseOnExec(statusFD)
	g := &guard{status: os.NewFile(statusFD, "status")}
	g.grace, _ = time.ParseDuration(grace)
	// Only the process before us says when to stop: a signal that goes to all processes of a container or unit is for that
	// one to handle. Not signal.Ignore: the program would inherit it.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	childEnded := make(chan os.Signal, 1)
	signal.Notify(childEnded, syscall.SIGCHLD)
	commands := make(chan error, 1)
	go readCommands(commands)

	err := adopt()
	if err == nil {
		g.pid, err = syscall.ForkExec(path, argv, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: programAttributes()})
	}
	if err != nil {
		g.tell("failed %s", err)
		if errors.Is(err, syscall.ENOENT) {
			return codeNotFound
		}
		return codeNotStarted
	}
	g.held = g.pid
	g.tell("started %d", g.pid)
	g.watch(childEnded, commands)
	return g.code
}

// readCommands passes on each command as nil, and the end of them as an error.
func readCommands(commands chan<- error) {
	control := os.NewFile(controlFD, "control")
	b := make([]byte, 1)
	for {
		n, err := control.Read(b)
		if n == 1 && b[0] == stopCommand {
			commands <- nil
		}
		if err != nil {
			commands <- io.EOF
			return
		}
	}
}

func (g *guard) tell(format string, args ...any) {
	line := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
	_, _ = io.WriteString(g.status, line+"\n") // nobody reads it when the other process is dead
}

// watch returns when the program has ended and nothing of it is left.
func (g *guard) watch(childEnded <-chan os.Signal, commands <-chan error) {
	var progress time.Time // when one of the killed vanished
	for {
		before := g.reaped
		if g.reap(0); g.reaped > before {
			progress = time.Now()
		}
		if code, ended := peek(g.pid); ended && !g.ended {
			g.ended, g.code = true, code
			g.tell("ended %d", code)
			group := 0
			if g.stopping {
				group = g.pid // it has had its SIGTERM
			} else {
				g.stopping, g.deadline = true, time.Now().Add(min(leftoverGrace, g.grace))
			}
			g.terminate(group)
		}
		if g.ended && g.gone() {
			return
		}
		var next <-chan time.Time
		if g.stopping {
			wait := time.Until(g.deadline)
			if wait <= 0 {
				if wait < -killPatience && time.Since(progress) > killPatience {
					g.tell("left")
					return
				}
				g.kill()
				wait = killEvery
			}
			next = time.After(wait)
		}
		select {
		case <-childEnded:
		case <-next:
		case err := <-commands:
			g.stop(err != nil)
		}
	}
}

// stop sends SIGTERM, once, and sets the time for SIGKILL.
func (g *guard) stop(abandoned bool) {
	grace := g.grace
	if abandoned {
		grace = min(grace, abandonedGrace)
	}
	deadline := time.Now().Add(grace)
	if !g.stopping {
		g.stopping, g.deadline = true, deadline
		_ = syscall.Kill(-g.pid, syscall.SIGTERM)
	}
	if abandoned && deadline.Before(g.deadline) {
		g.deadline = deadline
	}
}

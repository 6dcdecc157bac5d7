package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// infoTimeout bounds what is only asked to warn of it.
const infoTimeout = 2 * time.Second

type sleepCmd struct {
	Upstream string `default:"http://127.0.0.1:8000" placeholder:"URL" help:"Address of vLLM itself. Default ${default}."`
	AccessFlags
	Level   string `env:"VLLM_TIMINGS_SLEEP_LEVEL" default:"1" placeholder:"N" help:"1 keeps the weights in main memory; 2 keeps nothing, and takes longer to wake up. Default ${default}."`
	StopPID string `name:"stop-pid" placeholder:"PID" help:"The vllm-timings run that gets SIGTERM then: llama-swap's $${PID}."`
}

// complete reads all flags and reports all that is wrong with them at once.
func (c *sleepCmd) complete() (s settings, pid int, err error) {
	var wrong problems
	s.upstream, err = parseUpstream(c.Upstream)
	wrong.add("upstream", c.Upstream, err)
	c.AccessFlags.complete(&s, &wrong)
	_, err = parseWord(c.Level, "1", "2")
	wrong.add("level", c.Level, err)
	if c.StopPID != "" {
		pid, err = strconv.Atoi(c.StopPID)
		if err != nil || pid < 2 {
			wrong.add("stop-pid", c.StopPID, fmt.Errorf("%q is no id of a process: write ${PID} in llama-swap's cmdStop", c.StopPID))
		}
	}
	return s, pid, wrong.err()
}

// check implements checker.
func (c *sleepCmd) check() error {
	_, _, err := c.complete()
	return err
}

// Run puts vLLM to sleep. Whether it can or not, the other process is stopped: llama-swap waits for it, and kills it later.
func (c *sleepCmd) Run(e *env) error {
	s, pid, err := c.complete()
	if err != nil {
		return err
	}
	err = c.putToSleep(e.ctx, newEngine(&s))
	if errors.Is(err, errSilent) {
		fmt.Fprintln(e.stderr, "vllm-timings:", err)
		fmt.Fprintln(e.stderr, "vllm-timings: so there is nothing to put to sleep")
		err = nil
	}
	if pid != 0 {
		if p, findErr := os.FindProcess(pid); findErr != nil {
			err = errors.Join(err, findErr)
		} else if sigErr := p.Signal(syscall.SIGTERM); sigErr != nil {
			err = errors.Join(err, fmt.Errorf("--stop-pid %d: %w", pid, sigErr))
		}
	}
	return err
}

func (c *sleepCmd) putToSleep(ctx context.Context, e *engine) error {
	if asleep, err := e.sleeping(ctx); err != nil || asleep {
		return err
	}
	info, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	if !e.frees(info) {
		return e.errKeeps()
	}
	return e.sleep(ctx, c.Level)
}

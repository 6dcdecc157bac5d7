package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vllm-timings/vllm-timings/cmd/vllm-timings/launch"
)

const (
	// devMode in its environment makes vLLM serve /sleep and /wake_up.
	devMode = "VLLM_SERVER_DEV_MODE"
	// aliveEvery is how often a daemon that is not our child is looked at; it counts as dead after deadAfter failures.
	aliveEvery = time.Second
	deadAfter  = 3
)

// daemonRunner is a runner with sleep mode.
type daemonRunner struct {
	*runner
	engine *engine
	daemon *launch.Daemon // nil where it is not ours
	file   string         // for its output
	args   []string       // of the command, once they were made
	added  []string       // to it
	tail   func(offset int64)
}

// runDaemon serves before a vLLM that stays when this process ends: it is woken up or started, and put to sleep at the end.
func (r *runner) runDaemon() error {
	d := &daemonRunner{runner: r, engine: newEngine(&r.settings)}
	var err error
	if d.file, err = r.logFile(); err != nil {
		return errors.Join(err, r.fail(err.Error()))
	}
	tailing, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	d.tail = func(offset int64) {
		wg.Go(func() { launch.Tail(tailing, d.file, offset, r.out) })
		d.tail = func(int64) {}
	}

	began := time.Now()
	r.gate.enter(waking) // until it is known that it must be started
	ready, err := d.raise()
	if err == nil && ready {
		ready, err = true, r.serve(began)
	}
	if err != nil {
		var code exitCode
		if !errors.As(err, &code) {
			d.abandon()
		}
		return errors.Join(err, r.fail(err.Error()))
	}
	if !ready { // stopped before it was
		d.abandon()
		return r.server.drain(r.drain)
	}
	info, cancel := context.WithCancel(r.ctx)
	defer cancel()
	wg.Go(func() {
		if !d.engine.frees(info) && info.Err() == nil {
			r.log.Error(d.engine.errKeeps().Error())
		}
	})
	if died := d.watch(); died {
		code := 1
		if d.daemon != nil && over(d.daemon.Ended()) {
			code = max(1, d.daemon.Code())
		}
		r.gate.end("vLLM is gone")
		r.log.Error("vLLM ended by itself: its log says why", "log", d.file, "in_flight", r.gate.Open())
		return errors.Join(r.server.stop(breakLimit, "answers were cut off: vLLM is gone"), exitCode(code))
	}
	if err := r.server.drain(r.drain); err != nil {
		return err
	}
	limit, cancelSleep := context.WithTimeout(context.Background(), r.stop)
	defer cancelSleep()
	return d.putToSleep(limit)
}

// logFile returns the name of the file for the daemon's output.
func (r *runner) logFile() (string, error) {
	if r.daemonLog != "" {
		return filepath.Abs(r.daemonLog)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("there is no cache folder for vLLM's output: name a file with --daemon-log: %w", err)
	}
	name := strings.NewReplacer("/", "_", ":", "_", "[", "", "]", "").Replace(r.upstream.Host + r.upstream.Path)
	return filepath.Join(dir, "vllm-timings", "daemon-"+name+".log"), nil
}

// raise wakes vLLM up, or starts it. It is not ready where the context ended before.
func (d *daemonRunner) raise() (ready bool, err error) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	waits := false
	for {
		if d.engine.healthy(d.ctx) {
			return d.rouse()
		}
		if d.ctx.Err() != nil {
			return false, nil
		}
		if d.daemon == nil {
			d.gate.enter(starting)
			err := d.start()
			switch {
			case err != nil && !errors.Is(err, launch.ErrRunning):
				return false, fmt.Errorf("the command cannot be started: %w", err)
			case err != nil && !waits:
				waits = true
				d.log.Info("vLLM was started before and is not ready yet", "log", d.file)
				if info, err := os.Stat(d.file); err == nil {
					d.tail(info.Size())
				}
			}
		} else if over(d.daemon.Ended()) {
			d.log.Error(asErrorText(d.daemon.Code())+": it was not ready yet; its output says why", "log", d.file)
			return false, exitCode(max(1, d.daemon.Code()))
		}
		select {
		case <-d.ctx.Done():
			return false, nil
		case <-tick.C:
		}
	}
}

// start starts the daemon. launch.ErrRunning: one that does not answer yet is there already.
func (d *daemonRunner) start() error {
	if address := d.address(); address != "" && launch.PortTaken(address) {
		return launch.ErrRunning // it listens, but is not healthy
	}
	if d.args == nil {
		args, added, err := d.arguments()
		if err != nil {
			return err
		}
		d.args, d.added = args, added
	}
	vars := environment()
	if os.Getenv(devMode) == "" {
		vars = append(vars, devMode+"=1")
	}
	var err error
	d.daemon, err = launch.StartDaemon(launch.Program{Path: d.path, Args: d.args, Env: vars}, d.file)
	if err != nil {
		d.daemon = nil
	} else {
		d.starting(d.added)
		d.log.Info("vLLM was started to stay", "pid", d.daemon.PID(), "log", d.file)
		d.tail(0)
	}
	return err
}

// rouse makes sure that vLLM can sleep, and wakes it up if it does.
func (d *daemonRunner) rouse() (ready bool, err error) {
	d.gate.enter(waking)
	asleep, err := d.engine.sleeping(d.ctx)
	if err == nil && asleep {
		began := time.Now()
		if err = d.engine.wake(d.ctx); err == nil {
			d.log.Info("vLLM woke up", "after_ms", ms(time.Since(began)))
		}
		for err == nil && !d.engine.healthy(d.ctx) {
			select {
			case <-d.ctx.Done():
				err = d.ctx.Err()
			case <-time.After(healthEvery):
			}
		}
	}
	if d.ctx.Err() != nil {
		return false, nil
	}
	if info, statErr := os.Stat(d.file); statErr == nil {
		d.tail(info.Size())
	}
	return err == nil, err
}

// abandon ends a daemon of ours that was never ready, or cannot sleep: nobody would free its memory.
func (d *daemonRunner) abandon() {
	if d.daemon != nil {
		d.daemon.Stop(d.stop)
	}
}

// watch returns when vLLM has died, or the context has ended.
func (d *daemonRunner) watch() (died bool) {
	var ended <-chan struct{}
	if d.daemon != nil {
		ended = d.daemon.Ended()
	}
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	failures := 0
	for {
		select {
		case <-ended:
			return true
		case <-d.ctx.Done():
			return false
		case <-tick.C:
		}
		if d.daemon != nil {
			continue
		}
		limit, cancel := context.WithTimeout(d.ctx, aliveEvery)
		_, _, err := d.engine.do(limit, "GET", "health", "", "")
		if failures++; err == nil || limit.Err() != nil { // slow is not dead
			failures = 0
		}
		cancel()
		if failures >= deadAfter {
			return true
		}
	}
}

// putToSleep puts vLLM to sleep unless vllm-timings sleep did.
func (d *daemonRunner) putToSleep(ctx context.Context) error {
	asleep, err := d.engine.sleeping(ctx)
	if err == nil && !asleep {
		if err = d.engine.sleep(ctx, d.level); err == nil {
			d.log.Info("vLLM sleeps", "level", d.level)
		}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("vLLM did not fall asleep within --stop-timeout: %w", err)
	}
	return err
}

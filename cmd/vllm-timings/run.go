package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vllm-timings/vllm-timings/cmd/vllm-timings/launch"
	"github.com/vllm-timings/vllm-timings/metrics"
)

const (
	// healthEvery is how often vLLM is asked whether it is ready.
	healthEvery = 50 * time.Millisecond
	// learnLimit bounds the wait for vLLM's version and first metrics, once it is ready.
	learnLimit = 2 * time.Second
	// breakLimit is how long answers in flight may take to break when vLLM has died, before they are cut off. They break by
	// themselves where its processes have closed their connections.
	breakLimit = 1500 * time.Millisecond
	// goneLimit is how long the end of killed processes may take, and outputLimit how long their last words.
	goneLimit   = 8 * time.Second
	outputLimit = time.Second
)

// A launched program may be a guard: see launch.
func init() { launch.GuardIfAsked() }

// runCmd has a row in docs/flags.md for each flag that serve has not got.
type runCmd struct {
	ListenFlag
	Upstream string `placeholder:"URL" help:"Where the command's vLLM listens. Default: where --host, --port or --uds in the command say; without those, a free port of 127.0.0.1, which the command gets as --host and --port."`
	ProxyFlags
	NativeMetrics string `default:"auto" placeholder:"WHEN" help:"auto: add --enable-per-request-metrics --enable-prompt-tokens-details to the command of a vLLM that has them. on: of any. off: never. Default ${default}."`
	DrainTimeout  string `default:"2s" placeholder:"TIME" help:"How long answers in flight may take to end after SIGTERM or SIGINT. Default ${default}."`
	StopTimeout   string `default:"6s" placeholder:"TIME" help:"How long the command may take to end then, before it is killed. With --drain-timeout, less than llama-swap's unloadTimeout. Default ${default}."`
	SleepMode     toggle `default:"false" help:"Leave vLLM running, asleep, and wake it up the next time. It needs a fixed address."`
	SleepLevel    string `default:"1" placeholder:"N" help:"How it sleeps. 1 keeps the weights in main memory; 2 keeps nothing, and takes longer to wake up. Default ${default}."`
	DaemonLog     string `placeholder:"FILE" help:"With --sleep-mode: what vLLM writes goes there, too. Default: a file for its address in the user's cache folder."`
	LogFlags
	Command []string `arg:"" optional:"" help:"The command, behind --."`
}

// runSettings are the flags as values that can be used.
type runSettings struct {
	settings
	path       string // of the command's executable
	command    []string
	choosePort bool // for the command
	native     string
	stop       time.Duration
	sleepMode  bool
	level      string
	daemonLog  string
}

// complete reads all flags and reports all that is wrong with them at once.
func (c *runCmd) complete() (runSettings, error) {
	s := runSettings{command: c.Command}
	var wrong problems
	var err error
	c.ListenFlag.complete(&wrong)
	if c.Upstream != "" {
		s.upstream, err = parseUpstream(c.Upstream)
		wrong.add("upstream", c.Upstream, err)
	} else if len(c.Command) > 0 {
		s.upstream, s.choosePort, err = commandUpstream(c.Command)
		if err != nil {
			wrong = append(wrong, err)
		}
	}
	c.notSelf(s.upstream, c.Upstream, &wrong)
	c.ProxyFlags.complete(&s.settings, &wrong)
	s.native, err = parseWord(c.NativeMetrics, "auto", "on", "off")
	wrong.add("native-metrics", c.NativeMetrics, err)
	s.drain, err = parseDuration(c.DrainTimeout, 0)
	wrong.add("drain-timeout", c.DrainTimeout, err)
	s.stop, err = parseDuration(c.StopTimeout, 0)
	wrong.add("stop-timeout", c.StopTimeout, err)
	s.sleepMode, err = parseToggle(c.SleepMode)
	if err == nil && s.sleepMode && s.choosePort {
		err = errors.New("vLLM is found again by its address: give the command --port, or give --upstream")
	}
	wrong.add("sleep-mode", string(c.SleepMode), err)
	s.level, err = parseWord(c.SleepLevel, "1", "2")
	wrong.add("sleep-level", c.SleepLevel, err)
	s.daemonLog = c.DaemonLog
	c.LogFlags.complete(&s.settings, &wrong)
	if len(c.Command) == 0 {
		wrong = append(wrong, errors.New("there is no command: write it behind --, as in vllm-timings run -- vllm serve MODEL"))
	} else if s.path, err = exec.LookPath(c.Command[0]); err != nil {
		wrong = append(wrong, fmt.Errorf("the command cannot be run: %w", err))
	} else if s.path, err = filepath.Abs(s.path); err != nil {
		wrong = append(wrong, err)
	}
	return s, wrong.err()
}

// check implements checker.
func (c *runCmd) check() error {
	_, err := c.complete()
	return err
}

// commandUpstream returns where the server that a command starts listens; choose: where we say.
func commandUpstream(command []string) (u *url.URL, choose bool, err error) {
	if socket, ok := launch.Flag(command, "--uds"); ok {
		path, err := filepath.Abs(socket)
		return &url.URL{Scheme: "unix", Path: path}, false, err
	}
	scheme := "http"
	if _, ok := launch.Flag(command, "--ssl-certfile"); ok {
		scheme = "https"
	}
	host, ok := launch.Flag(command, "--host")
	ip, ipErr := netip.ParseAddr(host)
	switch {
	case !ok, ipErr == nil && ip.IsUnspecified() && ip.Is4():
		host = "127.0.0.1"
	case ipErr == nil && ip.IsUnspecified():
		host = "::1"
	}
	port, ok := launch.Flag(command, "--port")
	if !ok {
		return &url.URL{Scheme: scheme, Host: net.JoinHostPort(host, "0")}, true, nil
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return nil, false, fmt.Errorf("--port %q in the command: a port is a number from 1 to 65535", port)
	}
	return &url.URL{Scheme: scheme, Host: net.JoinHostPort(host, port)}, false, nil
}

// exitCode ends the program without a word: it is the command's, or what doctor says by it.
type exitCode int

func (c exitCode) Error() string { return "the command ended with exit code " + strconv.Itoa(int(c)) }

func asError(code int) error {
	if code == 0 {
		return nil
	}
	return exitCode(code)
}

// runner runs a command and serves before it.
type runner struct {
	runSettings
	ctx        context.Context // ends when it is to stop
	stdout     io.Writer
	stderr     io.Writer
	out        *launch.Output
	log        *slog.Logger
	collectors *metrics.Collectors
	gate       *gate
	server     *server
}

// Run serves until the context or the command ends.
func (c *runCmd) Run(e *env) error {
	s, err := c.complete()
	if err != nil {
		return err
	}
	listener, err := c.open()
	if err != nil {
		return err
	}
	r := &runner{runSettings: s, ctx: e.ctx, stdout: e.stdout, stderr: e.stderr, out: launch.NewOutput(e.stderr), collectors: newCollectors()}
	defer r.out.Flush()
	r.log = s.logger(r.out)
	r.gate = newGate(r.collectors)
	upstream := r.upstream.Redacted()
	if r.choosePort {
		upstream = "a free port"
	}
	r.log.Info("serving", "listen", "http://"+listener.Addr().String(), "upstream", upstream, "sources", r.sources.String(),
		"command", filepath.Base(r.command[0]), "version", buildVersion().version)
	r.server = startServer(listener, r.gate, &r.settings, r.log)
	defer r.gate.close()
	if r.sleepMode {
		return r.runDaemon()
	}
	for try := 1; ; try++ {
		again, err := r.once(try)
		if !again {
			return err
		}
	}
}

// arguments completes the command, and sets the upstream where it is ours to choose.
func (r *runner) arguments() (args, added []string, err error) {
	if r.choosePort {
		port, err := launch.FreePort()
		if err != nil {
			return nil, nil, fmt.Errorf("no free port: %w", err)
		}
		if _, ok := launch.Flag(r.command, "--host"); !ok {
			added = append(added, "--host", "127.0.0.1")
		}
		u := *r.upstream
		u.Host = net.JoinHostPort(u.Hostname(), strconv.Itoa(port))
		r.upstream = &u
		added = append(added, "--port", strconv.Itoa(port))
	}
	if r.native != "off" {
		flags, why := launch.NativeMetrics(r.command, r.native == "on")
		if why != "" {
			r.log.Info("numbers may be estimates: "+why+". To make every number exact, start vLLM 0.25 or newer with --enable-per-request-metrics --enable-prompt-tokens-details (--native-metrics on adds them)", "command", filepath.Base(r.command[0]))
		}
		added = append(added, flags...)
	}
	if r.sleepMode {
		added = append(added, launch.SleepMode(r.command)...)
	}
	return append(r.command[:len(r.command):len(r.command)], added...), added, nil
}

// starting tells what will be started. Not the command's own arguments: there may be a key among them.
func (r *runner) starting(added []string) {
	r.log.Info("starting the command", "command", filepath.Base(r.command[0]), "upstream", r.upstream.Redacted(), "added", strings.Join(added, " "))
}

// environment is the command's: ours without our own variables, as some versions of vLLM warn of those with VLLM_ that they do not know.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, envPrefix+"_") })
}

// address is the upstream's, if it is TCP.
func (r *runner) address() string {
	if r.upstream.Scheme == "unix" || r.upstream.Port() == "" {
		return ""
	}
	return net.JoinHostPort(r.upstream.Hostname(), r.upstream.Port())
}

// once runs the command to its end. It is to be run again where it died because another process had taken its port.
func (r *runner) once(try int) (again bool, err error) {
	began := time.Now()
	args, added, err := r.arguments()
	if err == nil && !r.choosePort && r.address() != "" && launch.PortTaken(r.address()) {
		err = fmt.Errorf("%s, where the command's vLLM should listen, is in use by another process: stop that, or choose another port", r.address())
	}
	if err != nil {
		return false, errors.Join(err, r.fail(err.Error()))
	}
	r.starting(added)
	pipes, err := launch.NewPipes(r.stdout, r.stderr, r.out)
	if err != nil {
		return false, errors.Join(err, r.fail(err.Error()))
	}
	child, err := launch.Start(launch.Program{Path: r.path, Args: args, Env: environment(), Stdout: pipes.Stdout, Stderr: pipes.Stderr, Grace: r.stop})
	pipes.CloseWriters()
	if err != nil {
		pipes.Wait(outputLimit)
		err = fmt.Errorf("the command cannot be started: %w", err)
		return false, errors.Join(err, r.fail(err.Error()))
	}
	r.log.Debug("started", "pid", child.PID, "after_ms", ms(time.Since(began)))
	end := sync.OnceFunc(func() { r.gone(child, pipes) })
	defer end()
	ready := r.await(child.Ended())
	if ready {
		if err := r.serve(began); err != nil {
			child.Stop()
			return false, errors.Join(err, r.fail(err.Error()))
		}
		select {
		case <-r.ctx.Done():
		case <-child.Ended():
		case err := <-r.server.failed:
			r.server.failed <- err
			r.log.Error("serving failed", "error", err)
		}
	}
	if r.ctx.Err() == nil && over(child.Ended()) {
		if !ready && try == 1 && r.choosePort && r.clash(child, end) {
			r.log.Warn("the command ended before it was ready, and another process has its port now: it is started once more, with another port",
				"port", r.upstream.Port(), "exit_code", child.Code())
			return true, nil
		}
		err = r.died(child.Code(), ready)
	} else {
		err = r.server.drain(r.drain)
		child.Stop()
	}
	end()
	if err == nil {
		r.log.Info("stopped", "exit_code", child.Code())
		err = asError(child.Code())
	}
	return false, err
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// over reports whether a channel is closed.
func over(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// clash reports whether a child ended because its port was not free: when all that may have held it is gone, it is not yet.
func (r *runner) clash(child *launch.Child, end func()) bool {
	end()
	return over(child.Gone()) && child.Trouble() == nil && launch.PortTaken(r.address())
}

// await waits until vLLM is healthy. It is not when the command or the context ended before.
func (r *runner) await(ended <-chan struct{}) bool {
	e := newEngine(&r.settings)
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		healthy := make(chan bool, 1)
		go func() { healthy <- e.healthy(ctx) }()
		select {
		case <-ended:
			return false
		case <-ctx.Done():
			return false
		case ok := <-healthy:
			if ok && !over(ended) {
				return true
			}
		}
		select {
		case <-ended:
			return false
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}

// serve lets requests through.
func (r *runner) serve(began time.Time) error {
	p, err := r.proxy(r.collectors, r.log)
	if err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(r.ctx, learnLimit)
	defer cancel()
	p.AwaitUpstream(limit)
	r.gate.open(p)
	r.log.Info("vLLM is ready", "upstream", r.upstream.Redacted(), "after_s", time.Since(began).Round(time.Millisecond).Seconds())
	return nil
}

// died ends all answers after the command ended by itself.
func (r *runner) died(code int, ready bool) error {
	why := asErrorText(code)
	hint := "its output says why"
	if !ready {
		hint = "it was not ready yet; its output says why"
	}
	r.gate.end(why)
	r.log.Error(why+": "+hint, "in_flight", r.gate.Open())
	if err := r.server.stop(breakLimit, "answers were cut off: vLLM is gone"); err != nil {
		return err
	}
	if code == 0 {
		return nil
	}
	return exitCode(code)
}

func asErrorText(code int) string {
	if code > 128 && code < 128+65 {
		return fmt.Sprintf("the command was ended by signal %d", code-128)
	}
	return exitCode(code).Error()
}

// fail ends the server because of something that is told otherwise.
func (r *runner) fail(why string) error {
	r.gate.end(why)
	return r.server.stop(breakLimit, "answers were cut off")
}

// gone waits until nothing of the child is left, and all its output is passed on.
func (r *runner) gone(child *launch.Child, pipes *launch.Pipes) {
	select {
	case <-child.Gone():
		if err := child.Trouble(); err != nil {
			r.log.Warn("the command's end: " + err.Error())
		}
	case <-time.After(r.stop + goneLimit):
		r.log.Warn("some of the command's processes do not end, although they were killed")
	}
	pipes.Wait(outputLimit)
}

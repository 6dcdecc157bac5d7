package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

const usage = `Usage: go run ./internal/bench [flags]

Measures the sidecar beside a plain reverse proxy and prints a table. It exits
with 1 where a target was missed or an answer was lost.

With --peers other proxies are measured too: nginx (Debian: nginx), llama-swap
(the binary at $LLAMA_SWAP or ../shared/bin/llama-swap), and the LiteLLM proxy
if $LITELLM is its program (internal/bench/litellm-env.sh installs one).

`

// run returns the exit code: 1 where something was lost or a target was missed, 2 for a wrong flag.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		if code, ok := part(args, stderr); ok {
			return code
		}
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { fmt.Fprint(stderr, usage); flags.PrintDefaults() }
	var o options
	flags.BoolVar(&o.short, "short", false, "about a minute: shows that everything works and nothing is lost; times are not judged")
	flags.IntVar(&o.repetitions, "reps", 0, "repetitions (6; 1 with --short)")
	flags.BoolVar(&o.peers, "peers", false, "beside other proxies too, and with each source; about 35 minutes")
	flags.BoolVar(&o.together, "together", false, "give a job to all contenders at once, not one after another: shows small differences, as all have the same neighbours, but not what one costs alone")
	among := flags.String("among", "", "regular expression for the contenders to compare")
	only := flags.String("only", "", "regular expression for the workloads to run")
	flags.StringVar(&o.profile, "profile", "", "folder for CPU and heap profiles of both proxies, a variant of the sidecar within this program among them")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	var err error
	if o.only, err = regexp.Compile(*only); err != nil {
		fmt.Fprintln(stderr, "bench: --only:", err)
		return 2
	}
	if o.among, err = regexp.Compile(*among); err != nil {
		fmt.Fprintln(stderr, "bench: --among:", err)
		return 2
	}
	if o.peers && (o.profile != "" || o.together) {
		fmt.Fprintln(stderr, "bench: --profile and --together are not for --peers")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ok, err := compare(ctx, o, args, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	if !ok {
		return 1
	}
	return 0
}

// part runs as a part of the bench, if args name one.
func part(args []string, stderr io.Writer) (code int, ok bool) {
	var err error
	switch {
	case args[0] == "load" && len(args) == 1:
		return runLoad(), true
	case args[0] == "upstream" && len(args) == 2:
		var l net.Listener
		if l, err = net.Listen("tcp", args[1]); err == nil {
			err = (&upstream{groups: map[string]*group{}}).serve(l)
		}
	case args[0] == "plain" && len(args) == 3:
		err = plainMain(args[1], args[2])
	case args[0] == "profiled" && len(args) == 5:
		err = profiledMain(args[1], args[2], args[3], args[4])
	default:
		return 0, false
	}
	fmt.Fprintf(stderr, "bench %s: %v\n", args[0], err)
	return 1, true
}

type options struct {
	short       bool
	peers       bool
	together    bool
	among       *regexp.Regexp
	repetitions int
	only        *regexp.Regexp
	profile     string
}

// bench is one run.
type bench struct {
	options
	self     string // this program
	upstream *process
	runs     atomic.Int64
	again    int // how many more samples may be measured again
	repeated int // were
	progress io.Writer
}

// compare does everything and reports whether all is as it must be.
func compare(ctx context.Context, o options, args []string, stdout, stderr io.Writer) (ok bool, err error) {
	b := &bench{options: o, progress: stderr}
	if b.self, err = os.Executable(); err != nil {
		return false, err
	}
	if b.repetitions == 0 {
		if b.repetitions = 6; b.short {
			b.repetitions = 1
		}
	}
	if err := raiseFiles(); err != nil {
		return false, fmt.Errorf("open files: %w", err)
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	binary, err := stack.BuildSidecar(ctx, dir)
	if err != nil {
		return false, err
	}
	b.upstream, err = start(ctx, fixed(b.self, "upstream", listenArg), "")
	if err != nil {
		return false, err
	}
	defer b.upstream.stop()
	list, loads := contenders(b.self, binary), workloads(b.short)
	switch {
	case b.profile != "":
		if err := os.MkdirAll(b.profile, 0o755); err != nil {
			return false, err
		}
		list = profiled(b.self, b.profile)
	case b.peers:
		if list, err = peers(b.self, binary, !b.short); err != nil {
			return false, err
		}
		loads = peerWorkloads(b.short)
	}
	list = slices.DeleteFunc(list, func(c contender) bool { return !b.among.MatchString(c.name) })
	loads = slices.DeleteFunc(loads, func(w workload) bool { return !b.only.MatchString(w.name) })
	if !b.short {
		b.again = len(list) * len(loads) * b.repetitions / 4 // a busy machine does not make it endless
	}
	var measured []measurement
	for _, w := range loads {
		m, err := b.repeat(ctx, w, list)
		if err != nil {
			return false, fmt.Errorf("%s: %w", w.name, err)
		}
		measured = append(measured, m)
	}
	t := newTable(measured, list, !b.short && b.profile == "")
	if b.peers {
		t.repeated = b.repeated
		t.writePeers(stdout, args)
	} else {
		t.write(stdout, args)
	}
	return t.ok(), nil
}

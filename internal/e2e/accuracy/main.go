//go:build unix

// Command accuracy measures how well the sidecar's `timings` agree with what vLLM itself says about the same requests.
//
// It runs a real vLLM with per-request metrics on, puts sidecars before it that may not use those but leave them in the
// answers (--keep-metrics), sends requests at several concurrencies, and compares the two in each answer. It prints a
// Markdown table and exits with 1 if a figure that is not marked `estimated` is off by more than 0.01 ms or one token.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

type options struct {
	VLLM        string   `name:"vllm" placeholder:"URL" help:"Use this vLLM (it needs ${exact_flags}) instead of starting one."`
	Sources     []string `default:"window,observed" help:"Sources to measure, each alone."`
	Concurrency []int    `default:"1,4,16,64" help:"Numbers of requests at the same time."`
	Direct      []int    `default:"1,16" help:"Those to measure again with one client more that talks to vLLM directly (source window)."`
	Hidden      []int    `default:"16" help:"Those to measure again with a vLLM whose usage does not tell cached tokens (source window)."`
	Lengths     string   `default:"short,realistic" help:"Completion lengths: short (4 to 120 tokens), realistic (200 to 600), or both."`
	Answers     []string `default:"streamed,JSON" enum:"streamed,JSON" help:"Kinds of answers to measure (observed has none of JSON)."`
	Requests    int      `default:"200" help:"Requests per row of the table; at least 2 and at most 40 times as many as at the same time."`
	Short       bool     `help:"Short lengths and few requests, to see that all is well."`
	Seed        uint64   `default:"1" help:"Makes the same requests again."`
	Logs        string   `placeholder:"DIR" help:"Keep the logs of all programs here."`
}

// complete applies what one flag says about others, and checks.
func (o *options) complete() error {
	if o.Short {
		o.Lengths, o.Requests = "short", min(o.Requests, 12)
		o.Concurrency, o.Direct, o.Hidden = []int{1, 16}, []int{4}, []int{4}
	}
	for _, name := range strings.Split(o.Lengths, ",") {
		if _, ok := lengths[name]; !ok {
			return fmt.Errorf("--lengths: %q is neither short nor realistic", name)
		}
	}
	for _, c := range slices.Concat(o.Concurrency, o.Direct, o.Hidden) {
		if c < 1 {
			return fmt.Errorf("--concurrency: %d requests at the same time make no load", c)
		}
	}
	if o.Requests < 1 {
		return fmt.Errorf("--requests: %d is nothing to measure", o.Requests)
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	parser, err := kong.New(&o, kong.Name("accuracy"), kong.Writers(stdout, stderr),
		kong.Vars{"exact_flags": strings.Join(stack.ExactFlags, " ")},
		kong.Description("Compares the sidecar's timings with vLLM's own figures."))
	if err == nil {
		_, err = parser.Parse(args)
	}
	if err == nil {
		err = o.complete()
	}
	if err != nil {
		fmt.Fprintln(stderr, "accuracy:", err)
		return 2
	}
	ok, err := measure(ctx, o, args, stdout, stderr)
	switch {
	case err != nil:
		fmt.Fprintln(stderr, "accuracy:", err)
		return 1
	case !ok:
		fmt.Fprintln(stderr, "accuracy: a figure that is not marked as an estimate is wrong, or an answer came back without its parts; see above")
		return 1
	}
	return 0
}

// measure does it all, and reports whether every figure that claims to be exact is.
func measure(ctx context.Context, o options, args []string, stdout, stderr io.Writer) (ok bool, err error) {
	logs := o.Logs
	if logs == "" {
		if logs, err = os.MkdirTemp("", "vllm-timings-accuracy-"); err != nil {
			return false, err
		}
		defer func() { _ = os.RemoveAll(logs) }()
	} else if err := os.MkdirAll(logs, 0o755); err != nil {
		return false, err
	}
	bin, err := stack.BuildSidecar(ctx, logs)
	if err != nil {
		return false, err
	}
	url := o.VLLM
	if url == "" {
		vllm, err := startVLLM(ctx, logs, stderr)
		if err != nil {
			return false, err
		}
		defer vllm.Stop()
		url = vllm.URL
	}
	version, err := vllmVersion(ctx, url)
	if err != nil {
		return false, err
	}
	if err := warmUp(ctx, url); err != nil {
		return false, err
	}

	fmt.Fprintf(stdout, "    go run ./internal/e2e/accuracy %s\n\n", strings.Join(args, " "))
	fmt.Fprintf(stdout, "%s, vLLM %s (CPU, tiny random model), %d requests a row.\n\n", time.Now().UTC().Format(time.DateOnly), version, o.Requests)
	fmt.Fprint(stdout, tableHead)
	relay, err := startRelay(url)
	if err != nil {
		return false, err
	}
	defer relay.Close()
	ok = true
	for i, r := range o.rows() {
		upstream := url
		if r.hidden {
			upstream = relay.URL
		}
		fmt.Fprintf(stderr, "accuracy: %s\n", r)
		// A sidecar of its own, that has learnt nothing from the row before.
		sidecar, err := stack.StartSidecar(ctx, bin, logs, fmt.Sprintf("sidecar-%d", i+1), upstream,
			"--sources", r.source, "--keep-metrics", "--log-level", "warn")
		if err != nil {
			return false, err
		}
		s, err := r.measure(ctx, o, uint64(i+1), sidecar.URL, url)
		sidecar.Stop()
		if err != nil {
			return false, fmt.Errorf("%s: %w\nthe end of the sidecar's log:\n%s", r, err, sidecar.Tail(2000))
		}
		fmt.Fprint(stdout, s.row(r))
		ok = ok && s.correct()
	}
	fmt.Fprintln(stdout)
	fmt.Fprint(stdout, tableNotes)
	return ok, nil
}

func startVLLM(ctx context.Context, logs string, stderr io.Writer) (*stack.VLLM, error) {
	executable, err := stack.InstallVLLM(ctx, os.Getenv("VLLM_VERSION"))
	if err != nil {
		return nil, err
	}
	port, err := stack.FreePort()
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(stderr, "accuracy: starting vLLM, which takes a minute or two")
	return stack.StartVLLM(ctx, stack.Setup{Executable: executable, Logs: logs, Name: "vllm", Port: port, Flags: stack.ExactFlags})
}

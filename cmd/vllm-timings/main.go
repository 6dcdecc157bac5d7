// Command vllm-timings is a reverse proxy between llama-swap and vLLM that adds llama.cpp's `timings` to answers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // it could not do its work
	exitUsage  = 2 // the command line is wrong
)

type cli struct {
	Serve       serveCmd       `cmd:"" help:"Serve as a proxy before vLLM."`
	Run         runCmd         `cmd:"" help:"Start vLLM, and serve as a proxy before it."`
	Sleep       sleepCmd       `cmd:"" help:"Put a vLLM with sleep mode to sleep, as llama-swap's cmdStop."`
	Doctor      doctorCmd      `cmd:"" help:"Say what was found at vLLM's address, which numbers are exact, and what would make more of them so."`
	Patch       patchCmd       `cmd:"" help:"Patch the source of vLLM, so that it makes timings itself."`
	Healthcheck healthcheckCmd `cmd:"" help:"Exit with 0 if a vllm-timings answers, with 1 if not."`
	Version     versionCmd     `cmd:"" help:"Print version, commit and date."`
}

// envPrefix is before the name of each flag's environment variable.
const envPrefix = "VLLM_TIMINGS"

// env is what commands get besides their flags.
type env struct {
	ctx            context.Context
	stdout, stderr io.Writer
}

// checker is a command that can say what is wrong with its flags without doing anything.
type checker interface{ check() error }

func main() {
	// net/http writes there what came behind an answer, and that may be another's. Everything else has the logger that it is given.
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		// Before anything is said of the first signal: the second ends the process at once, as if nobody had listened for it.
		signal.Stop(signals)
		cancel()
	}()
	os.Exit(Main(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// Main runs a command line without the program's name until it is done or ctx ends, and returns the exit code:
// 0 done, 1 failed, 2 the command line is wrong.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	switch {
	case len(args) == 0:
		args = []string{"--help"}
	case slices.Equal(args, []string{"--version"}):
		args = []string{"version"}
	}
	l, err := parse(args, stdout, stderr)
	switch {
	case err != nil:
		complain(stderr, err)
		return exitFailed
	case l.exited >= 0: // --help
		return l.exited
	case len(l.wrong) == 0:
		err = l.context.Run(&env{ctx, stdout, stderr})
	default:
		err = &usageError{errors.Join(l.wrong...)}
	}
	if err == nil {
		return exitOK
	}
	if code := exitCode(0); errors.As(err, &code) {
		return int(code)
	}
	complain(stderr, err)
	if !errors.As(err, new(*usageError)) {
		return exitFailed
	}
	fmt.Fprintf(stderr, "See %s --help.\n", strings.TrimSpace("vllm-timings "+l.command))
	return exitUsage
}

// line is a command line that was read.
type line struct {
	context *kong.Context
	command string  // "" where it could not be found out
	exited  int     // the exit code where kong has done all there was to do, else -1
	wrong   []error // with the command line
}

// parse reads a command line. Everything that is wrong with it is to be told at once, but kong ends at the first unknown
// flag: so that is taken out, and the rest is read again.
func parse(args []string, stdout, stderr io.Writer) (line, error) {
	l := line{exited: -1}
	for {
		parser, err := newParser(stdout, stderr, &l.exited)
		if err != nil {
			return l, err
		}
		l.context, err = parser.Parse(args)
		if l.exited >= 0 {
			return l, nil
		}
		var parseErr *kong.ParseError
		if l.context == nil && errors.As(err, &parseErr) {
			l.context = parseErr.Context
		}
		if l.context != nil && l.context.Selected() != nil {
			l.command = l.context.Selected().Name
		}
		if err == nil {
			break
		}
		l.wrong = append(l.wrong, err)
		rest := withoutUnknown(args, err, parser.Model)
		if rest == nil {
			return l, nil
		}
		args = rest
	}
	if len(l.wrong) > 0 {
		if c, ok := l.context.Selected().Target.Addr().Interface().(checker); ok {
			if err := c.check(); err != nil {
				l.wrong = append(l.wrong, err)
			}
		}
	}
	return l, nil
}

func newParser(stdout, stderr io.Writer, exited *int) (*kong.Kong, error) {
	return kong.New(&cli{},
		kong.Name("vllm-timings"),
		kong.Description("Adds llama.cpp's timings to the answers of vLLM. Exit codes: 0 done, 1 failed, 2 the command line is wrong."),
		kong.DefaultEnvars(envPrefix),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { *exited = code }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
}

// withoutUnknown returns args without the unknown flag that err is about and without what looks like its value; nil where
// err is about something else.
func withoutUnknown(args []string, err error, app *kong.Application) []string {
	var name string
	if _, scanErr := fmt.Sscanf(err.Error(), "unknown flag %s", &name); scanErr != nil {
		return nil
	}
	name = strings.TrimSuffix(name, ",") // "unknown flag --x, did you mean ..."
	for i, arg := range args {
		if arg == "--" {
			break
		}
		if arg != name && !strings.HasPrefix(arg, name+"=") {
			continue
		}
		end := i + 1
		isCommand := func(n *kong.Node) bool { return n.Name == args[end] }
		if arg == name && end < len(args) && !strings.HasPrefix(args[end], "-") && !slices.ContainsFunc(app.Children, isCommand) {
			end++
		}
		return slices.Delete(slices.Clone(args), i, end)
	}
	return nil
}

// complain writes an error, one line for each of those that are joined in it.
func complain(w io.Writer, err error) {
	for _, l := range strings.Split(err.Error(), "\n") {
		fmt.Fprintln(w, "vllm-timings:", l)
	}
}

// usageError is a command line that cannot be right.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

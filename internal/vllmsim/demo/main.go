// Command demo shows the sidecar without a vLLM: it starts a simulated one on
// a free port and then the given command with --upstream appended.
//
//	demo -- bin/vllm-timings serve
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

// defaultListen is where the sidecar listens when its arguments do not say.
const defaultListen = "127.0.0.1:8010"

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run returns the command's exit code; 2 without a command, 1 when something
// could not be started, and 128 + the signal when one ended the command.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(stderr, "usage: demo -- bin/vllm-timings serve [flags]")
		return 2
	}
	// Signals are kept from the start, so that none ends only this process.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	cfg := vllmsim.Default()
	server, err := vllmsim.Start(cfg)
	if err != nil {
		fmt.Fprintln(stderr, "demo:", err)
		return 1
	}
	defer server.Close()
	fmt.Fprintf(stdout, "Simulated vLLM %s listens on %s\n", cfg.Version, server.URL)
	fmt.Fprintf(stdout, "Try: curl -N http://%s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'\n",
		listenAddress(args), `{"model":"tiny","messages":[{"role":"user","content":"Tell me a story."}],"stream":true}`)

	cmd := exec.Command(args[0], append(args[1:len(args):len(args)], "--upstream", server.URL)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	// Ctrl-C reaches a whole process group. The command gets its signals from
	// here only: it would take a second one as "end at once".
	ownGroup(cmd)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(stderr, "demo:", err)
		return 1
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig)
		case err := <-ended:
			return exitCode(err, stderr)
		}
	}
}

func exitCode(err error, stderr io.Writer) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		fmt.Fprintln(stderr, "demo:", err)
		return 1
	}
	if code := exit.ExitCode(); code >= 0 {
		return code
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return 1
}

// listenAddress is where the sidecar will listen, in a form that curl takes.
func listenAddress(args []string) string {
	address := os.Getenv("VLLM_TIMINGS_LISTEN")
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, "--listen="); ok {
			address = v
		} else if a == "--listen" && i+1 < len(args) {
			address = args[i+1]
		}
	}
	if address == "" {
		return defaultListen
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

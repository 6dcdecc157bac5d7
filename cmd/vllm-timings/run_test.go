//go:build unix

package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

// TestRunWrong: all that is wrong with a command line is told at once, with what to write instead.
func TestRunWrong(t *testing.T) {
	for _, c := range []struct {
		args string
		env  map[string]string
		want []string
	}{
		{args: "run", want: []string{"there is no command: write it behind --, as in vllm-timings run -- vllm serve MODEL"}},
		{args: "run --", want: []string{"there is no command: write it behind --, as in vllm-timings run -- vllm serve MODEL"}},
		{args: "run -- /nowhere/vllm serve", want: []string{`the command cannot be run: exec: "/nowhere/vllm": stat /nowhere/vllm: no such file or directory`}},
		{args: "run -- no-such-vllm serve", want: []string{`the command cannot be run: exec: "no-such-vllm": executable file not found in $PATH`}},
		{args: "run -- sh serve --port x", want: []string{`--port "x" in the command: a port is a number from 1 to 65535`}},
		{args: "run -- sh serve --port=0", want: []string{`--port "0" in the command: a port is a number from 1 to 65535`}},
		{args: "run --listen 127.0.0.1:8000 -- sh serve --port 8000", want: []string{
			`--upstream: http://127.0.0.1:8000 is what --listen 127.0.0.1:8000 serves: each request would come back for ever. Give vLLM's address, or another port to --listen`}},
		{args: "run --sleep-mode -- sh serve", want: []string{`--sleep-mode: vLLM is found again by its address: give the command --port, or give --upstream`}},
		{
			args: "run --bogus --listen 1 --upstream x --sources y --native-metrics z --drain-timeout 1 --stop-timeout=-1s --sleep-level 3 --log-format w",
			env:  map[string]string{"VLLM_TIMINGS_SLEEP_MODE": "maybe"},
			want: []string{
				"unknown flag --bogus",
				`--listen: "1" has no host: write 127.0.0.1:1, or :1 for all interfaces`,
				`--upstream: "x" has no scheme: write http://x`,
				`--sources: unknown source "y": use some of upstream,native,window,observed`,
				`--native-metrics: "z" must be one of auto, on, off`,
				`--drain-timeout: "1" has no unit: write 1ms or 1s`,
				`--stop-timeout: "-1s" is too short: it must be at least 0s`,
				`--sleep-mode (from VLLM_TIMINGS_SLEEP_MODE): "maybe" is neither true nor false`,
				`--sleep-level: "3" must be one of 1, 2`,
				`--log-format: "w" must be one of text, json, llama`,
				"there is no command: write it behind --, as in vllm-timings run -- vllm serve MODEL",
			},
		},
		{args: "sleep --upstream x --level 0 --stop-pid $PID --upstream-ca /nowhere", want: []string{
			`--upstream: "x" has no scheme: write http://x`,
			`--upstream-ca: there is no file /nowhere`,
			`--level: "0" must be one of 1, 2`,
			`--stop-pid: "$PID" is no id of a process: write ${PID} in llama-swap's cmdStop`,
		}},
		{args: "sleep --stop-pid 1 --level=3", want: []string{
			`--level: "3" must be one of 1, 2`,
			`--stop-pid: "1" is no id of a process: write ${PID} in llama-swap's cmdStop`,
		}},
	} {
		t.Run(c.args, func(t *testing.T) {
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			code, stdout, stderr := run(strings.Fields(c.args)...)
			var want strings.Builder
			for _, line := range c.want {
				want.WriteString("vllm-timings: " + line + "\n")
			}
			command, _, _ := strings.Cut(c.args, " ")
			want.WriteString("See vllm-timings " + command + " --help.\n")
			if code != exitUsage || stdout != "" || stderr != want.String() {
				t.Errorf("exit code %d, %q, and\n%s\nwant\n%s", code, stdout, stderr, &want)
			}
		})
	}
}

// TestRunComplete: where the command's server listens, and what of the command is left as it is.
func TestRunComplete(t *testing.T) {
	for args, want := range map[string]string{
		"-- sh serve":                                     "http://127.0.0.1:0 true",
		"-- sh serve --host 0.0.0.0":                      "http://127.0.0.1:0 true",
		"-- sh serve --host=::":                           "http://[::1]:0 true",
		"-- sh serve --host 10.0.0.1 --port=9":            "http://10.0.0.1:9 false",
		"-- sh serve --port 9":                            "http://127.0.0.1:9 false",
		"-- sh serve --port 9 --ssl-certfile x":           "https://127.0.0.1:9 false",
		"-- sh serve --uds /run/v.sock":                   "unix:///run/v.sock false",
		"--upstream http://h:1 -- sh serve --port 9":      "http://h:1 false",
		"--sleep-mode --upstream http://h:1 -- sh --port": "http://h:1 false",
	} {
		c := new(cli)
		parser, err := kong.New(c, kong.Name("x"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parser.Parse(append([]string{"run"}, strings.Fields(args)...)); err != nil {
			t.Fatal(err)
		}
		s, err := c.Run.complete()
		_, command, _ := strings.Cut(args, "-- ")
		got := s.upstream.String() + " false"
		if s.choosePort {
			got = s.upstream.String() + " true"
		}
		if err != nil || got != want || !slices.Equal(s.command, strings.Fields(command)) || s.stop != 6*time.Second || s.drain != 2*time.Second {
			t.Errorf("%s: %s, %q, %v", args, got, s.command, err)
		}
	}
}

// TestRunHelp: --help says what is to be known.
func TestRunHelp(t *testing.T) {
	for args, want := range map[string]string{
		"run --help":   "--native-metrics=WHEN",
		"sleep --help": "llama-swap's ${PID}",
		"--help":       "Start vLLM, and serve as a proxy before it.",
	} {
		code, stdout, stderr := run(strings.Fields(args)...)
		if code != exitOK || stderr != "" || !strings.Contains(strings.Join(strings.Fields(stdout), " "), want) {
			t.Errorf("%s: exit code %d, %q\n%s", args, code, stderr, stdout)
		}
	}
}

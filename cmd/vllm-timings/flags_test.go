package main

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

func TestHelp(t *testing.T) {
	for args, want := range map[string]string{
		"":                   "Commands:\n  serve ",
		"--help":             "Exit codes: 0 done, 1 failed,\n2 the command line is wrong.",
		"-h":                 "Commands:\n  serve ",
		"serve --help":       "($VLLM_TIMINGS_LISTEN)",
		"healthcheck --help": "($VLLM_TIMINGS_HEALTHCHECK_URL)",
		"version --help":     "Print version, commit and date.",
	} {
		code, stdout, stderr := run(strings.Fields(args)...)
		if code != exitOK || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("%q: exit code %d, %q, without %q:\n%s", args, code, stderr, want, stdout)
		}
	}
}

// TestWrong: all that is wrong with a command line is told at once, with what to write instead.
func TestWrong(t *testing.T) {
	for _, c := range []struct {
		args string
		env  map[string]string
		want []string
	}{
		{args: "serve --upstream vllm:8000", want: []string{`--upstream: "vllm:8000" has no scheme: write http://vllm:8000`}},
		{args: "serve --upstream localhost", want: []string{`--upstream: "localhost" has no scheme: write http://localhost`}},
		{args: "serve --upstream=", want: []string{`--upstream: is empty: write http://127.0.0.1:8000`}},
		{args: "serve --upstream tcp://x:1", want: []string{`--upstream: "tcp://x:1": the scheme must be http, https or unix`}},
		{args: "serve --upstream http://:8000", want: []string{`--upstream: "http://:8000" has no host`}},
		{args: "serve --upstream http://x:80000", want: []string{`--upstream: "http://x:80000": a port is a number from 1 to 65535`}},
		{args: "serve --upstream http://a:b@x/?q", want: []string{`--upstream: "http://a:xxxxx@x/?q" must have no query and no fragment`}},
		{args: "serve --upstream http://a:secret@x:y", want: []string{`--upstream: is no URL: invalid port ":y" after host`}},
		{args: "serve --upstream http://localhost:8010/ --listen :8010", want: []string{
			`--upstream: http://localhost:8010/ is what --listen :8010 serves: each request would come back for ever. Give vLLM's address, or another port to --listen`}},
		{args: "serve --upstream unix:run/vllm.sock", want: []string{`--upstream: needs the absolute path of a socket behind unix://: write unix:///run/vllm.sock`}},
		{args: "serve --upstream unix://run/vllm.sock", want: []string{`--upstream: needs the absolute path of a socket behind unix://: write unix:///run/vllm.sock`}},
		{args: "serve --upstream UNIX:///run/", want: []string{`--upstream: needs the absolute path of a socket behind unix://: write unix:///run/vllm.sock`}},
		{args: "serve --upstream https://x --upstream-ca /nowhere", want: []string{`--upstream-ca: there is no file /nowhere`}},
		{args: "serve --upstream https://x --upstream-ca /", want: []string{`--upstream-ca: / cannot be read: is a directory`}},
		{args: "serve --upstream https://x --upstream-ca flags.go", want: []string{`--upstream-ca: flags.go has no certificate in PEM form, which begins with -----BEGIN CERTIFICATE-----`}},
		{args: "serve --upstream-ca testdata/ca.pem", want: []string{`--upstream-ca: the upstream http://127.0.0.1:8000 has no TLS: begin it with https://, or leave this out`}},
		{args: "serve --upstream unix:///x --upstream-ca testdata/ca.pem", want: []string{`--upstream-ca: the upstream unix:///x has no TLS: begin it with https://, or leave this out`}},
		{args: "serve --upstream-api-key-file /nowhere", want: []string{`--upstream-api-key-file: there is no file /nowhere`}},
		{args: "serve --upstream-api-key-file /dev/null", want: []string{`--upstream-api-key-file: /dev/null has no key in it`}},
		{args: "serve --upstream-api-key-file testdata/ca.pem", want: []string{`--upstream-api-key-file: testdata/ca.pem must have one key and nothing else: a key has no spaces and no line ends`}},
		{args: "serve --upstream-api-key=secret --upstream-api-key-file flags.go", want: []string{`--upstream-api-key-file: there is --upstream-api-key too: give one of them`}},
		{args: "serve --upstream-api-key-file flags.go", env: map[string]string{"VLLM_TIMINGS_UPSTREAM_API_KEY": "secret"}, want: []string{
			`--upstream-api-key-file: there is --upstream-api-key too: give one of them`}},
		{args: "serve", env: map[string]string{"VLLM_TIMINGS_UPSTREAM_API_KEY": "secret one"}, want: []string{
			`--upstream-api-key (from VLLM_TIMINGS_UPSTREAM_API_KEY): a key has no spaces and no line ends`}},
		{args: "serve --upstream-api-keys=secret", want: []string{`unknown flag --upstream-api-keys`}},
		{args: "serve --upstream-api-kee secret", want: []string{`unknown flag --upstream-api-kee`}},
		{args: "serve --listen 8010", want: []string{`--listen: "8010" has no host: write 127.0.0.1:8010, or :8010 for all interfaces`}},
		{args: "serve --listen localhost", want: []string{`--listen: "localhost" is not host:port: write 127.0.0.1:8010, or :8010 for all interfaces`}},
		{args: "serve --listen ::1", want: []string{`--listen: "::1" is not host:port: write an IPv6 address like [::1]:8010`}},
		{args: "serve --listen 127.0.0.1:", want: []string{`--listen: "127.0.0.1:" has no port: write 127.0.0.1:8010, or :8010 for all interfaces`}},
		{args: "serve --listen :70000", want: []string{`--listen: ":70000": a port is a number from 0 (a free one) to 65535`}},
		{args: "serve --listen http://:8010", want: []string{`--listen: "http://:8010" is a URL: write only host:port, or :port for all interfaces`}},
		{args: "serve --metrics-deadline 250", want: []string{`--metrics-deadline: "250" has no unit: write 250ms or 250s`}},
		{args: "serve --lissten :1", want: []string{`unknown flag --lissten, did you mean "--listen"?`}},
		{args: "serve --listen", want: []string{`--listen: expected string value but got "EOL" (<EOL>)`}},
		{args: "serve more", want: []string{`unexpected argument more`}},
		{args: "srve", want: []string{`unexpected argument srve, did you mean "serve"?`}},
		{args: "--bogus serve --log-level=x", want: []string{`unknown flag --bogus`, `--log-level: "x" must be one of debug, info, warn, error`}},
		{args: "healthcheck --url x --timeout 0", want: []string{`--url: "x" is no URL like http://127.0.0.1:8010/-/healthy`, `--timeout: "0" is too short: it must be at least 1ms`}},
		{args: "healthcheck", env: map[string]string{"VLLM_TIMINGS_LISTEN": "x"}, want: []string{
			`--listen (from VLLM_TIMINGS_LISTEN): "x" is not host:port: write 127.0.0.1:8010, or :8010 for all interfaces`}},
		{args: "version --short", want: []string{`unknown flag --short`}},
		{
			args: "serve --max-request-bytes 9223372036854775807 --max-event-bytes 9223372036854775807 --max-header-bytes 9223372036854775807",
			want: []string{
				`--max-request-bytes: 9223372036854775807 is too much: it may be at most 1125899906842624`,
				`--max-event-bytes: 9223372036854775807 is too much: it may be at most 1125899906842624`,
				`--max-header-bytes: 9223372036854775807 is too much: it may be at most 1125899906842624`,
			},
		},
		{
			args: "serve --bogus 5 --upstream vllm:8000 --listen 8010 --sources window,magic --metrics-deadline x --keep-metrics=maybe --other=1 " +
				"--usage never --max-request-bytes 0 --max-event-bytes 1 --max-header-bytes 9 --header-timeout 0 --max-concurrent-requests=-1 --drain-timeout=-1s --log-level loud",
			env: map[string]string{"VLLM_TIMINGS_LOG_FORMAT": "xml", "VLLM_TIMINGS_USAGE": "auto"},
			want: []string{
				`unknown flag --bogus`,
				`unknown flag --other`,
				`--listen: "8010" has no host: write 127.0.0.1:8010, or :8010 for all interfaces`,
				`--upstream: "vllm:8000" has no scheme: write http://vllm:8000`,
				`--sources: unknown source "magic": use some of upstream,native,window,observed`,
				`--metrics-deadline: "x" is no time: write 250ms, 30s or 2m`,
				`--keep-metrics: "maybe" is neither true nor false`,
				`--usage: "never" must be one of auto, always`,
				`--max-request-bytes: 0 is too little: it must be at least 1`,
				`--max-event-bytes: 1 is too little: it must be at least 16777216`,
				`--max-header-bytes: 9 is too little: it must be at least 4096`,
				`--header-timeout: "0" is too short: it must be at least 1ms`,
				`--max-concurrent-requests: "-1" is no number from 0 to 2147483647`,
				`--drain-timeout: "-1s" is too short: it must be at least 0s`,
				`--log-level: "loud" must be one of debug, info, warn, error`,
				`--log-format (from VLLM_TIMINGS_LOG_FORMAT): "xml" must be one of text, json, llama`,
			},
		},
	} {
		t.Run(c.args, func(t *testing.T) {
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			code, stdout, stderr := run(strings.Fields(c.args)...)
			lines := strings.Split(strings.TrimSuffix(stderr, "\n"), "\n")
			see := lines[len(lines)-1]
			for i := range lines {
				lines[i] = strings.TrimPrefix(lines[i], "vllm-timings: ")
			}
			lines = lines[:len(lines)-1]
			if strings.HasPrefix(c.args, "--bogus") { // what kong offers instead is its own business
				lines[0], _, _ = strings.Cut(lines[0], ",")
			}
			for i := range lines {
				if strings.HasPrefix(lines[i], "unknown flag") && len(c.want) > i && !strings.Contains(c.want[i], ",") {
					lines[i], _, _ = strings.Cut(lines[i], ",")
				}
			}
			if code != exitUsage || stdout != "" || !slices.Equal(lines, c.want) {
				t.Errorf("exit code %d, %q, and\n%s\nwant\n%s", code, stdout, strings.Join(lines, "\n"), strings.Join(c.want, "\n"))
			}
			if !regexp.MustCompile(`^See vllm-timings (serve |healthcheck |version )?--help\.$`).MatchString(see) {
				t.Errorf("the last line is %q", see)
			}
			if strings.Contains(stderr, "secret") {
				t.Error("a password is shown")
			}
		})
	}
}

func TestComplete(t *testing.T) {
	for args, check := range map[string]func(*settings) bool{
		"": func(s *settings) bool {
			return !s.keepMetrics && !s.usageAlways && s.drain == 30*time.Second && s.logFormat == "text" &&
				s.maxHeader == 1<<20 && s.headerTime == 30*time.Second && s.maxRequests == 0
		},
		"--max-header-bytes 5000 --header-timeout=9s --max-concurrent-requests 7": func(s *settings) bool {
			return s.maxHeader == 5000 && s.headerTime == 9*time.Second && s.maxRequests == 7
		},
		"--keep-metrics":                     func(s *settings) bool { return s.keepMetrics },
		"--keep-metrics=false":               func(s *settings) bool { return !s.keepMetrics },
		"--usage Always --log-level WARN":    func(s *settings) bool { return s.usageAlways && s.logLevel == 4 },
		"--drain-timeout 0 --listen :http":   func(s *settings) bool { return s.drain == 0 },
		"--upstream https://h/a/ ":           func(s *settings) bool { return s.upstream.String() == "https://h/a/" },
		"--upstream unix:///run/a?#%2f":      func(s *settings) bool { return s.upstream.Scheme == "unix" && s.upstream.Path == "/run/a?#%2f" },
		"--upstream-api-key a.b-c ":          func(s *settings) bool { return s.key == "a.b-c" && s.cas == nil },
		"--upstream http://[::1]:8010":       func(s *settings) bool { return s.upstream.Hostname() == "::1" },
		"--sources window --log-format=json": func(s *settings) bool { return s.sources.String() == "window" && s.logFormat == "json" },
	} {
		c := new(cli)
		parser, err := kong.New(c, kong.Name("x"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parser.Parse(append([]string{"serve"}, strings.Fields(args)...)); err != nil {
			t.Fatal(err)
		}
		if s, err := c.Serve.complete(); err != nil || !check(&s) {
			t.Errorf("%s: %+v, %v", args, s, err)
		}
	}
}

func TestIsSelf(t *testing.T) {
	for _, c := range []struct {
		upstream, host string
		want           bool
	}{
		{"http://127.0.0.1:8010", "127.0.0.1", true},
		{"http://127.0.0.1:8010", "", true},
		{"http://localhost:8010", "0.0.0.0", true},
		{"http://[::1]:8010", "::", true},
		{"http://[::1]:8010", "127.0.0.1", false},
		{"http://127.0.0.2:8010", "127.0.0.1", false},
		{"http://127.0.0.1:8000", "127.0.0.1", false},
		{"https://127.0.0.1:8010", "127.0.0.1", false},
		{"http://vllm:8010", "", false},
		{"http://vllm:8010", "vllm", true},
	} {
		u, err := url.Parse(c.upstream)
		if err != nil {
			t.Fatal(err)
		}
		if got := isSelf(u, c.host, 8010); got != c.want {
			t.Errorf("%s at %q: %v", c.upstream, c.host, got)
		}
	}
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"strconv"
	"time"
)

// Set by the linker where the build has no version control information, as in the container image.
var version, commit, date string

type versionInfo struct{ version, commit, date, goVersion string }

// buildVersion returns what the linker set, else what Go recorded of the build.
func buildVersion() versionInfo {
	v := versionInfo{version: version, commit: commit, date: date}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.goVersion = info.GoVersion
	dirty := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.commit = cmp.Or(v.commit, s.Value)
		case "vcs.time":
			v.date = cmp.Or(v.date, s.Value)
		case "vcs.modified":
			dirty = s.Value == "true"
		}
	}
	v.version = cmp.Or(v.version, info.Main.Version, "(devel)")
	if dirty && commit == "" && v.commit != "" {
		v.commit += "+changes"
	}
	return v
}

type versionCmd struct{}

// Run prints one line.
func (versionCmd) Run(e *env) error {
	v := buildVersion()
	_, err := fmt.Fprintf(e.stdout, "vllm-timings %s, commit %s, %s, %s\n", v.version, cmp.Or(v.commit, "unknown"), cmp.Or(v.date, "date unknown"), v.goVersion)
	return err
}

type healthcheckCmd struct {
	URL     string `name:"url" env:"VLLM_TIMINGS_HEALTHCHECK_URL" placeholder:"URL" help:"What must answer with 200. Default: /-/healthy at the address of VLLM_TIMINGS_LISTEN, else of serve's default."`
	Timeout string `env:"VLLM_TIMINGS_HEALTHCHECK_TIMEOUT" default:"3s" placeholder:"TIME" help:"How long it may take. Default ${default}."`
}

// complete reads all flags and reports all that is wrong with them at once.
func (c *healthcheckCmd) complete() (target string, timeout time.Duration, err error) {
	var wrong problems
	target = c.URL
	if target == "" {
		listen := cmp.Or(os.Getenv(envName("listen")), "127.0.0.1:8010")
		host, port, err := parseListen(listen)
		if err != nil {
			wrong.add("listen", listen, err)
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		target = "http://" + net.JoinHostPort(host, strconv.Itoa(port)) + "/-/healthy"
	} else if u, err := url.Parse(target); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		wrong.add("url", c.URL, fmt.Errorf("%q is no URL like http://127.0.0.1:8010/-/healthy", c.URL))
	}
	timeout, err = parseDuration(c.Timeout, time.Millisecond)
	wrong.add("timeout", c.Timeout, err)
	return target, timeout, wrong.err()
}

// check implements checker.
func (c *healthcheckCmd) check() error {
	_, _, err := c.complete()
	return err
}

// Run asks once.
func (c *healthcheckCmd) Run(e *env) error {
	target, timeout, err := c.complete()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	// Straight to the address, whatever proxy the environment has.
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s did not answer in %s", target, timeout)
	case err != nil:
		return fmt.Errorf("%s does not answer: %w", target, err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers with status %s, not 200", target, resp.Status)
	}
	return nil
}

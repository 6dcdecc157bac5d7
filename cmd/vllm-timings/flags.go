package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// Flags are texts for kong, which gives up at the first value that it cannot read. They are read here, all of them.

// problems collects what is wrong with flags.
type problems []error

// add notes an error of a flag with that value, and says so where the value came from the environment.
func (p *problems) add(flag, value string, err error) {
	if err == nil {
		return
	}
	name := "--" + flag
	if v, ok := os.LookupEnv(envName(flag)); ok && v == value {
		name += " (from " + envName(flag) + ")"
	}
	*p = append(*p, fmt.Errorf("%s: %w", name, err))
}

// err returns all of them as one.
func (p problems) err() error {
	if len(p) == 0 {
		return nil
	}
	return &usageError{errors.Join(p...)}
}

// envName is the environment variable of a flag.
func envName(flag string) string {
	return envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// toggle is a flag without a value, but --flag=false and an environment variable can be had too.
type toggle string

// IsBool implements kong.BoolMapperValue.
func (toggle) IsBool() bool { return true }

// Decode implements kong.MapperValue.
func (t *toggle) Decode(ctx *kong.DecodeContext) error {
	*t = "true"
	if ctx.Scan.Peek().Type == kong.FlagValueToken {
		*t = toggle(ctx.Scan.Pop().String())
	}
	return nil
}

func parseToggle(t toggle) (bool, error) {
	on, err := strconv.ParseBool(string(t))
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", string(t))
	}
	return on, nil
}

// parseDuration reads a duration of at least least.
func parseDuration(s string, least time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		if _, err := strconv.ParseFloat(s, 64); err == nil {
			return 0, fmt.Errorf("%q has no unit: write %sms or %ss", s, s, s)
		}
		return 0, fmt.Errorf("%q is no time: write 250ms, 30s or 2m", s)
	case d < least:
		return 0, fmt.Errorf("%q is too short: it must be at least %s", s, least)
	}
	return d, nil
}

// parseBytes reads a number of bytes of at least least.
func parseBytes(s string, least int64) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is no number of bytes", s)
	case n < least:
		return 0, fmt.Errorf("%s is too little: it must be at least %d", s, least)
	case n > mostBytes:
		return 0, fmt.Errorf("%s is too much: it may be at most %d", s, int64(mostBytes))
	}
	return n, nil
}

// mostBytes is more than any memory has, and something can be added to it.
const mostBytes = 1 << 50

// parseCount reads a number of at least 0.
func parseCount(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%q is no number from 0 to %d", s, math.MaxInt32)
	}
	return int(n), nil
}

// parseWord returns s if it is one of words.
func parseWord(s string, words ...string) (string, error) {
	for _, w := range words {
		if strings.EqualFold(s, w) {
			return w, nil
		}
	}
	return "", fmt.Errorf("%q must be one of %s", s, strings.Join(words, ", "))
}

func parseLevel(s string) (slog.Level, error) {
	word, err := parseWord(s, "debug", "info", "warn", "error")
	if err != nil {
		return 0, err
	}
	var l slog.Level
	return l, l.UnmarshalText([]byte(word))
}

// parseListen reads the address to serve at.
func parseListen(s string) (host string, port int, err error) {
	if strings.Contains(s, "://") {
		return "", 0, fmt.Errorf("%q is a URL: write only host:port, or :port for all interfaces", s)
	}
	host, service, err := net.SplitHostPort(s)
	if err != nil {
		if _, numeric := strconv.Atoi(s); numeric == nil {
			return "", 0, fmt.Errorf("%q has no host: write 127.0.0.1:%s, or :%s for all interfaces", s, s, s)
		}
		if _, ipErr := netip.ParseAddr(s); ipErr == nil || strings.Count(s, ":") > 1 {
			return "", 0, fmt.Errorf("%q is not host:port: write an IPv6 address like [::1]:8010", s)
		}
		return "", 0, fmt.Errorf("%q is not host:port: write 127.0.0.1:8010, or :8010 for all interfaces", s)
	}
	if service == "" {
		return "", 0, fmt.Errorf("%q has no port: write 127.0.0.1:8010, or :8010 for all interfaces", s)
	}
	port, err = net.LookupPort("tcp", service)
	if err != nil {
		return "", 0, fmt.Errorf("%q: a port is a number from 0 (a free one) to 65535", s)
	}
	return host, port, nil
}

// parseUpstream reads the address of vLLM. A unix socket is the path of a URL with that scheme.
func parseUpstream(s string) (*url.URL, error) {
	if s == "" {
		return nil, errors.New("is empty: write http://127.0.0.1:8000")
	}
	if scheme, path, _ := strings.Cut(s, ":"); strings.EqualFold(scheme, "unix") {
		return parseSocket(path)
	}
	if !strings.Contains(s, "://") {
		return nil, fmt.Errorf("%q has no scheme: write http://%s", s, strings.TrimLeft(s, "/"))
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		// The error quotes the URL, which may hold a password.
		var e *url.Error
		if errors.As(err, &e) {
			err = e.Err
		}
		return nil, fmt.Errorf("is no URL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("%q: the scheme must be http, https or unix", u.Redacted())
	case u.Hostname() == "":
		return nil, fmt.Errorf("%q has no host", u.Redacted())
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, fmt.Errorf("%q must have no query and no fragment", u.Redacted())
	}
	if port := u.Port(); port != "" {
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return nil, fmt.Errorf("%q: a port is a number from 1 to 65535", u.Redacted())
		}
	}
	return u, nil
}

// parseSocket reads what follows unix: as it stands. What a URL would escape may be in a path.
func parseSocket(s string) (*url.URL, error) {
	path, ok := strings.CutPrefix(s, "//")
	if !ok || !strings.HasPrefix(path, "/") || strings.HasSuffix(path, "/") {
		return nil, errors.New("needs the absolute path of a socket behind unix://: write unix:///run/vllm.sock")
	}
	return &url.URL{Scheme: "unix", Path: path}, nil
}

// readFile reads a file that a flag names.
func readFile(name string) ([]byte, error) {
	text, err := os.ReadFile(name)
	var pathErr *os.PathError
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("there is no file %s", name)
	case errors.As(err, &pathErr):
		return nil, fmt.Errorf("%s cannot be read: %w", name, pathErr.Err)
	}
	return text, err
}

// readCAs returns the system's certificate authorities and those in a file.
func readCAs(name string) (*x509.CertPool, error) {
	text, err := readFile(name)
	if err != nil {
		return nil, err
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("the system's certificates cannot be read: %w", err)
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM form, which begins with -----BEGIN CERTIFICATE-----", name)
	}
	return pool, nil
}

// parseKey reads a key. No error has any of it.
func parseKey(s string) (string, error) {
	key := strings.TrimSpace(s)
	if strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return "", errors.New("a key has no spaces and no line ends")
	}
	return key, nil
}

// readKey reads the key in a file.
func readKey(name string) (string, error) {
	text, err := readFile(name)
	if err != nil {
		return "", err
	}
	key, err := parseKey(string(text))
	switch {
	case err != nil:
		return "", fmt.Errorf("%s must have one key and nothing else: %w", name, err)
	case key == "":
		return "", fmt.Errorf("%s has no key in it", name)
	}
	return key, nil
}

// isSelf reports whether the upstream is the very address that is served: each request would go round for ever.
func isSelf(upstream *url.URL, host string, port int) bool {
	if upstream.Scheme != "http" || port == 0 || strconv.Itoa(port) != upstream.Port() {
		return false
	}
	if strings.EqualFold(host, upstream.Hostname()) {
		return true
	}
	local := func(host string) bool {
		ip, err := netip.ParseAddr(host)
		return host == "" || strings.EqualFold(host, "localhost") || err == nil && (ip.IsLoopback() || ip.IsUnspecified())
	}
	return local(host) && local(upstream.Hostname()) && (sameFamily(host, upstream.Hostname()))
}

// sameFamily reports whether two local hosts can be one: 127.0.0.1 and [::1] can not.
func sameFamily(a, b string) bool {
	x, errA := netip.ParseAddr(a)
	y, errB := netip.ParseAddr(b)
	if errA != nil || errB != nil || x.IsUnspecified() || y.IsUnspecified() {
		return true
	}
	return x == y
}

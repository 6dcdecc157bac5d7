package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

// engine asks a vLLM for its state, and puts it to sleep and wakes it up.
type engine struct {
	base      *url.URL
	name      string // for people
	key       string
	transport *http.Transport
}

func newEngine(s *settings) *engine {
	e := &engine{base: s.upstream, name: s.upstream.Redacted(), key: s.key, transport: &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: s.cas},
		DisableKeepAlives: true, // vLLM closes idle ones whenever it likes
	}}
	if s.upstream.Scheme == "unix" {
		e.base = &url.URL{Scheme: "http", Host: "localhost"}
		e.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.upstream.Path)
		}
	}
	return e
}

// errSilent: nothing answers.
var errSilent = errors.New("does not answer")

// do asks once, and returns status and body.
func (e *engine) do(ctx context.Context, method, path, query, body string) (int, string, error) {
	u := e.base.JoinPath(path)
	u.RawQuery = query
	req, err := http.NewRequestWithContext(ctx, method, u.String(), strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("User-Agent", "vllm-timings")
	if e.key != "" {
		req.Header.Set("Authorization", "Bearer "+e.key)
	} else if user := e.base.User; user != nil {
		password, _ := user.Password()
		req.SetBasicAuth(user.Username(), password)
	}
	resp, err := e.transport.RoundTrip(req)
	if err != nil {
		return 0, "", fmt.Errorf("vLLM at %s %w: %w", e.name, errSilent, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return 0, "", fmt.Errorf("vLLM at %s %w: %w", e.name, errSilent, err)
	}
	return resp.StatusCode, string(text), nil
}

// healthy reports whether /health answers with 200.
func (e *engine) healthy(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	status, _, err := e.do(ctx, http.MethodGet, "health", "", "")
	return err == nil && status == http.StatusOK
}

// refused says why vLLM did not do what it was asked for.
func (e *engine) refused(what string, status int, body string) error {
	switch status {
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		return fmt.Errorf("vLLM at %s has no %s: start it with VLLM_SERVER_DEV_MODE=1 in its environment, and with --enable-sleep-mode", e.name, what)
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("vLLM at %s wants a key for %s (status %d): give it with --upstream-api-key-file", e.name, what, status)
	}
	return fmt.Errorf("vLLM at %s fails at %s with status %d: is it started with --enable-sleep-mode? Its log says more. It answers: %.200s", e.name, what, status, body)
}

// sleeping reports whether vLLM is asleep.
func (e *engine) sleeping(ctx context.Context) (bool, error) {
	status, body, err := e.do(ctx, http.MethodGet, "is_sleeping", "", "")
	switch {
	case err != nil:
		return false, err
	case status != http.StatusOK:
		return false, e.refused("/is_sleeping", status, body)
	}
	return gjson.Get(body, "is_sleeping").Bool(), nil
}

// deep reports whether vLLM sleeps at level 2, which threw its weights away. Only its metrics tell.
func (e *engine) deep(ctx context.Context) bool {
	_, body, err := e.do(ctx, http.MethodGet, "metrics", "", "")
	if err != nil {
		return false
	}
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "vllm:engine_sleep_state{") && strings.Contains(line, `sleep_state="discard_all"`) && strings.HasSuffix(strings.TrimSpace(line), "} 1.0") {
			return true
		}
	}
	return false
}

// frees reports whether sleep would free memory: without --enable-sleep-mode vLLM may say that it sleeps, and keep all. It
// is true where that is not told.
func (e *engine) frees(ctx context.Context) bool {
	status, body, err := e.do(ctx, http.MethodGet, "server_info", "config_format=json", "")
	on := gjson.Get(body, "vllm_config.model_config.enable_sleep_mode")
	return err != nil || status != http.StatusOK || !on.Exists() || on.Bool()
}

// errKeeps is what frees is about.
func (e *engine) errKeeps() error {
	return fmt.Errorf("vLLM at %s runs without --enable-sleep-mode: it would keep its memory while it sleeps", e.name)
}

// sleep puts vLLM to sleep.
func (e *engine) sleep(ctx context.Context, level string) error {
	status, body, err := e.do(ctx, http.MethodPost, "sleep", "level="+level, "")
	switch {
	case err != nil:
		return err
	case status != http.StatusOK:
		return e.refused("/sleep", status, body)
	}
	return nil
}

// wake wakes vLLM up. From level 2 the weights are read again, between the two halves of it.
func (e *engine) wake(ctx context.Context) error {
	type step struct{ path, query, body string }
	steps := []step{{path: "wake_up"}}
	if e.deep(ctx) {
		steps = []step{{path: "wake_up", query: "tags=weights"}, {path: "collective_rpc", body: `{"method":"reload_weights"}`}, {path: "wake_up", query: "tags=kv_cache"}}
	}
	for _, s := range steps {
		status, body, err := e.do(ctx, http.MethodPost, s.path, s.query, s.body)
		switch {
		case err != nil:
			return err
		case status != http.StatusOK:
			return e.refused("/"+s.path, status, body)
		}
	}
	return nil
}

package vllmsim

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestSleep: the routes of sleep mode, and what a request to a sleeping server meets.
func TestSleep(t *testing.T) {
	cfg := fast()
	cfg.DevMode, cfg.SleepMode = true, true
	s, c := start(t, cfg)
	call := func(method, path, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, s.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	state := func(want string) {
		t.Helper()
		if _, page := call(http.MethodGet, "/metrics", ""); !strings.Contains(page, `sleep_state="`+want+`"} 1.0`) {
			t.Errorf("the metrics do not say %s", want)
		}
	}
	const question = `{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"x"}]}`
	for _, step := range []struct{ method, path, body, want string }{
		{"GET", "/is_sleeping", "", `{"is_sleeping":false}`},
		{"POST", "/sleep", "", `{"status":"sleeping","level":1}`},
		{"GET", "/is_sleeping", "", `{"is_sleeping":true}`},
	} {
		if status, body := call(step.method, step.path, step.body); status != http.StatusOK || body != step.want {
			t.Errorf("%s: %d %s", step.path, status, body)
		}
	}
	state("weights_offloaded")
	if status, _ := call("GET", "/health", ""); status != http.StatusOK {
		t.Errorf("/health of a sleeping server: %d", status)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if resp, err := post(t, short, c, s.URL+"/v1/chat/completions", question); err == nil {
		resp.Body.Close()
		t.Error("a sleeping server answers")
	}
	answered := make(chan string, 1)
	go func() { answered <- ask(t, c, s.URL+"/v1/chat/completions", question) }()
	if _, body := call("POST", "/wake_up", ""); body != `{"status":"awake","tags":null}` {
		t.Error(body)
	}
	if body := <-answered; !strings.Contains(body, `"usage"`) {
		t.Error(body)
	}
	state("awake")

	call("POST", "/sleep?level=2", "")
	state("discard_all")
	call("POST", "/wake_up", "")
	if !s.WeightsLost() {
		t.Error("level 2 keeps its weights")
	}
	call("POST", "/sleep?level=2", "")
	if _, body := call("POST", "/wake_up?tags=weights", ""); body != `{"status":"sleeping","tags":["weights"]}` || s.Sleeping() != 2 {
		t.Error(body)
	}
	call("POST", "/collective_rpc", `{"method":"reload_weights"}`)
	call("POST", "/wake_up?tags=kv_cache", "")
	if s.WeightsLost() || s.Sleeping() != 0 {
		t.Error("it does not wake up whole")
	}
	if status, _ := call("POST", "/sleep?level=3", ""); status != http.StatusUnprocessableEntity {
		t.Errorf("level 3: %d", status)
	}
}

// TestSleepNeedsDevMode: the routes are not there without it.
func TestSleepNeedsDevMode(t *testing.T) {
	s, c := start(t, fast())
	resp, err := post(t, t.Context(), c, s.URL+"/sleep", "")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Error(resp.Status)
	}
}

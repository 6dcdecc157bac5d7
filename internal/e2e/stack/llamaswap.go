//go:build unix

package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// LlamaSwap is a running llama-swap.
type LlamaSwap struct {
	*Process
	URL string
}

// Activity is one line of llama-swap's Activity page. -1 stands for what it does not know.
type Activity struct {
	ID         int    `json:"id"`
	Model      string `json:"model"`
	Path       string `json:"req_path"`
	Status     int    `json:"resp_status_code"`
	DurationMs int    `json:"duration_ms"`
	Tokens     struct {
		Cached          int     `json:"cache_tokens"`
		Input           int     `json:"input_tokens"`
		Output          int     `json:"output_tokens"`
		PromptPerSecond float64 `json:"prompt_per_second"`
		TokensPerSecond float64 `json:"tokens_per_second"`
	} `json:"tokens"`
}

// llamaSwapCommit is what llama-swap.sh builds, which says so in a line of its own.
var llamaSwapCommit = regexp.MustCompile(`(?m)^commit=([0-9a-f]{40})\b`)

// cacheDir is read at once, as the tests of the program begin with unsetting all that could be its own variables.
var cacheDir = os.Getenv("VLLM_TIMINGS_CACHE")

// FindLlamaSwap returns the llama-swap binary: $LLAMA_SWAP, shared/bin/llama-swap beside the repository, or the one that
// `make llama-swap` has built.
func FindLlamaSwap() (string, error) {
	if bin := os.Getenv("LLAMA_SWAP"); bin != "" {
		path, err := exec.LookPath(bin)
		if err != nil {
			return "", fmt.Errorf("LLAMA_SWAP is not the path of a llama-swap: %w", err)
		}
		return path, nil
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	script, err := os.ReadFile(filepath.Join(root, "internal", "e2e", "llama-swap.sh"))
	if err != nil {
		return "", err
	}
	commit := llamaSwapCommit.FindSubmatch(script)
	if commit == nil {
		return "", errors.New("llama-swap.sh does not say which commit it builds")
	}
	places := []string{filepath.Join(filepath.Dir(root), "shared", "bin", "llama-swap")}
	cache := cacheDir
	if cache == "" {
		// As in the script, and not os.UserCacheDir, which is another folder on macOS.
		user := os.Getenv("XDG_CACHE_HOME")
		if user == "" {
			user = filepath.Join(os.Getenv("HOME"), ".cache")
		}
		cache = filepath.Join(user, "vllm-timings")
	}
	places = append(places, filepath.Join(cache, "llama-swap", string(commit[1]), "llama-swap"))
	for _, bin := range places {
		if path, err := exec.LookPath(bin); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no llama-swap at %s: make llama-swap builds one, or set LLAMA_SWAP to the path of yours", strings.Join(places, ", nor at "))
}

// StartLlamaSwap starts llama-swap with the given YAML configuration and waits until it is ready.
func StartLlamaSwap(ctx context.Context, bin, logs, name, config string) (*LlamaSwap, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	file := filepath.Join(logs, name+".yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	listen := "127.0.0.1:" + strconv.Itoa(port)
	cmd := exec.Command(bin, "-config", file, "-listen", listen)
	cmd.Env = CleanEnv()
	p, err := start(logs, name, cmd)
	if err != nil {
		return nil, err
	}
	s := &LlamaSwap{Process: p, URL: "http://" + listen}
	if err := p.waitHealthy(ctx, s.URL+"/v1/models", 20*time.Second); err != nil {
		p.Kill()
		return nil, err
	}
	return s, nil
}

// Activity returns llama-swap's most recent requests, the last one first.
func (s *LlamaSwap) Activity(ctx context.Context) ([]Activity, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/api/metrics/activity", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("llama-swap's activity: %s", resp.Status)
	}
	var page struct {
		Data []Activity `json:"data"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		return nil, fmt.Errorf("llama-swap's activity: %w", err)
	}
	return page.Data, nil
}

// ActivityAfter waits for the entry that follows the one with the given ID (0: the first) and returns it. llama-swap
// writes it down after it has given the client the whole answer.
func (s *LlamaSwap) ActivityAfter(ctx context.Context, id int) (Activity, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		entries, err := s.Activity(ctx)
		if err != nil {
			return Activity{}, fmt.Errorf("llama-swap recorded nothing after entry %d: %w", id, err)
		}
		if len(entries) > 0 && entries[0].ID > id {
			return entries[0], nil
		}
		select {
		case <-ctx.Done():
			return Activity{}, fmt.Errorf("llama-swap recorded nothing after entry %d in 5 s", id)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// TestBrowser is TestActivity as people see it: Chromium shows llama-swap's Activity page, and what stands there are the
// numbers that the client got. The page is open while the requests come, and is loaded anew at the end.
func TestBrowser(t *testing.T) {
	chromium := needs.Program(t, "chromium", "chromium")
	vllm := shared.plain.get(t)
	sidecar := startSidecar(t, vllm.URL)
	checkSoonExact(t, sidecar)
	swap := startLlamaSwap(t, fmt.Sprintf("peers:\n  vllm:\n    proxy: %s\n    models: [tiny]\n", sidecar.URL))
	page := openBrowser(t, chromium)
	page.load(t, swap.URL+"/ui/#/activity")

	story := strings.Repeat("Once upon a time there was a small model. ", 8)
	prompt := func() string { return fmt.Sprintf("%x %s", time.Now().UnixNano(), story) } // new to the cache
	chat, stream, text := prompt(), prompt(), prompt()+strings.Repeat(story, 5)           // the last has over a thousand tokens
	want := map[string]map[string]string{}                                                // by the row's ID
	last := 0
	for _, r := range []struct {
		kind, prompt, more string
		tokens             int
		cached             bool
	}{
		{"chat", chat, "", 48, false},
		{"chat", chat, "", 120, true},
		{"chat", stream, `"stream":true`, 96, false},
		{"chat", stream, `"stream":true`, 160, true},
		{"text", text, `"stream":true`, 32, false},
		{"text", text, "", 64, true},
	} {
		a := send(t, swap.URL, newRequest(r.kind, "tiny", r.prompt, r.tokens, r.more))
		timings := a.timings(t)
		entry, err := swap.ActivityAfter(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		last = entry.ID
		checkActivity(t, entry, timings)
		if cached := timings.Get("cache_n").Int() > 0; cached != r.cached {
			t.Errorf("a cached prefix: %v, want %v: %s", cached, r.cached, timings.Raw)
		}
		id := fmt.Sprint(entry.ID)
		want[id] = page.expected(t, timings, entry)
		waitFor(t, 10*time.Second, "the page has row "+id, func() bool { return page.rows(t)[id] != nil })
		if diff := cmp.Diff(want[id], page.rows(t)[id]); diff != "" {
			t.Errorf("row %s (-timings +page):\n%s\nfor %s", id, diff, timings.Raw)
		}
	}
	evaluate[string](t, page, `localStorage["activity-inflight-open"] = "false"`) // the empty list of those that still run
	page.load(t, swap.URL+"/ui/#/activity")
	waitFor(t, 10*time.Second, "the page has all rows", func() bool { return len(page.rows(t)) == len(want) })
	if diff := cmp.Diff(want, page.rows(t)); diff != "" {
		t.Errorf("the page loaded anew (-timings +page):\n%s", diff)
	}
}

// browser is a page of a Chromium.
type browser struct{ ctx context.Context }

// openBrowser starts Chromium, and at the test's end takes a picture of its page and stops it.
func openBrowser(t *testing.T, chromium string) browser {
	t.Helper()
	options := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(chromium), chromedp.UserDataDir(t.TempDir()),
		chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun, chromedp.NoDefaultBrowserCheck,
	}
	for _, flag := range []string{
		"disable-background-networking", "disable-component-update", "disable-sync", "disable-quic", "no-proxy-server",
		"disable-dev-shm-usage", // containers have little of it
	} {
		options = append(options, chromedp.Flag(flag, true))
	}
	options = append(options, chromedp.Flag("lang", "en-US"))
	log := &strings.Builder{}
	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(options, chromedp.CombinedOutput(log))...)
	ctx, closePage := chromedp.NewContext(allocator)
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(1240, 870, chromedp.EmulateScale(1.25))); err != nil {
		closePage()
		stop()
		t.Fatalf("Chromium does not start: %v\n%s", err, log)
	}
	t.Cleanup(func() {
		if err := saveScreenshot(ctx, "activity.png"); err != nil {
			t.Errorf("no screenshot: %v", err)
		}
		closePage()
		stop()
	})
	return browser{ctx}
}

// saveScreenshot writes a picture of the page into the folder E2E_ARTIFACTS, or artifacts at the repository's root.
func saveScreenshot(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		return err
	}
	dir := os.Getenv("E2E_ARTIFACTS")
	if dir == "" {
		root, err := stack.Root()
		if err != nil {
			return err
		}
		dir = filepath.Join(root, "artifacts")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), png, 0o644)
}

// load goes to an address, also where only what is behind its # differs.
func (b browser) load(t *testing.T, url string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
	defer cancel()
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank"), chromedp.Navigate(url)); err != nil {
		t.Fatalf("%s: %v", url, err)
	}
}

// rows reads the table that has the speeds: by ID, what stands in the columns that are compared.
func (b browser) rows(t *testing.T) map[string]map[string]string {
	t.Helper()
	return evaluate[map[string]map[string]string](t, b, `(() => {
		const rows = {}
		for (const table of document.querySelectorAll("table")) {
			if (!table.tHead) continue
			const text = cell => cell.innerText.trim()
			const names = [...table.tHead.rows[0].cells].map(text)
			if (!names.includes("Prefill")) continue
			for (const row of table.tBodies[0].rows) {
				if (row.cells.length < names.length) continue // there is nothing yet
				const all = Object.fromEntries([...row.cells].map((cell, i) => [names[i], text(cell)]))
				const {ID, Time, Capture, ...compared} = all
				rows[ID] = compared
			}
		}
		return rows
	})()`)
}

// expected is what the page has to show: rounded and written by its own browser, as JavaScript rounds in its own way.
func (b browser) expected(t *testing.T, timings gjson.Result, entry stack.Activity) map[string]string {
	t.Helper()
	return evaluate[map[string]string](t, b, fmt.Sprintf(`((t, ms) => ({
		Model: "tiny",
		Status: "200",
		Cached: t.cache_n > 0 ? t.cache_n.toLocaleString() : "-",
		Prompt: t.prompt_n.toLocaleString(),
		Generated: t.predicted_n.toLocaleString(),
		Prefill: t.prompt_per_second.toFixed(2) + " t/s",
		Decode: t.predicted_per_second.toFixed(2) + " t/s",
		Duration: (ms / 1000).toFixed(2) + "s",
	}))(%s, %d)`, timings.Raw, entry.DurationMs))
}

func evaluate[T any](t *testing.T, b browser, script string) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 10*time.Second)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](script))
	if err != nil {
		t.Fatalf("the page: %v", err)
	}
	return value
}

package proxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/metrics"
)

const (
	learnTimeout = 5 * time.Second
	firstRetry   = 250 * time.Millisecond
	lastRetry    = 5 * time.Second
	// relearn is after what time a vLLM without usable metrics is asked again, when a request comes: it may have restarted
	// with other flags, and there are no readings that would show it.
	relearn = time.Minute
)

// upstream is what has been learned about vLLM. It learns by itself: at start, when vLLM appears later, and again after it
// restarted. It asks only for /version and /metrics, and nothing any more once it knows. It is safe for concurrent use.
type upstream struct {
	base       *url.URL
	name       string // for people
	key        string
	transport  http.RoundTripper
	reader     *metrics.Reader
	collectors *metrics.Collectors
	log        *slog.Logger
	wake       chan struct{}
	ready      func(context.Context) // called when the metrics can be read, before any request counts on it

	mu      sync.Mutex
	known   bool
	based   bool // and a first reading of its metrics was made, or at least tried
	version string
	learned time.Time
	said    string // the last sentence that was logged
	native  bool   // answers have vLLM's per-request metrics
	cached  bool   // and their usage the cached tokens
	judged  bool   // an answer told whether they have
}

func newUpstream(base *url.URL, name, key string, t http.RoundTripper, reader *metrics.Reader, c *metrics.Collectors, log *slog.Logger) *upstream {
	return &upstream{base: base, name: name, key: key, transport: t, reader: reader, collectors: c, log: log, wake: make(chan struct{}, 1)}
}

// run learns whenever it has to, until ctx ends.
func (u *upstream) run(ctx context.Context) {
	retry := firstRetry
	for {
		if u.learn(ctx) {
			retry = firstRetry
			select {
			case <-ctx.Done():
				return
			case <-u.wake:
			}
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-u.wake:
		case <-time.After(retry):
			retry = min(2*retry, lastRetry)
		}
	}
}

// forget makes it learn again: vLLM restarted, or is not there.
func (u *upstream) forget() {
	u.mu.Lock()
	u.known, u.based, u.version = false, false, ""
	u.judged, u.native, u.cached = false, false, false
	u.mu.Unlock()
	u.hurry()
}

// hurry makes it learn now if there is something to learn.
func (u *upstream) hurry() {
	u.mu.Lock()
	known := u.known && (u.reader.Mode().Readable() || time.Since(u.learned) < relearn)
	u.mu.Unlock()
	if known {
		return
	}
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

// learn asks vLLM what it is and reports whether that is known now.
func (u *upstream) learn(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, learnTimeout)
	defer cancel()
	version, err := u.askVersion(ctx)
	u.collectors.SetUpstreamUp(err == nil)
	if err != nil {
		if ctx.Err() == nil || ctx.Err() == context.DeadlineExceeded {
			msg := "vLLM does not answer yet; requests get status 502 until it does"
			if kind := kindOf(err); remedies[kind] != "" { // it will not get well by itself
				msg = "vLLM cannot be reached (" + kind + "); requests get status 502. " + remedies[kind]
			}
			u.say(msg, "error", said(err))
		}
		return false
	}
	u.mu.Lock()
	u.version = version
	u.mu.Unlock()
	began := time.Now()
	mode, err := u.reader.Probe(ctx)
	took := time.Since(began)
	if err != nil && ctx.Err() != nil {
		u.say("vLLM's metrics do not answer; timings are estimated from the streams until they do", "error", err)
		return false
	}
	u.mu.Lock()
	u.known, u.learned = true, time.Now()
	u.mu.Unlock()
	name := "the upstream, which has no /version and may be no vLLM,"
	if version != "" {
		name = "vLLM " + version
	}
	switch {
	case !mode.Readable():
		u.say("found "+name+" without usable metrics: timings are estimated from the streams, and answers that come whole have none. "+advice(version), "reason", err)
	default:
		u.ready(ctx)
		u.say("found "+name+": requests that finish alone get exact timings from its metrics, those that finish together estimated ones. "+advice(version),
			"metrics", mode.String(), "reading_ms", float64(took.Microseconds())/1000)
	}
	u.mu.Lock()
	u.based = u.known // or it was forgotten meanwhile
	u.mu.Unlock()
	return true
}

// advice is what would make all numbers exact.
func advice(version string) string {
	if !HasNative(version) {
		return "vLLM 0.25 or newer started with --enable-per-request-metrics --enable-prompt-tokens-details makes every number exact"
	}
	return "Start vLLM with --enable-per-request-metrics --enable-prompt-tokens-details to make every number exact, if it is not"
}

// judge takes from an answer whether vLLM's own per-request metrics are on.
func (u *upstream) judge(native, cached bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.judged && u.native == native && u.cached == (cached || u.cached) {
		return
	}
	first := !u.judged
	u.judged, u.native, u.cached = true, native, cached || u.cached
	switch {
	case native && cached:
		u.log.Info("vLLM sends its own per-request metrics: every number is exact")
	case native && first:
		u.log.Info("vLLM sends its own per-request metrics: prefill and decode times are exact. Start it with --enable-prompt-tokens-details too to make cached tokens exact for requests that finish together")
	}
}

// exact reports whether answers have all figures by themselves, so that no reading is needed.
func (u *upstream) exact() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.native && u.cached
}

// quirks returns what is particular to this vLLM.
func (u *upstream) quirks() quirks {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.version == "" {
		return quirks{}
	}
	q := quirks{omitted: usageDefaultTrue, nullUsage: !atLeast(u.version, 0, 21)}
	if atLeast(u.version, 0, 18) {
		q.omitted = usageDefaultFalse
	}
	return q
}

// say logs a sentence unless it was the last one.
func (u *upstream) say(msg string, args ...any) {
	u.mu.Lock()
	again := u.said == msg
	u.said = msg
	u.mu.Unlock()
	if !again {
		u.log.Info(msg, append([]any{"upstream", u.name}, args...)...)
	}
}

// askVersion returns vLLM's version, "" where something else answers. The error says that nothing does.
func (u *upstream) askVersion(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.base.JoinPath("version").String(), nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("User-Agent", "vllm-timings")
	if u.key != "" {
		req.Header.Set("Authorization", "Bearer "+u.key)
	} else if user := u.base.User; user != nil {
		password, _ := user.Password()
		req.SetBasicAuth(user.Username(), password)
	}
	resp, err := u.transport.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode >= 500: // something before vLLM answers for it
		return "", fmt.Errorf("status %d", resp.StatusCode)
	case resp.StatusCode != http.StatusOK:
		return "", nil
	}
	return gjson.GetBytes(body, "version").String(), nil
}

// atLeast reports whether a version such as 0.19.1, 0.25.0rc1 or 1.0.dev3+gabc is major.minor or newer.
func atLeast(version string, major, minor int) bool {
	a, rest, _ := strings.Cut(version, ".")
	b, _, _ := strings.Cut(rest, ".")
	number := func(s string) int {
		end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
		if end >= 0 {
			s = s[:end]
		}
		n, _ := strconv.Atoi(s)
		return n
	}
	x, y := number(a), number(b)
	return x > major || x == major && y >= minor
}

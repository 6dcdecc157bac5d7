package timings

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Source says where figures come from.
type Source string

// The sources, the best first.
const (
	Upstream Source = "upstream" // the answer already had `timings`
	Native   Source = "native"   // vLLM's own per-request metrics, in the answer
	Window   Source = "window"   // the difference of two readings of vLLM's /metrics
	Observed Source = "observed" // when the stream's events came
)

// Sources is the order in which sources are asked; one that is not in it is not used.
type Sources []Source

// AllSources is the default order.
var AllSources = Sources{Upstream, Native, Window, Observed}

// ParseSources reads a comma separated list.
func ParseSources(s string) (Sources, error) {
	var out Sources
	for _, name := range strings.Split(s, ",") {
		src := Source(strings.TrimSpace(name))
		switch {
		case !slices.Contains(AllSources, src):
			return nil, fmt.Errorf("unknown source %q: use some of %s", src, AllSources)
		case slices.Contains(out, src):
			return nil, fmt.Errorf("source %q stands twice", src)
		}
		out = append(out, src)
	}
	return out, nil
}

// Has reports whether src may be used.
func (s Sources) Has(src Source) bool { return slices.Contains(s, src) }

func (s Sources) String() string {
	names := make([]string, len(s))
	for i, src := range s {
		names[i] = string(src)
	}
	return strings.Join(names, ",")
}

const (
	// maxObservedRate is the decode speed, in tokens/s, above which the time between a stream's events is no measurement:
	// no engine decodes one request that fast, so its events were held back and came together (tool call parsers, buffers).
	maxObservedRate = 10_000
	// minObservedPrefill is less than any engine step takes.
	minObservedPrefill = 100 * time.Microsecond
)

// FromNative returns the figures of an answer with vLLM's own per-request metrics. Where usage does not tell the cached
// tokens, they are unknown and the figures an estimate until somebody else tells them.
func FromNative(u Usage, p Phases, d Opt[Draft]) Figures {
	f := Figures{Usage: u, Phases: p, Draft: d, Source: Native}
	f.Estimated = !u.Cached.Known || !p.Prefill.Known || !p.Decode.Known
	return f
}

// FromShare returns the figures of a request with its share of a window.
func FromShare(u Usage, s Share) Figures {
	if !u.Cached.Known {
		u.Cached = s.Cached
	}
	f := Figures{Usage: u, Phases: s.Phases, Draft: s.Draft, Source: Window}
	f.Estimated = s.Estimated || !u.Cached.Known || !s.Prefill.Known || !s.Decode.Known
	return f
}

// FromObserved returns the figures of a stream of which only the times of its events are known.
func FromObserved(u Usage, p Phases) Figures {
	return Figures{Usage: u, Phases: Plausible(u, p), Source: Observed, Estimated: true}
}

// Plausible returns the observed phases of a request as far as they can be what the engine did. Where the decode time
// cannot be, the first event was held back too, so that the time until it came is not the prefill time either.
func Plausible(u Usage, p Phases) Phases {
	if p.Prefill.Known && p.Prefill.Value < minObservedPrefill {
		p.Prefill = Opt[time.Duration]{}
	}
	if u.Completion <= 1 {
		p.Decode = Some(time.Duration(0)) // the first token is the last
	} else if p.Decode.Known && float64(u.Completion-1) > maxObservedRate*p.Decode.Value.Seconds() {
		p = Phases{}
	}
	return p
}

package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/proxy"
	"github.com/vllm-timings/vllm-timings/timings"
)

// How good the numbers of an endpoint are.
const (
	isExact     = "exact"
	isEstimated = "estimated"
	isMissing   = "none"
	isUnknown   = "unknown"
)

// endpointVerdict says where the numbers of an endpoint's answers come from.
type endpointVerdict struct {
	Endpoint  string `json:"endpoint"`
	Stream    bool   `json:"stream"`
	Source    string `json:"source"`
	Alone     string `json:"alone"` // the request finishes alone
	UnderLoad string `json:"under_load"`
}

const (
	nativeFlags = "--enable-per-request-metrics --enable-prompt-tokens-details"
	thenExact   = "every number is exact then, at any load (of " + messagesPath + ": when it finishes alone)"
)

// slowReading is so long that readings are too late now and then, with the default of --metrics-deadline.
const slowReading = float64(125)

// conclude draws the conclusions.
func (f *findings) conclude() {
	f.Endpoints = []endpointVerdict{}
	if !f.Reachable || !f.VLLM {
		f.ExitCode = exitNoVLLM
		f.Verdict = "There is no vLLM at that address."
		if !f.Reachable {
			f.Verdict = "vLLM cannot be reached."
		}
	} else {
		for _, path := range []string{chatPath, textPath, responsesPath, messagesPath} {
			for _, stream := range []bool{false, true} {
				f.Endpoints = append(f.Endpoints, f.verdict(path, stream))
			}
		}
		f.judge()
	}
	f.advise()
}

// is reports whether something is known to be so.
func is(b *bool) bool { return b != nil && *b }

// verdict says what proxy's sources, asked in their order, will do.
func (f *findings) verdict(path string, stream bool) endpointVerdict {
	v := endpointVerdict{Endpoint: path, Stream: stream}
	set := func(source timings.Source, alone, underLoad string) {
		v.Source, v.Alone, v.UnderLoad = string(source), alone, underLoad
	}
	native := is(f.Native) && path != messagesPath // vLLM has none in those
	readable := f.Metrics.mode.Readable() && !f.Metrics.Balanced
	switch {
	case f.Sidecar:
		set(timings.Upstream, isUnknown, isUnknown)
	case is(f.Timings) && f.estimates:
		set(timings.Upstream, isEstimated, isEstimated)
	case is(f.Timings):
		set(timings.Upstream, isExact, isExact)
	case native && is(f.Cached):
		set(timings.Native, isExact, isExact)
	case native && readable: // which then tells the cached tokens
		set(timings.Native, isExact, isEstimated)
	case native:
		set(timings.Native, isEstimated, isEstimated)
	case readable:
		set(timings.Window, isExact, isEstimated)
	case stream:
		set(timings.Observed, isEstimated, isEstimated)
	default:
		set(isMissing, isMissing, isMissing)
	}
	return v
}

// judge puts all verdicts into one.
func (f *findings) judge() {
	all := func(good func(endpointVerdict) bool) bool {
		return !slices.ContainsFunc(f.Endpoints, func(v endpointVerdict) bool { return !good(v) })
	}
	alone := all(func(v endpointVerdict) bool { return v.Alone == isExact })
	underLoad := func(v endpointVerdict) bool { return v.UnderLoad == isExact }
	f.ExitCode = exitFailed
	switch {
	case f.Sidecar:
		f.Verdict = "What vLLM itself has was not found out."
	case alone && all(underLoad):
		f.ExitCode, f.Verdict = exitOK, "Every number is exact."
	case alone && all(func(v endpointVerdict) bool { return underLoad(v) || v.Endpoint == messagesPath }):
		f.ExitCode, f.Verdict = exitOK, "Every number is exact, but for those of "+messagesPath+" under load."
	case alone && f.Native == nil:
		f.Verdict = "Numbers are exact for requests that finish alone. Whether they are under load was not found out."
	case alone:
		f.Verdict = "Numbers are exact for requests that finish alone, and estimates under load."
	case is(f.Native), is(f.Timings):
		f.Verdict = "Some numbers are estimates."
	case f.Native == nil:
		f.Verdict = "Numbers are estimates, if answers have none themselves, which was not found out."
	default:
		f.Verdict = "Numbers of streams are estimates, and answers that come whole get none."
	}
}

// advise says what to change, the most important first.
func (f *findings) advise() {
	say := func(format string, args ...any) { f.Advice = append(f.Advice, fmt.Sprintf(format, args...)) }
	if f.inV1 && (!f.VLLM || !f.Reachable) {
		say("Take /v1 from the end of --upstream: the paths of requests begin with it.")
	}
	switch {
	case f.Sidecar && !f.Reachable:
		say("A vllm-timings answers there, but vLLM does not answer it: start vLLM, or give that vllm-timings another --upstream.")
		return
	case f.Sidecar:
		say("Give --upstream the address of vLLM itself: a vllm-timings answers there.")
		return
	case !f.Reachable && f.remedy != "":
		say("%s.", f.remedy)
		return
	case !f.Reachable:
		say("Check that vLLM runs and is ready, and that --upstream is its address.")
		return
	case !f.VLLM:
		say("Give --upstream the address of vLLM: what answers there has no /version, no models and no metrics of vLLM.")
		return
	}
	switch f.Health {
	case http.StatusOK:
	case http.StatusNotFound, http.StatusUnauthorized, http.StatusForbidden:
		say("Have what stands before vLLM pass /health on, without a key: llama-swap asks for it.")
	default:
		say("See vLLM's log: it is not well, as /health tells.")
	}
	switch {
	case f.KeyNeeded && f.keyGiven:
		say("Check the key: vLLM, or something before it, does not take it.")
	case f.KeyNeeded && f.Version == "":
		say("Give --upstream-api-key-file (serve and run need it too): something before vLLM asks for a key.")
	case f.KeyNeeded:
		say("Give doctor --upstream-api-key-file for its request: vLLM asks for a key at /v1. serve and run need none there, their clients send theirs.")
	}
	switch {
	case f.wantedModel != "" && len(f.Models) > 0 && !slices.Contains(f.Models, f.wantedModel):
		say("Give --model a name that vLLM serves: %s.", clean(list(f.Models)))
	case f.Request != nil && f.Request.Error != "" && !f.KeyNeeded:
		say("Try again when vLLM answers requests: what its answers have could not be found out.")
	}
	f.adviseFlags(say)
	f.adviseMetrics(say)
}

// adviseFlags says which of vLLM's flags make more numbers exact.
func (f *findings) adviseFlags(say func(string, ...any)) {
	silent := f.Metrics.mode == metrics.ModeNoStats
	switch {
	case is(f.Timings):
	case silent && proxy.HasNative(f.Version):
		say("Start vLLM without --disable-log-stats, and with %s: %s.", nativeFlags, thenExact)
	case silent:
		say("Start vLLM without --disable-log-stats: then requests that finish alone have exact numbers.")
		f.adviseOld(say)
	case !proxy.HasNative(f.Version):
		f.adviseOld(say)
	case f.Native != nil && !*f.Native:
		say("Start vLLM with %s: %s.", nativeFlags, thenExact)
	case is(f.Native) && !is(f.Cached):
		say("Start vLLM with --enable-prompt-tokens-details too: cached tokens are exact under load then.")
	}
}

func (f *findings) adviseOld(say func(string, ...any)) {
	say("Take vLLM 0.25 or newer, with %s: %s. Or patch this one, if `vllm-timings patch check` says that it fits.", nativeFlags, thenExact)
}

// adviseMetrics says what is wrong with the metrics.
func (f *findings) adviseMetrics(say func(string, ...any)) {
	if is(f.Timings) { // nobody needs them
		return
	}
	m := &f.Metrics
	switch {
	case m.mode == metrics.ModeNone && f.KeyNeeded: // that was said
	case m.mode == metrics.ModeNone && m.advice != "":
		say("%s.", m.advice)
	case m.Balanced:
		say("Put one vllm-timings before each vLLM: several answer at this address by turns.")
	case m.Merged:
		say("Start vLLM with --api-server-count 1, if one is enough: with more its /metrics cannot be filtered, and each reading costs it 6 to 10 ms.")
	case m.mode == metrics.ModeFull:
		say("Install prometheus_client 0.23.1 or newer beside vLLM: with the one it has /metrics cannot be filtered, and each reading costs it 6 to 10 ms.")
	}
	if m.ReadingMS > slowReading {
		say("Give serve a longer --metrics-deadline than 250ms: a reading of /metrics takes %.0f ms.", m.ReadingMS)
	}
}

// list names some of names.
func list(names []string) string {
	const most = 5
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

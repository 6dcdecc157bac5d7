package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
)

// ErrorKind tells why a page could not be had.
type ErrorKind uint8

const (
	// KindTransport: no answer, or one that broke off or took too long.
	KindTransport ErrorKind = iota + 1
	// KindStatus: an answer other than 200; its status is in [Error.Status].
	KindStatus
	// KindFormat: an answer that is not Prometheus' text format 0.0.4.
	KindFormat
	// KindNoSamples: a metrics page, but without the samples that are needed.
	KindNoSamples
	// KindMode: nothing was sent, as [Reader.Probe] has not found a way to read.
	KindMode
)

func (k ErrorKind) String() string {
	switch k {
	case KindTransport:
		return "transport"
	case KindStatus:
		return "status"
	case KindFormat:
		return "format"
	case KindNoSamples:
		return "no_samples"
	case KindMode:
		return "mode"
	default:
		return "unknown"
	}
}

// Error is why vLLM's metrics could not be read, and what to do about it.
type Error struct {
	Kind   ErrorKind
	URL    string // without credentials and query
	Status int    // of KindStatus, else 0
	Err    error  // the cause, nil for KindStatus and KindMode
}

// Error names the page, what happened, and what to do.
func (e *Error) Error() string {
	var what string
	switch e.Kind {
	case KindStatus:
		what = fmt.Sprintf("status %d %s", e.Status, http.StatusText(e.Status))
	case KindMode:
		what = "not read"
	default:
		what = e.Err.Error()
	}
	return "vLLM's metrics at " + e.URL + ": " + what + ". " + e.Advice()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Timeout says whether time ran out, as net.Error does.
func (e *Error) Timeout() bool { return isTimeout(e.Err) }

// Advice is one sentence for the person who runs vLLM.
func (e *Error) Advice() string {
	switch e.Kind {
	case KindTransport:
		if e.Timeout() {
			return "vLLM is overloaded or the address is not a vLLM; timings are estimated until its metrics answer in time"
		}
		return "Check that vLLM runs and that the upstream address is right"
	case KindStatus:
		switch {
		case e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden:
			return "Something before vLLM guards its metrics (vLLM itself never asks for a key there); let this proxy read them or give it a key that may"
		case e.Status == http.StatusNotFound || e.Status == http.StatusMethodNotAllowed:
			return "Point the upstream at vLLM itself, or have what stands before it pass /metrics on"
		case e.Status >= 500:
			return "vLLM or what stands before it is starting or in trouble; see its log"
		case e.Status >= 300 && e.Status < 400:
			return "Point the upstream at the address that it redirects to"
		}
		return "Have what stands before vLLM pass /metrics on unchanged"
	case KindFormat:
		return "Have what stands before vLLM pass /metrics on unchanged, or point the upstream at vLLM itself"
	case KindNoSamples:
		return "Start vLLM without --disable-log-stats, or with --enable-per-request-metrics (vLLM 0.25 or newer)"
	default:
		return "Its page was not found yet, or has no request samples; it is looked for again"
	}
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// Result classes an outcome of [Reader.Read] or [Coalescer.Next] for the
// result label of vllm_timings_window_readings_total: ok, error or timeout.
func Result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case isTimeout(err):
		return "timeout"
	default:
		return "error"
	}
}

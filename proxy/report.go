package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/metrics"
	"github.com/vllm-timings/vllm-timings/timings"
)

// statusClientLeft is what logs and metrics say of a request whose client did not wait; nginx uses the number too.
const statusClientLeft = 499

// failed answers a request that vLLM did not answer.
func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	ex := exchangeOf(r.Context())
	if ex.clientLeft() {
		ex.status = statusClientLeft
		w.WriteHeader(ex.status) // or one that sends no more, but reads, would get an empty answer with status 200
		return
	}
	if ex.upload != nil {
		if broken := ex.upload.broken.Load(); broken != nil {
			p.badBody(ex, w, *broken)
			return
		}
	}
	ex.failed = err
	p.upstream.forget()
	ex.status = http.StatusBadGateway
	kind := kindOf(err)
	remedy := cmp.Or(remedies[kind], "Check that it runs and is ready, and that --upstream is its address")
	writeError(w, ex.status, "vLLM at "+p.upstream.name+" cannot be reached ("+kind+"). "+remedy, "upstream_error")
}

// badBody answers a request whose body could not be read.
func (p *Proxy) badBody(ex *exchange, w http.ResponseWriter, err error) {
	if ex.clientLeft() || errors.Is(err, io.ErrUnexpectedEOF) {
		ex.status = statusClientLeft
		w.WriteHeader(ex.status)
		return
	}
	ex.status = http.StatusBadRequest
	writeError(w, ex.status, "the request body cannot be read: "+err.Error(), "invalid_request_error")
}

// writeError answers in the form of the OpenAI API.
func writeError(w http.ResponseWriter, status int, message, kind string) {
	body := `{"error":{"message":` + string(gjson.AppendJSONString(nil, message)) + `,"type":"` + kind + `","param":null,"code":` + strconv.Itoa(status) + `}}`
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// Kinds of failures that only another command line, or another certificate, can mend.
const (
	notTrusted = "certificate not trusted"
	otherName  = "certificate for another name"
	badCert    = "certificate not valid"
	notTLS     = "no TLS there"
	tlsRefused = "TLS refused"
	notAllowed = "permission denied"
)

// Kinds of failures of something that is not vLLM, or not well.
const (
	badAnswer = "no valid answer"
	tooLarge  = "header too large"
)

// remedies says what mends them.
var remedies = map[string]string{
	notTrusted: "Give --upstream-ca the certificate, in PEM form, of the authority that signed vLLM's, or vLLM's own if it signed itself",
	otherName:  "Give --upstream a name or address of vLLM that is in its certificate",
	badCert:    "Check the dates of vLLM's certificate, and the clock here",
	notTLS:     "Begin --upstream with http:// if vLLM runs without --ssl-certfile",
	tlsRefused: "Check that vLLM's TLS asks for no client certificate: vllm-timings has none",
	notAllowed: "Check that the user of vllm-timings may write to the socket at --upstream",
}

// kindOf names what went wrong with vLLM in few words, which are also label values.
func kindOf(err error) string {
	if kind := kindOfTLS(err); kind != "" {
		return kind
	}
	var op *net.OpError
	var dns *net.DNSError
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, &dns):
		return "name not found"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.EPIPE):
		return "connection closed"
	case errors.Is(err, fs.ErrNotExist):
		return "no such socket"
	case errors.Is(err, fs.ErrPermission) && errors.As(err, &op) && op.Net == "unix":
		return notAllowed
	case errors.As(err, &op) && op.Op == "dial":
		return "no connection"
	}
	return kindOfAnswer(err)
}

// kindOfAnswer names what is wrong with an answer. net/http has no types for most of that.
func kindOfAnswer(err error) string {
	var header textproto.ProtocolError
	switch text := err.Error(); {
	case strings.Contains(text, "response headers exceeded"):
		return tooLarge
	case errors.As(err, &header), strings.Contains(text, "malformed HTTP"):
		return badAnswer
	}
	return "other"
}

// said is what an error says, without what vLLM said: net/http quotes answers in which something is wrong.
func said(err error) string {
	switch kind := kindOf(err); kind {
	case badAnswer:
		return kind
	case "other":
		text, _, quotes := strings.Cut(err.Error(), `"`)
		if quotes {
			return strings.TrimRight(text, " [(:")
		}
	}
	return err.Error()
}

// kindOfTLS names what is wrong with vLLM's TLS, "" if it is something else.
func kindOfTLS(err error) string {
	var authority x509.UnknownAuthorityError
	var roots x509.SystemRootsError
	var name x509.HostnameError
	var verification *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	var op *net.OpError
	switch {
	case errors.As(err, &authority), errors.As(err, &roots):
		return notTrusted
	case errors.As(err, &name):
		return otherName
	case errors.As(err, &verification):
		return badCert
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &record):
		return notTLS
	case errors.As(err, &op) && op.Op == "remote error": // an alert of vLLM's
		return tlsRefused
	}
	return ""
}

// report logs and counts an exchange when it is over.
func (p *Proxy) report(ex *exchange) {
	if ex.placed {
		<-p.places
	}
	gone := ex.clientLeft()
	left := gone && !ex.complete && !p.draining.Load() // when draining, it was cut off
	if left {
		p.collectors.ClientDisconnected()
		if ex.status == 0 {
			ex.status = statusClientLeft
		}
	} else if ex.failed != nil && !gone {
		p.collectors.UpstreamError(kindOf(ex.failed))
	}
	// Last, so that who sees no request in flight finds all that there is to say of those that were.
	defer p.collectors.RequestDone(string(ex.endpoint), ex.status)
	if ex.endpoint != other {
		p.collectors.ObserveOverhead(ex.own)
		if ex.figures.Known {
			p.collectors.ObserveTimings(observation(ex))
		} else if ex.status == http.StatusOK {
			if left {
				ex.unedited("client_left")
			}
			p.collectors.Unedited(string(ex.endpoint), ex.reason)
		}
	}
	if ex.status == http.StatusOK && ex.usage.Known && ex.dialect != messagesDialect && p.sources.Has(timings.Native) {
		p.upstream.judge(ex.native.Known, ex.usage.Value.Cached.Known)
	}
	if gone {
		ex.failed = nil // the client, not vLLM
	}
	p.logExchange(ex, left)
}

func observation(ex *exchange) metrics.Observation {
	f := &ex.figures.Value
	o := metrics.Observation{Endpoint: string(ex.endpoint), Model: ex.model, Source: string(f.Source), Exact: !f.Estimated}
	if f.Source == timings.Upstream {
		return o
	}
	o.PrefillSeconds = metrics.Maybe(f.Prefill.Value.Seconds(), f.Prefill.Known)
	o.DecodeSeconds = metrics.Maybe(f.Decode.Value.Seconds(), f.Decode.Known)
	prompt, predicted := f.PromptPerSecond(), f.PredictedPerSecond()
	o.PrefillRate = metrics.Maybe(prompt.Value, prompt.Known)
	o.DecodeRate = metrics.Maybe(predicted.Value, predicted.Known)
	o.PromptTokens = metrics.Known(float64(f.Computed()))
	o.CachedTokens = metrics.Maybe(f.Cached.Value, f.Cached.Known)
	o.PredictedTokens = metrics.Known(float64(f.Completion))
	return o
}

// logExchange writes the line of a request. Nothing of its body, and no header, is in it.
func (p *Proxy) logExchange(ex *exchange, left bool) {
	level := slog.LevelInfo
	switch {
	case ex.failed != nil && !left:
		level = slog.LevelWarn
	case ex.endpoint == other && ex.method == http.MethodGet && ex.status < http.StatusBadRequest:
		level = slog.LevelDebug // health checks and scrapes
	}
	ctx := context.Background()
	if !p.log.Enabled(ctx, level) {
		return
	}
	attrs := append(make([]slog.Attr, 0, 20), // as many as there may be
		slog.String("method", ex.method),
		slog.String("path", short(ex.path)),
		slog.Int("status", ex.status),
		slog.Float64("duration_ms", ms(time.Since(ex.start))),
	)
	if ex.endpoint != other {
		attrs = append(attrs, slog.String("model", short(ex.model)), slog.Bool("stream", ex.stream))
		attrs = appendFigures(attrs, ex)
		attrs = append(attrs, slog.Float64("overhead_ms", ms(ex.own)))
	}
	switch {
	case left:
		attrs = append(attrs, slog.Bool("client_left", true))
	case ex.failed != nil:
		attrs = append(attrs, slog.String("error", said(ex.failed)))
	}
	p.log.LogAttrs(ctx, level, "request", attrs...)
}

func appendFigures(attrs []slog.Attr, ex *exchange) []slog.Attr {
	if !ex.figures.Known {
		if ex.reason != "" {
			attrs = append(attrs, slog.String("no_timings", ex.reason))
		}
		return attrs
	}
	f := &ex.figures.Value
	attrs = append(attrs, slog.String("source", string(f.Source)))
	if f.Source == timings.Upstream {
		return attrs
	}
	attrs = append(attrs, slog.Bool("estimated", f.Estimated), slog.Int("prompt_n", f.Computed()))
	if f.Cached.Known {
		attrs = append(attrs, slog.Int("cache_n", f.Cached.Value))
	}
	attrs = append(attrs, slog.Int("predicted_n", f.Completion))
	for _, phase := range []struct {
		name string
		time timings.Opt[time.Duration]
		rate timings.Opt[float64]
	}{{"prompt", f.Prefill, f.PromptPerSecond()}, {"predicted", f.Decode, f.PredictedPerSecond()}} {
		if phase.time.Known {
			attrs = append(attrs, slog.Float64(phase.name+"_ms", ms(phase.time.Value)),
				slog.Float64(phase.name+"_per_second", float64(int64(phase.rate.Value*100))/100))
		}
	}
	return attrs
}

// ms gives milliseconds with three decimals.
func ms(d time.Duration) float64 { return float64(d.Round(time.Microsecond).Microseconds()) / 1000 }

// short cuts what a client chose to a length that a log can bear.
func short(s string) string {
	const most = 200
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

package proxy

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/sse"
	"github.com/vllm-timings/vllm-timings/timings"
)

// exchange is one request and its answer. It is used by one goroutine at a time.
type exchange struct {
	plan
	proxy  *Proxy
	ctx    context.Context // of the client's request
	method string
	path   string
	upload *upload     // the client's body, where it streams through
	out    *detached   // where a streamed answer goes; nil while the server has it
	body   *replayable // what is sent to vLLM; nil where the body streams through

	start   time.Time     // the client's request was there, without its body
	sent    time.Time     // it went to vLLM
	headers time.Time     // vLLM's answer began, just before it gave the request to the engine
	own     time.Duration // time that this process added
	alone   bool          // nothing else was with vLLM when it was sent
	others  uint64        // requests sent before it
	placed  bool          // it has one of the places: see enter

	status  int
	usage   timings.Opt[timings.Usage]
	native  timings.Opt[timings.Phases] // vLLM's own per-request metrics
	draft   timings.Opt[timings.Draft]
	figures timings.Opt[timings.Figures]
	reason  string // why there are no timings
	failed  error  // what broke the exchange off
	turns   int    // engine requests that made the answer, where it says so

	complete        bool // the client has been given all that matters, and may leave
	upstreamTimings bool // the answer has `timings` already
	retrieved       bool // it is the answer of an earlier request, which was sent when `sent` says, if that is known

	prefills []time.Duration // what the prefill time of a stream may be
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange {
	ex, _ := ctx.Value(exchangeKey{}).(*exchange)
	return ex
}

// unedited notes why an answer goes through without timings; the first reason counts.
func (ex *exchange) unedited(reason string) {
	if reason == "upstream_error" && ex.clientLeft() {
		reason = "client_left" // that is what broke vLLM's answer off
	}
	if ex.reason == "" {
		ex.reason = reason
	}
}

// bodyFailed notes that vLLM's answer broke off.
func (ex *exchange) bodyFailed(err error) {
	if ex.failed == nil {
		ex.failed = err
	}
	ex.unedited("upstream_error")
}

// readUsage takes the token counts of an answer, and vLLM's metrics of it, and reports whether there was usage.
func (ex *exchange) readUsage(u, m gjson.Result) bool {
	if !u.IsObject() {
		return false
	}
	var prompt, completion, cached, read, written timings.Opt[int]
	turns := 0
	u.ForEach(func(key, v gjson.Result) bool {
		switch key.Str {
		case "prompt_tokens":
			prompt = cmp.Or(number(v), prompt)
		case "input_tokens":
			prompt = cmp.Or(prompt, number(v))
		case "completion_tokens":
			completion = cmp.Or(number(v), completion)
		case "output_tokens":
			completion = cmp.Or(completion, number(v))
		case "prompt_tokens_details":
			cached = cmp.Or(number(v.Get("cached_tokens")), cached)
		case "input_tokens_details":
			cached = cmp.Or(cached, number(v.Get("cached_tokens")))
			turns = len(v.Get("input_tokens_per_turn").Array())
		case "cache_read_input_tokens":
			read = number(v)
		case "cache_creation_input_tokens":
			written = number(v)
		}
		return true
	})
	if !prompt.Known || !completion.Known {
		return false
	}
	// Anthropic's input_tokens are neither those read from the cache nor those written to it. vLLM tells each if it knows it.
	prompt.Value += read.Value + written.Value
	if read.Known {
		cached = read
	}
	if !cached.Known && ex.usage.Known {
		cached = ex.usage.Value.Cached
	}
	ex.usage = timings.Some(timings.Usage{Prompt: prompt.Value, Completion: completion.Value, Cached: cached})
	ex.turns = max(1, turns)
	ex.readNative(m)
	return true
}

// number returns a number of tokens. One that is unknown is the zero value, which cmp.Or passes over.
func number(v gjson.Result) timings.Opt[int] {
	if v.Type != gjson.Number {
		return timings.Opt[int]{}
	}
	return timings.Some(int(v.Int()))
}

// readNative takes vLLM's own per-request metrics (vLLM from 0.25 on with --enable-per-request-metrics).
func (ex *exchange) readNative(m gjson.Result) {
	if !m.IsObject() {
		return
	}
	var p timings.Phases
	var proposed, accepted timings.Opt[int]
	m.ForEach(func(key, v gjson.Result) bool {
		ms := timings.Opt[time.Duration]{Value: time.Duration(v.Num * float64(time.Millisecond)), Known: v.Type == gjson.Number}
		switch key.Str {
		case "time_to_first_token_ms":
			p.Prefill = ms
		case "generation_time_ms":
			p.Decode = ms
		case "speculative_decoding":
			proposed, accepted = number(v.Get("num_draft_tokens")), number(v.Get("num_accepted_draft_tokens"))
		}
		return true
	})
	if !p.Prefill.Known || !p.Decode.Known {
		return
	}
	ex.native = timings.Some(p)
	if proposed.Known && accepted.Known {
		ex.draft = timings.Some(timings.Draft{Proposed: proposed.Value, Accepted: accepted.Value})
	}
}

// settle makes the figures of an answer that is there and returns the member that carries them, or nil. observed is what
// the times of a stream's events tell, notBefore when it was surely not over yet, and seen when it was.
func (ex *exchange) settle(observed timings.Phases, notBefore, seen time.Time) []byte {
	defer func(began time.Time) { ex.own += time.Since(began) }(time.Now())
	switch {
	case ex.upstreamTimings:
		ex.figures = timings.Some(timings.Figures{Source: timings.Upstream})
		return nil
	case !ex.usage.Known:
		ex.unedited("no_usage")
		return nil
	}
	f, ok := ex.choose(&timings.Finished{
		Usage:     ex.usage.Value,
		Observed:  timings.Plausible(ex.usage.Value, observed),
		Prefills:  ex.prefills,
		Sent:      ex.sent,
		NotBefore: notBefore,
		Seen:      seen,
		Alone:     ex.alone && ex.proxy.sent.Load() == ex.others+1,
	})
	if !ok || !f.Useful() {
		ex.unedited("no_source")
		return nil
	}
	ex.figures = timings.Some(f)
	return timingsMember(&f)
}

// timingsMember returns the member that carries figures.
func timingsMember(f *timings.Figures) []byte {
	return f.AppendJSON(append(make([]byte, 0, 256), `"timings":`...))
}

// choose asks the sources in their order. The first that gives the engine's own figures is taken, else the first that
// gives any.
func (ex *exchange) choose(fin *timings.Finished) (best timings.Figures, ok bool) {
	for _, source := range ex.proxy.sources {
		var f timings.Figures
		switch source {
		case timings.Native:
			if !ex.native.Known || ex.turns > 1 { // they are of one engine request
				continue
			}
			f = timings.FromNative(fin.Usage, ex.native.Value, ex.draft)
		case timings.Window:
			share, found := ex.share(fin)
			if !found {
				continue
			}
			if ok && best.Source == timings.Native && !best.Cached.Known && share.Cached.Known {
				best.Cached, best.Estimated = share.Cached, share.Estimated // all that was missing
			}
			f = timings.FromShare(fin.Usage, share)
		case timings.Observed:
			if !fin.Observed.Prefill.Known || ex.retrieved || ex.turns > 1 {
				continue // it came whole, in one burst, later, or with pauses of its tools in between
			}
			f = timings.FromObserved(fin.Usage, fin.Observed)
		default:
			continue
		}
		if !ok && f.Useful() {
			best, ok = f, true
		}
		if ok && !best.Estimated {
			return best, true
		}
		if !f.Estimated && f.Useful() {
			return f, true
		}
	}
	return best, ok
}

// share finds the answer in the windows. One that came earlier, or that several engine requests made, has no moment at
// which it was recorded: it gets all that vLLM did since it was sent if that was nothing else.
func (ex *exchange) share(fin *timings.Finished) (timings.Share, bool) {
	switch {
	case ex.retrieved && ex.sent.IsZero():
		return timings.Share{}, false
	case ex.retrieved || ex.turns > 1:
		return ex.proxy.windows.span(ex.ctx, fin, ex.turns)
	}
	return ex.proxy.windows.settle(ex.ctx, fin)
}

// edit returns the edit of the object, an answer or its last event, to which add, the timings, is added. vLLM's own metrics
// leave where timings come: llama-swap takes prompt_n for the whole prompt when it sees both.
func (ex *exchange) edit(o *object, add []byte) []sse.Splice {
	if add == nil {
		return nil
	}
	metrics := func(o *object) func(member) bool {
		return func(m member) bool { return !ex.proxy.keepMetrics && o.is(m, "metrics") && o.raw[m.value] == '{' }
	}
	splices := o.edit(metrics(o), add)
	if m, n := o.get("response"); n > 0 {
		if response, ok := o.sub(m); ok {
			splices = append(splices, response.edit(metrics(&response))...)
			slices.SortFunc(splices, func(a, b sse.Splice) int { return a.From - b.From })
		}
	}
	return splices
}

// clientLeft reports whether the client is gone, and not only because it has its answer.
func (ex *exchange) clientLeft() bool {
	return errors.Is(ex.ctx.Err(), context.Canceled) && (ex.out == nil || !ex.out.given())
}

// answerBegan is called with vLLM's answer, whose body it wraps or edits where it is to carry timings.
func (ex *exchange) answerBegan(resp *http.Response) {
	defer func() { cleanTrailer(resp.Trailer) }() // whose names are announced in the head
	ex.headers = time.Now()
	ex.status = resp.StatusCode
	if ex.body != nil {
		ex.body.drop()
	}
	if ex.upload != nil && !ex.upload.ended.Load() {
		resp.Header.Set("Connection", "close")
	}
	if ex.out == nil && resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { resp.Body = newEnding(ex, resp) }()
	}
	if resp.StatusCode != http.StatusOK || !ex.known {
		return
	}
	coding := codingOf(resp)
	if coding == otherCoding {
		ex.unedited("content_encoding")
		return
	}
	if !ex.single {
		ex.unedited("several_choices")
		return
	}
	switch contentType := resp.Header.Get("Content-Type"); {
	case isStream(contentType):
		resp.Body = newStream(ex, coding.decode(resp.Body), ex.proxy.maxEvent)
		resp.ContentLength = -1
		resp.Header.Del("Content-Length")
		resp.Header.Del("Content-Encoding")
	case isJSON(contentType):
		ex.editBody(resp, coding)
	default:
		ex.unedited("content_type")
	}
}

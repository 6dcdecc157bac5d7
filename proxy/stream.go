package proxy

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/sse"
	"github.com/vllm-timings/vllm-timings/timings"
)

// stream is the body of a streamed answer on its way to the client.
//
// Events are passed on as they are, as soon as they are whole. The event that is to carry `timings` is the usage event
// where the client sees it, else the one with the finish reason: that one is held until the usage event tells the token
// counts, which vLLM sends in the same instant. Once the first token is through, events that hold nothing of interest are
// handed on without being framed or copied: see passes.
//
// It has no goroutine: Read works in the goroutine of the proxy. It is not safe for concurrent use.
type stream struct {
	ex     *exchange
	src    io.ReadCloser
	framer *sse.Framer

	// Usage that the client did not ask for is taken out: the event that is there for it, and what the events of
	// tokens have.
	hideLast, hideRunning bool

	out     []byte // for the client
	given   int    // of out
	end     error  // from src
	endDone bool   // what is to be done at the end has been

	tail []byte  // came last: the beginning of an event, which the framer does not have
	like pattern // of an event in which nothing matters

	object  object     // of the event under way
	verdict sse.Event  // an event that decides, when deciding: all before it is passed on first
	held    *sse.Event // the event with the finish reason
	heldFor []byte     // the running timings that it gets if the final ones go elsewhere
	after   []byte     // what came after held

	deciding bool
	settled  bool // nothing more is to be added
	dropped  bool // the last event was taken out

	first    time.Time // arrival of the first token
	last     time.Time // arrival of the last token
	now      time.Time // arrival of what is being read
	previous time.Time // arrival of what was read before it
	before   time.Time // of what came before the last token

	step     uint64          // of the engine, in which the last token came
	prefills []time.Duration // what the prefill time may be
}

func newStream(ex *exchange, src io.ReadCloser, limit int) *stream {
	return &stream{
		ex:          ex,
		src:         src,
		framer:      sse.NewFramer(limit),
		hideLast:    !ex.showUsage,
		hideRunning: !ex.showUsage || ex.ownRunning,
		now:         ex.headers,
	}
}

var (
	keyFinish  = []byte(`"finish_reason"`)
	keyUsage   = []byte(`"usage"`)
	keyTimings = []byte(`"timings"`)
	keyError   = []byte(`"error"`)
	done       = []byte("[DONE]")
	lastEvent  = []byte("data: [DONE]\n\n")
)

// Read gives the client's bytes. It waits for vLLM, and at the end of the answer for its metrics.
func (s *stream) Read(p []byte) (int, error) {
	for {
		switch {
		case s.given < len(s.out):
			n := copy(p, s.out[s.given:])
			if s.given += n; s.given == len(s.out) {
				s.out, s.given = s.out[:0], 0
			}
			return n, nil
		case s.deciding:
			s.deciding = false
			s.decide(&s.verdict)
			s.events()
		case s.end != nil && s.endDone:
			return 0, s.end
		case s.end != nil:
			s.finish()
		default:
			if n := s.read(p); n > 0 {
				return n, nil
			}
		}
	}
}

// wait waits for vLLM where Read would.
func (s *stream) wait() {
	if src, ok := s.src.(waiter); ok && s.given == len(s.out) && !s.deciding && s.end == nil {
		src.wait()
	}
}

// Close closes vLLM's answer.
func (s *stream) Close() error { return s.src.Close() }

// read waits for vLLM, and either returns how many bytes of p can go to the client as they are, or puts into s.out what it may get.
func (s *stream) read(p []byte) int {
	if len(p) < len(s.tail)+minRead && len(s.tail) > 0 {
		s.framer.Feed(s.tail)
		s.tail = s.tail[:0]
	}
	n := copy(p, s.tail)
	s.tail = s.tail[:0]
	read, err := s.src.Read(p[n:])
	s.previous, s.now = s.now, time.Now()
	b := p[:n+read]
	if err == nil {
		same := s.alike(b)
		whole := same
		if same < len(b) {
			whole = wholeEvents(b)
		}
		if whole > 0 {
			s.tail = append(s.tail, b[whole:]...)
			if b = b[:whole]; same == whole || s.passes(b[same:]) {
				s.tick()
				s.out = nil // not needed for as long as this goes on
				s.ex.complete = s.ex.complete || bytes.HasSuffix(b, lastEvent) && !s.ex.clientLeft()
				return whole
			}
		}
	}
	s.end = err
	if len(b) > 0 {
		s.framer.Feed(b)
		s.events()
	}
	return 0
}

// tick notes that a token came, for the prefill times of all streams.
func (s *stream) tick() {
	if s.ex.retrieved {
		return // the engine did that some time ago
	}
	steps := &s.ex.proxy.windows.steps
	if s.prefills == nil {
		s.prefills = steps.Prefills(s.ex.headers, s.first)
	}
	s.step = steps.Tick(s.now, s.step)
}

// boring reports whether b has nothing that matters once the first token is through. JSON escapes quotes in texts, so
// no text can look like a member; white space may stand anywhere that JSON allows it.
func boring(b []byte) bool {
	return !hasMember(b, keyFinish, '"') && !hasMember(b, keyUsage, '{') && !hasMember(b, keyTimings, 0) && !hasMember(b, keyError, 0)
}

// events takes the events that are whole.
func (s *stream) events() {
	for !s.deciding {
		ev, ok := s.framer.Next()
		if !ok {
			return
		}
		s.event(&ev)
	}
}

func (s *stream) event(ev *sse.Event) {
	if ev.Piece {
		late := s.dropped && string(ev.Raw) == "\n"
		if s.dropped = false; late {
			return // it belongs to the event that was taken out
		}
		if !ev.HasData() && len(ev.Raw) > 1 {
			s.ex.unedited("event_too_large")
		}
		s.pass(ev.Raw)
		return
	}
	s.dropped = false
	data := ev.Data(nil)
	switch {
	case isDone(data):
		s.ex.complete = !s.ex.clientLeft() // or it did not get this
		if s.held != nil {
			s.verdict, s.deciding = *ev, true
			return
		}
		if !s.settled {
			s.ex.unedited("no_usage")
		}
		s.settled = true
		s.pass(ev.Raw)
		return
	case !ev.HasData(),
		s.held == nil && !s.first.IsZero() && !s.ex.perToken && boring(data),
		s.settled && !s.hideLast && !s.hideRunning:
		s.pass(ev.Raw)
		return
	case !s.object.parse(data):
		s.pass(ev.Raw)
		return
	}
	s.chunk(ev)
}

// isDone reports whether data is what OpenAI's streams end with.
func isDone(data []byte) bool { return bytes.Equal(bytes.TrimSpace(data), done) }

// chunk takes an event with an object, which s.object has.
func (s *stream) chunk(ev *sse.Event) {
	f := s.ex.facts(&s.object)
	if f.failed {
		s.giveUp("upstream_error")
	}
	if f.several {
		s.giveUp("several_choices")
	}
	if f.token {
		if s.first.IsZero() {
			s.first = s.now
		}
		s.last, s.before = s.now, s.previous
	}
	if f.usage && !f.last && !f.finish && s.hideRunning && !s.ex.askedRunning && s.ex.dialect.options() {
		// vLLM from 0.19 on sends usage in every event when it is started with --enable-force-include-usage, and not
		// when only we ask for it: its clients are used to see it.
		s.hideLast, s.hideRunning = false, false
	}
	var running []byte
	if s.ex.perToken && f.token && !s.settled {
		running = s.running()
	}
	switch {
	case f.last && !s.settled:
		s.verdict, s.deciding = *ev, true
	case f.last && s.hideLast:
		s.dropped = true
	case f.finish && !s.settled && s.held == nil && (s.hideLast || f.usage):
		s.held, s.heldFor = ev.Clone(), running
	case running != nil || s.hideRunning && f.usage:
		s.passEdited(ev, s.hidden(&s.object, running))
	default:
		s.pass(ev.Raw)
	}
}

// running returns the timings so far, for `timings_per_token`: what was observed, as the engine tells its figures only
// at the end.
func (s *stream) running() []byte {
	if !s.ex.usage.Known || !s.ex.proxy.sources.Has(timings.Observed) || s.ex.upstreamTimings {
		return nil
	}
	u := s.ex.usage.Value
	f := timings.FromObserved(u, timings.Phases{
		Prefill: timings.Some(s.first.Sub(s.ex.headers)),
		Decode:  timings.Some(s.last.Sub(s.first)),
	})
	if !f.Useful() {
		return nil
	}
	return timingsMember(&f)
}

// pass gives bytes to the client, behind the event that is held.
func (s *stream) pass(raw []byte) {
	if s.held == nil {
		s.out = append(s.out, raw...)
		return
	}
	s.after = append(s.after, raw...)
	if len(s.after) > sse.MinLimit {
		s.giveUp("no_usage")
	}
}

func (s *stream) passEdited(ev *sse.Event, splices []sse.Splice) {
	if s.held == nil {
		s.out = ev.Edit(s.out, splices...)
	} else {
		s.after = ev.Edit(s.after, splices...)
	}
}

// hidden returns the edit of an event that takes out usage that straight vLLM would not have sent, and adds members.
func (s *stream) hidden(o *object, add ...[]byte) []sse.Splice {
	usage, n := o.get("usage")
	switch {
	case !s.hideRunning || n == 0 || o.raw[usage.value] != '{':
		return o.edit(nil, add...)
	case s.ex.nullUsage:
		return append([]sse.Splice{{From: usage.value, To: usage.end, With: []byte("null")}}, o.edit(nil, add...)...)
	}
	return o.edit(func(m member) bool { return m == usage }, add...)
}

// giveUp makes the answer go on without `timings`.
func (s *stream) giveUp(reason string) {
	if !s.settled {
		s.ex.unedited(reason)
		s.settled = true
	}
	s.release()
}

// release passes on the event that was held, with more members.
func (s *stream) release(add ...[]byte) {
	if s.held == nil {
		return
	}
	ev := s.held
	s.held = nil
	var o object
	if o.parse(ev.Data(nil)) {
		s.out = ev.Edit(s.out, s.hidden(&o, add...)...)
	}
	s.out = append(s.out, s.after...)
	s.after = nil
}

// decide makes the timings when ev, the usage event or [DONE], tells that all is known that will be.
func (s *stream) decide(ev *sse.Event) {
	isUsage := !isDone(ev.Data(nil))
	var moved [][]byte
	if isUsage && s.hideLast && s.held != nil {
		moved = s.onlyIn(s.held)
	}
	member := s.settle()
	s.settled = true
	switch {
	case !isUsage:
		s.release(member)
		s.pass(ev.Raw)
	case s.hideLast:
		if s.held == nil && member != nil {
			s.ex.unedited("no_finish_event")
		}
		s.release(append(moved, member)...)
		s.dropped = true
	default:
		s.ex.complete = !s.ex.dialect.options() && !s.ex.clientLeft() // the others end with [DONE]
		s.release(s.heldFor)
		s.out = ev.Edit(s.out, s.ex.edit(&s.object, member)...)
	}
}

// onlyIn returns the members of the usage event that the event to which the answer's end goes instead lacks: what vLLM
// sends there when it sends no usage event (`system_fingerprint`), and a patched vLLM's `timings`.
func (s *stream) onlyIn(target *sse.Event) (members [][]byte) {
	var o object
	if !o.parse(target.Data(nil)) {
		return nil
	}
	for _, m := range s.object.members {
		key := gjson.ParseBytes(s.object.raw[m.key:m.keyEnd]).String()
		if key != "usage" && key != "metrics" && !o.has(key) {
			members = append(members, bytes.Clone(s.object.raw[m.key:m.end]))
		}
	}
	return members
}

// settle makes the figures of the answer and returns the member that carries them, nil if there is none.
func (s *stream) settle() []byte {
	var p timings.Phases
	if !s.first.IsZero() {
		if s.prefills == nil {
			s.prefills = s.ex.proxy.windows.steps.Prefills(s.ex.headers, s.first)
		}
		s.ex.prefills = s.prefills
		p.Prefill = timings.Some(s.prefills[0])
		p.Decode = timings.Some(s.last.Sub(s.first))
	}
	return s.ex.settle(p, s.before, s.now)
}

// finish does what is left when vLLM's answer is over.
func (s *stream) finish() {
	s.endDone = true
	if s.held != nil {
		if errors.Is(s.end, io.EOF) {
			s.release(s.settle())
		} else {
			s.giveUp("upstream_error")
		}
		s.settled = true
	}
	s.out = append(s.out, s.framer.Rest()...)
	if !errors.Is(s.end, io.EOF) {
		s.ex.bodyFailed(s.end)
	} else if !s.settled {
		s.ex.unedited("no_usage")
	}
}

// isStream reports whether a content type is that of an event stream.
func isStream(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// Package sse cuts a byte stream into server-sent events without changing a byte of it.
//
// It knows the framing of https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
// and nothing else: no JSON, no clock, no I/O. Concatenating the Raw of every event that Next returned,
// and what Rest returns at the end, gives the stream byte for byte.
package sse

import (
	"bytes"
	"slices"
)

// MinLimit is the smallest event size, in bytes, that a Framer can be limited to.
const MinLimit = 16 << 20

// Event is one event of the stream with all of its bytes.
// It is valid until the next call of the Framer's Next or Feed.
type Event struct {
	// Raw is everything from the first byte of the event to the end of the blank line that ended it.
	Raw []byte
	// Piece is true for bytes that are no whole event: a part of one that is longer than the
	// Framer's limit, or the line feed of a CRLF whose carriage return has already ended an event.
	// They are to be passed on as they are, the second kind only where the event before it was.
	Piece bool

	data []span
}

// span is a range of bytes of Event.Raw.
type span struct{ from, to int }

// Clone returns a copy of the event that stays valid.
func (e *Event) Clone() *Event {
	return &Event{Raw: bytes.Clone(e.Raw), Piece: e.Piece, data: slices.Clone(e.data)}
}

// HasData reports whether the event has a data field.
func (e *Event) HasData() bool { return len(e.data) > 0 }

// Data returns the event's data: the value of its data line or, where there are several, their values
// joined by line feeds in scratch, which is grown as needed and may be nil.
func (e *Event) Data(scratch []byte) []byte {
	switch len(e.data) {
	case 0:
		return nil
	case 1:
		return e.Raw[e.data[0].from:e.data[0].to]
	}
	scratch = scratch[:0]
	for i, s := range e.data {
		if i > 0 {
			scratch = append(scratch, '\n')
		}
		scratch = append(scratch, e.Raw[s.from:s.to]...)
	}
	return scratch
}

// Splice replaces bytes From to To of an event's data by With.
type Splice struct {
	From, To int
	With     []byte
}

// Edit appends the event to dst with splices made in its data, which must be in ascending order and not
// overlap. Offsets count in what Data returns. The line ends between data lines stay, so that every line
// keeps its field name. With must not contain line ends, nor go into an empty line that has no colon.
func (e *Event) Edit(dst []byte, splices ...Splice) []byte {
	at := 0 // all of Raw before it has been written or left out
	for _, sp := range splices {
		off, inserted := 0, false // off: offset of the data line in Data
		for _, s := range e.data {
			end := off + s.to - s.from
			if !inserted && sp.From <= end {
				raw := s.from + sp.From - off
				dst = append(dst, e.Raw[at:raw]...)
				dst = append(dst, sp.With...)
				at, inserted = raw, true
			}
			if from, to := max(sp.From, off), min(sp.To, end); from < to {
				dst = append(dst, e.Raw[at:s.from+from-off]...)
				at = s.from + to - off
			}
			off = end + 1
		}
	}
	return append(dst, e.Raw[at:]...)
}

var bom = []byte("\xef\xbb\xbf")

var dataName = []byte("data")

// keep is the buffer size, in bytes, above which a Framer gives an emptied buffer back.
const keep = 64 << 10

// Framer cuts the bytes that it is fed into events. The zero value is not usable: see NewFramer.
// It is not safe for concurrent use.
type Framer struct {
	limit int

	buf   []byte // fed and not yet returned; the event under way starts at 0 after compaction
	start int    // of the event under way in buf
	line  int    // start of the line under way in buf
	scan  int    // all before it has been searched for line ends

	data    []span // of the event under way, relative to start
	began   bool   // a byte of the stream has been framed (a BOM may only be the very first)
	crEnded bool   // the last event ended with CR, so an LF that follows belongs to it
	long    bool   // the event under way has passed the limit: its parts are passed on as they come
}

// NewFramer returns a Framer that gives out events of up to limit bytes whole; longer ones come in pieces.
// A limit below MinLimit is raised to it.
func NewFramer(limit int) *Framer {
	return &Framer{limit: max(limit, MinLimit)}
}

// Whole reports whether p, if it were fed now, would be whole events with LF line ends, so that it can be
// passed on without being fed. It may be false for such bytes too.
func (f *Framer) Whole(p []byte) bool {
	return f.Between() && bytes.HasSuffix(p, []byte("\n\n")) && bytes.IndexByte(p, '\r') < 0
}

// Between reports whether what is fed next begins an event, and not the stream.
func (f *Framer) Between() bool { return f.Idle() && f.began && !f.crEnded }

// Idle reports whether nothing that was fed is still to be returned.
func (f *Framer) Idle() bool { return f.start == len(f.buf) && !f.long }

// Feed adds p, of which it keeps a copy, to what is to be framed.
func (f *Framer) Feed(p []byte) {
	if f.start > 0 {
		rest := f.buf[f.start:]
		if len(rest) == 0 && cap(f.buf) > keep {
			f.buf = nil // one long event must not cost its size for the rest of the stream
		} else {
			f.buf = f.buf[:copy(f.buf, rest)]
		}
		f.line -= f.start
		f.scan -= f.start
		f.start = 0
	}
	f.buf = append(f.buf, p...)
}

// Next returns the next event, or false when more bytes are needed.
func (f *Framer) Next() (Event, bool) {
	if f.crEnded && f.start < len(f.buf) {
		f.crEnded = false
		if f.buf[f.start] == '\n' {
			f.restart(f.start + 1)
			return Event{Raw: f.buf[f.start-1 : f.start], Piece: true}, true
		}
	}
	if !f.began && f.start < len(f.buf) && !f.skipBOM() {
		return Event{}, false
	}
	for {
		end := lineEnd(f.buf[f.scan:])
		if end < 0 {
			f.scan = len(f.buf)
			return f.overflow()
		}
		end += f.scan
		next := end + 1
		if f.buf[end] == '\r' {
			switch {
			case next < len(f.buf) && f.buf[next] == '\n':
				next++
			case next == len(f.buf) && end > f.line:
				// The LF of a CRLF may still come. Only a blank line makes anything happen,
				// and this is none, so nothing is late by waiting for the next byte.
				f.scan = end
				return f.overflow()
			}
		}
		blank := end == f.line
		if !blank {
			f.field(end)
			f.line, f.scan = next, next
			continue
		}
		ev := Event{Raw: f.buf[f.start:next], data: f.data, Piece: f.long}
		if f.long {
			ev.data = nil
		}
		f.crEnded = f.buf[next-1] == '\r'
		f.restart(next)
		return ev, true
	}
}

// Rest returns the bytes of an event that the stream ended in. By the specification it is to be ignored by
// a reader; a proxy passes it on.
func (f *Framer) Rest() []byte {
	rest := f.buf[f.start:]
	f.restart(len(f.buf))
	return rest
}

// restart begins a new event at offset at.
func (f *Framer) restart(at int) {
	f.start, f.line, f.scan = at, at, at
	f.data = f.data[:0]
	f.long = false
	f.began = true
}

// skipBOM starts the first line after a byte order mark and reports whether enough bytes are there to know.
func (f *Framer) skipBOM() bool {
	head := f.buf[f.start:]
	if len(head) < len(bom) && bytes.HasPrefix(bom, head) {
		return false
	}
	f.began = true
	if bytes.HasPrefix(head, bom) {
		f.line += len(bom)
		f.scan = f.line
	}
	return true
}

// field notes where the value of the line that ends at end is if it is a data field.
func (f *Framer) field(end int) {
	if f.long {
		return
	}
	line := f.buf[f.line:end]
	if !bytes.HasPrefix(line, dataName) {
		return
	}
	from := len(dataName)
	switch {
	case len(line) == from: // a name without a colon has an empty value
	case line[from] != ':':
		return
	default:
		from++
		if from < len(line) && line[from] == ' ' {
			from++
		}
	}
	base := f.line - f.start
	f.data = append(f.data, span{base + from, base + len(line)})
}

// overflow returns what has been fed of an event that is longer than the limit.
func (f *Framer) overflow() (Event, bool) {
	if !f.long && len(f.buf)-f.start <= f.limit {
		return Event{}, false
	}
	if f.scan == f.start {
		return Event{}, false
	}
	f.long = true
	f.data = f.data[:0]
	// A line under way stays under way: a virtual line start before the buffer tells that it is not blank.
	inLine := f.scan > f.line
	ev := Event{Raw: f.buf[f.start:f.scan], Piece: true}
	f.start = f.scan
	f.line = f.scan
	if inLine {
		f.line--
	}
	return ev, true
}

// lineEnd returns the index of the first CR or LF of b, or -1.
func lineEnd(b []byte) int {
	lf := bytes.IndexByte(b, '\n')
	if lf >= 0 {
		b = b[:lf]
	}
	if cr := bytes.IndexByte(b, '\r'); cr >= 0 {
		return cr
	}
	return lf
}

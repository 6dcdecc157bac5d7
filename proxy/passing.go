package proxy

import "bytes"

// Most of a stream is events of which nothing matters but that they arrive. This file is about passing them on for less
// than net/http itself costs. What it is not sure of goes the long way, through the framer.

const (
	// maxTail is how many bytes of an unfinished event are kept outside of the framer.
	maxTail = 1 << 10
	// minRead is how much room a read is given at least.
	minRead = 1 << 10
)

var (
	eventEnd = []byte("\n\n")
	// texts is what comes before the text of a token.
	texts = [][]byte{[]byte(`"content":"`), []byte(`"text":"`), []byte(`"reasoning":"`), []byte(`"reasoning_content":"`)}
)

// wholeEvents returns how much of b, which comes behind what the framer has, is whole events if lines end in LF. What follows is
// the beginning of an event, which can be kept until there is more of it: nothing in it is to be passed on yet.
// 0: not known, or too long to be kept.
func wholeEvents(b []byte) int {
	end := len(b)
	for {
		end = bytes.LastIndexByte(b[:end], '\n')
		switch {
		case end < 1 || len(b)-end-1 > maxTail:
			return 0
		case b[end-1] == '\n':
			if bytes.IndexByte(b[end+1:], '\r') >= 0 {
				return 0
			}
			return end + 1
		}
	}
}

// passes reports whether b can go to the client as it is.
func (s *stream) passes(b []byte) bool {
	if s.held != nil || s.first.IsZero() || s.ex.perToken || !s.framer.Whole(b) {
		return false
	}
	learned := false
	for len(b) > 0 {
		// A line feed cannot be in JSON's strings, so the first one nearly always ends the event.
		end := bytes.IndexByte(b, '\n') + 1
		if end < len(b) && b[end] == '\n' && s.like.fits(b[:end]) {
			b = b[end+1:]
			continue
		}
		if end = bytes.Index(b, eventEnd) + len(eventEnd); end < len(eventEnd) {
			end = len(b)
		}
		// In an event of several lines a value may stand in another line than its name.
		if bytes.Count(b[:end], eventEnd[:1]) != len(eventEnd) || !boring(b[:end]) {
			return false
		}
		if !learned { // one will do: there may be none that is like another
			s.like.learn(b[:end])
			learned = true
		}
		b = b[end:]
	}
	return true
}

// pattern is an event of which only its text may differ in the next ones: then nothing else matters in them either,
// without a search for the members that would.
type pattern struct {
	bytes []byte // up to the quote that opens the text, then from the one that closes it
	head  int
}

// learn takes ev, which is boring, for the pattern if it has a text.
func (p *pattern) learn(ev []byte) {
	for _, key := range texts {
		at := bytes.Index(ev, key)
		if at < 0 {
			continue
		}
		at += len(key)
		length := bytes.IndexByte(ev[at:], '"')
		if length < 0 || bytes.IndexByte(ev[at:at+length], '\\') >= 0 {
			continue
		}
		first, _, _ := bytes.Cut(ev[at+length:], eventEnd)
		p.bytes = append(append(p.bytes[:0], ev[:at]...), first...)
		p.bytes = append(p.bytes, '\n')
		p.head = at
		return
	}
}

// fits reports whether line, with the line feed, is the pattern with another text, which has no quote.
func (p *pattern) fits(line []byte) bool {
	n := len(line) - len(p.bytes)
	return p.head > 0 && n >= 0 &&
		bytes.Equal(line[:p.head], p.bytes[:p.head]) &&
		bytes.Equal(line[p.head+n:], p.bytes[p.head:]) &&
		bytes.IndexByte(line[p.head:p.head+n], '"') < 0
}

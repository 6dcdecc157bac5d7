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

// looking reports whether events of tokens are looked at only for whether they matter.
func (s *stream) looking() bool { return s.held == nil && !s.first.IsZero() && !s.ex.perToken }

// alike returns how much of b, from its beginning, is events that can go to the client as they are because they equal one
// that could but for its text. Nearly every token of a stream with pauses is one such event and nothing else. It comes when
// this code has long left the processor's caches, so that what counts is how few functions and how little memory this takes.
func (s *stream) alike(b []byte) int {
	if !s.looking() || !s.framer.Between() {
		return 0
	}
	all := 0
	for all < len(b) {
		n := s.like.length(b[all:])
		if n == 0 {
			break
		}
		all += n
	}
	return all
}

// passes reports whether b can go to the client as it is.
func (s *stream) passes(b []byte) bool {
	if !s.looking() || !s.framer.Whole(b) {
		return false
	}
	learned := false
	for len(b) > 0 {
		if n := s.like.length(b); n > 0 {
			b = b[n:]
			continue
		}
		end := bytes.Index(b, eventEnd) + len(eventEnd)
		if end < len(eventEnd) {
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
	bytes []byte // up to the quote that opens the text, then from the one that closes it to the event's end
	head  int
}

// learn takes ev, which is boring and ends in an empty line, for the pattern if it has a text.
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
		p.bytes = append(append(p.bytes[:0], ev[:at]...), ev[at+length:]...)
		p.head = at
		return
	}
}

// length returns the length of the event that b begins with, in bytes, if it is the pattern with another text, which has
// no quote, and no line feed as JSON's strings have none. 0: it is not.
func (p *pattern) length(b []byte) int {
	if p.head == 0 || len(b) < len(p.bytes) || !bytes.Equal(b[:p.head], p.bytes[:p.head]) {
		return 0
	}
	end := p.head
	for end < len(b) && b[end] != '"' && b[end] >= ' ' { // a text is short
		end++
	}
	rest := p.bytes[p.head:]
	if !bytes.HasPrefix(b[end:], rest) {
		return 0
	}
	return end + len(rest)
}

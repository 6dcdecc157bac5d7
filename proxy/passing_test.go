package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/sse"
)

func TestWholeEvents(t *testing.T) {
	for b, want := range map[string]int{
		"":                            0,
		"\n":                          0,
		"data: a\n":                   0,
		"data: a\n\n":                 9,
		"data: a\n\ndata: b":          9,
		"data: a\n\ndata: b\n":        9,
		"data: a\n\ndata: b\n\n":      18,
		"data: a\n\n\n":               10,
		"data: a\n\ndata: b\r":        0, // it may be whole
		"data: a\r\n\r\ndata: b\n\nd": 20,
		"data: a\n\n" + strings.Repeat("d", maxTail+1): 0,
	} {
		if got := wholeEvents([]byte(b)); got != want {
			t.Errorf("%q: %d, want %d", b, got, want)
		}
	}
}

func TestPattern(t *testing.T) {
	const head, tail = `data: {"id":"1","choices":[{"index":0,"delta":{"content":"`, `"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	var p pattern
	if p.length([]byte(head+"a"+tail)) != 0 {
		t.Error("an empty pattern fits")
	}
	p.learn([]byte(": nothing\n\n"))
	p.learn([]byte(head + "a" + tail))
	for event, want := range map[string]bool{
		head + "a" + tail:                        true,
		head + tail:                              true,
		head + "long er" + tail:                  true,
		head + "ä\u007f" + tail:                  true,
		head + `a\n\\` + tail:                    true,
		head + `a\"b` + tail:                     false,
		head + "a\nb" + tail:                     false,
		head + "a\n\ndata: [DONE]\n\n" + tail:    false,
		head + "a\r" + tail:                      false,
		head + `"},"usage":{},"x":{"a":"` + tail: false,
		head + "a" + strings.Replace(tail, "null}]", `"stop"}]`, 1): false,
		strings.Replace(head, "1", "2", 1) + "a" + tail:             false,
		head:                            false,
		head[:20]:                       false,
		head + strings.Repeat("a", 200): false,
		head + "a" + strings.TrimSuffix(tail, "\n"):   false,
		head + "a" + strings.TrimSuffix(tail, "\n\n"): false,
		": a\n\n": false,
		"\n":      false,
		"":        false,
	} {
		for _, next := range []string{"", "d", head, head + "a" + tail} {
			length := 0
			if want {
				length = len(event)
			} else if len(next) > 1 { // together they may be an event
				continue
			}
			if got := p.length([]byte(event + next)); got != length {
				t.Errorf("%q: %d, want %d", event+next, got, length)
			}
		}
	}
}

// TestAlike checks how much of a read is passed on by comparing alone, and that it never is before, or where, events
// have to be looked into.
func TestAlike(t *testing.T) {
	const head, tail = `data: {"choices":[{"delta":{"content":"`, `"},"finish_reason":null}]}` + "\n\n"
	const one, other = head + "a" + tail, `data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}` + "\n\n"
	opened := func() *stream {
		s := &stream{ex: &exchange{}, framer: sse.NewFramer(0), first: time.Now()}
		s.framer.Feed([]byte(one))
		s.framer.Next()
		if !s.passes([]byte(one)) {
			t.Fatal("a token does not pass")
		}
		return s
	}
	for b, want := range map[string]int{
		"":                              0,
		one:                             len(one),
		head + "bcd" + tail + one:       2*len(one) + 2,
		one + one[:len(one)-1]:          len(one),
		one + other:                     len(one),
		other + one:                     0,
		"\n" + one:                      0,
		one + "\n" + one:                len(one),
		one + "data: [DONE]\n\n":        len(one),
		one + ": ping\n\n" + one:        len(one),
		one[:len(one)-1] + "\r\n" + one: 0,
	} {
		if got := opened().alike([]byte(b)); got != want {
			t.Errorf("%q: %d, want %d", b, got, want)
		}
	}
	for what, change := range map[string]func(s *stream){
		"in the midst of an event": func(s *stream) { s.framer.Feed([]byte("data: ")) },
		"before the first token":   func(s *stream) { s.first = time.Time{} },
		"behind the finish reason": func(s *stream) { s.held = &sse.Event{} },
		"with timings per token":   func(s *stream) { s.ex.perToken = true },
	} {
		s := opened()
		change(s)
		if got := s.alike([]byte(one)); got != 0 {
			t.Errorf("%s: %d", what, got)
		}
	}
}

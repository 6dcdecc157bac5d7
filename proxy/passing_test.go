package proxy

import (
	"strings"
	"testing"
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
	const head, tail = `data: {"id":"1","choices":[{"index":0,"delta":{"content":"`, `"},"logprobs":null,"finish_reason":null}]}` + "\n"
	var p pattern
	if p.fits([]byte(head + "a" + tail)) {
		t.Error("an empty pattern fits")
	}
	p.learn([]byte(": nothing\n\n"))
	p.learn([]byte(head + "a" + tail + "\n"))
	for line, want := range map[string]bool{
		head + "a" + tail:                        true,
		head + tail:                              true,
		head + "long er" + tail:                  true,
		head + `a\n\\` + tail:                    true,
		head + `a\"b` + tail:                     false,
		head + `"},"usage":{},"x":{"a":"` + tail: false,
		head + "a" + strings.Replace(tail, "null}]", `"stop"}]`, 1): false,
		strings.Replace(head, "1", "2", 1) + "a" + tail:             false,
		head[:20]: false,
		head + "a" + strings.TrimSuffix(tail, "\n"): false,
		": a\n": false,
		"\n":    false,
	} {
		if got := p.fits([]byte(line)); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
}

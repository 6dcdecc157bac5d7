package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/tidwall/gjson"
)

// read reads the events of an answer, whole or not, into a, and says what is wrong with them. An answer that is not over
// has no end, and a last event that is not whole; all else must be as in one that is.
func (c *call) read(raw []byte, whole bool, a *seen) error {
	if !c.stream {
		if !whole {
			return nil
		}
		return c.readWhole(raw, a)
	}
	tokens, finished, over, usages := 0, 0, false, 0
	for len(raw) > 0 {
		ev, rest, ok := bytes.Cut(raw, []byte("\n\n"))
		if !ok {
			if whole {
				return fmt.Errorf("the last event has no end: %q", ev)
			}
			return nil
		}
		raw = rest
		_, data, ok := bytes.Cut(ev, dataField)
		switch {
		case !ok:
			return fmt.Errorf("an event without data: %q", ev)
		case over:
			return fmt.Errorf("an event behind the last: %q", ev)
		case bytes.Equal(data, doneData):
			over = true
			continue
		case !gjson.ValidBytes(data):
			return fmt.Errorf("no JSON: %q", data)
		}
		o := gjson.ParseBytes(data)
		if o.Get(c.token).Str != "" {
			tokens++
		}
		place := false // timings may be here
		switch {
		case c.openAI:
			finish := o.Get("choices.0.finish_reason").Type == gjson.String
			if finish {
				finished++
			}
			place = finish && !c.usage
			if u := o.Get("usage"); u.IsObject() {
				if !c.usage {
					return fmt.Errorf("usage that was not asked for: %q", data)
				}
				usages++
				place = true
				if err := c.counts(u, a); err != nil {
					return err
				}
			}
		case o.Get("type").Str == c.last:
			place = true
			finished++
			if err := c.counts(o.Get(c.kind.usage), a); err != nil {
				return err
			}
			over = c.last == "response.completed"
		case o.Get("type").Str == "message_stop":
			over = true
		}
		if err := c.timings(o, place, a); err != nil {
			return err
		}
	}
	switch {
	case !whole:
		return nil
	case tokens != c.tokens:
		return fmt.Errorf("%d tokens of %d", tokens, c.tokens)
	case finished != 1 || !over || c.usage != (usages == 1):
		return fmt.Errorf("%d finish events, the end %v, %d usage events where asked for is %v", finished, over, usages, c.usage)
	}
	return nil
}

func (c *call) readWhole(raw []byte, a *seen) error {
	if !gjson.ValidBytes(raw) {
		return fmt.Errorf("no JSON: %q", raw)
	}
	o := gjson.ParseBytes(raw)
	if n := len(strings.Fields(o.Get(c.text).Str)); n != c.tokens {
		return fmt.Errorf("%d tokens of %d", n, c.tokens)
	}
	if err := c.counts(o.Get("usage"), a); err != nil {
		return err
	}
	return c.timings(o, true, a)
}

// seen is what an answer told.
type seen struct {
	prompt                      int // tokens, 0 if it did not tell
	timings                     int
	predicted, computed, reused int
	estimated                   bool
}

// counts reads usage.
func (c *call) counts(u gjson.Result, a *seen) error {
	if n := int(u.Get(c.predicted).Int()); n != c.tokens {
		return fmt.Errorf("usage has %d tokens of %d", n, c.tokens)
	}
	a.prompt = 0
	for _, key := range c.kind.prompt {
		a.prompt += int(u.Get(key).Int())
	}
	return nil
}

// timings reads the timings of an event or a whole answer, if it has any. `place` says whether it may.
func (c *call) timings(o gjson.Result, place bool, a *seen) error {
	n := strings.Count(o.Raw, `"timings":`)
	if n == 0 {
		return nil
	}
	t := o.Get("timings")
	if a.timings += n; a.timings > 1 || !place || !t.IsObject() {
		return fmt.Errorf("%d timings, allowed here is %v: %s", a.timings, place, o.Raw)
	}
	a.predicted, a.computed, a.reused = int(t.Get("predicted_n").Int()), int(t.Get("prompt_n").Int()), int(t.Get("cache_n").Int())
	a.estimated = t.Get("estimated").Bool()
	if a.predicted != c.tokens || a.prompt > 0 && a.computed+a.reused != a.prompt {
		return fmt.Errorf("timings of %d and %d tokens, not of %d and %d: %s", a.computed+a.reused, a.predicted, a.prompt, c.tokens, t.Raw)
	}
	if strings.Contains(o.Raw, `"metrics":{`) {
		return fmt.Errorf("metrics beside timings: %s", o.Raw)
	}
	return nil
}

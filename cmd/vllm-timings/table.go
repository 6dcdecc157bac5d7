package main

import (
	"fmt"
	"net/http"
	"strings"
	"unicode"

	"github.com/vllm-timings/vllm-timings/metrics"
)

// mark says how good something is.
type mark string

const (
	good   mark = "ok"
	better mark = "!" // it could be
	bad    mark = "fail"
	open   mark = "?"
)

// colour is an escape sequence of terminals (ECMA-48).
type colour string

const (
	green  colour = "\x1b[32m"
	yellow colour = "\x1b[33m"
	red    colour = "\x1b[31m"
	reset  colour = "\x1b[0m"
)

var colourOf = map[string]colour{
	string(good): green, string(better): yellow, string(bad): red, string(open): yellow,
	isExact: green, isEstimated: yellow, isMissing: red, isUnknown: yellow,
}

// fact is a row of what was found.
type fact struct {
	mark       mark
	name, text string
}

// table is what people read.
func (f *findings) table(coloured bool) string {
	var b strings.Builder
	cell := func(text string, width int) {
		c, ok := colourOf[text]
		padding := strings.Repeat(" ", max(0, width-len(text)))
		if coloured && ok {
			text = string(c) + text + string(reset)
		}
		b.WriteString(text + padding)
	}
	b.WriteString(clean(f.Upstream) + "\n\n")
	for _, row := range f.facts() {
		b.WriteString("  ")
		cell(string(row.mark), 4)
		fmt.Fprintf(&b, "  %-19s  %s\n", row.name, clean(row.text))
	}
	if len(f.Endpoints) > 0 {
		fmt.Fprintf(&b, "\n  %-20s  %-12s  %-8s  %-9s  %s\n", "endpoint", "answer", "source", "alone", "under load")
	}
	for i := 0; i < len(f.Endpoints); i += 2 { // whole and streamed
		whole, stream := f.Endpoints[i], f.Endpoints[i+1]
		rows, names := []endpointVerdict{whole, stream}, []string{"JSON", "stream"}
		if whole.Source == stream.Source {
			rows, names = rows[:1], []string{"JSON, stream"}
		}
		for j, v := range rows {
			fmt.Fprintf(&b, "  %-20s  %-12s  %-8s  ", v.Endpoint, names[j], v.Source)
			cell(v.Alone, 9)
			b.WriteString("  ")
			cell(v.UnderLoad, 0)
			b.WriteByte('\n')
		}
	}
	if len(f.Advice) > 0 {
		b.WriteString("\nWhat to change:\n")
	}
	for _, a := range f.Advice {
		b.WriteString("  - " + a + "\n")
	}
	b.WriteString("\n" + f.Verdict + "\n")
	return b.String()
}

// facts are the rows of what was found.
func (f *findings) facts() []fact {
	if !f.Reachable {
		return []fact{{bad, "reachable", "no: " + f.Error}}
	}
	facts := []fact{{good, "reachable", "yes"}}
	row := func(ok bool, otherwise mark, name, yes, no string) {
		if ok {
			facts = append(facts, fact{good, name, yes})
		} else {
			facts = append(facts, fact{otherwise, name, no})
		}
	}
	if f.Sidecar {
		facts = append(facts, fact{bad, "vllm-timings", "answers there: what follows is seen through it"})
	}
	row(f.Health == http.StatusOK, bad, "/health", "200", statusText(f.Health))
	row(f.Version != "", open, "version", f.Version, "not told: it may be no vLLM")
	noModels := "none"
	if f.KeyNeeded {
		noModels = "not told " + f.key()
	}
	row(len(f.Models) > 0, open, "models", list(f.Models), noModels)
	if !f.VLLM {
		return facts
	}
	facts = append(facts, f.requestFact())
	answer := func(b *bool, name, yes, no, unknown string) {
		if b == nil {
			facts = append(facts, fact{open, name, unknown})
			return
		}
		row(*b, better, name, yes, no)
	}
	unknown := "not found out"
	switch {
	case f.Sidecar:
		answer(f.Native, "per-request metrics", "", "", "vllm-timings takes them out of answers")
	case is(f.Timings):
		// They have it all.
	default:
		answer(f.Native, "per-request metrics", "in answers", "not in answers", unknown)
	}
	if f.Cached == nil && f.Timings != nil {
		unknown = "this version tells them only where there are any"
	}
	if !is(f.Timings) || f.Sidecar {
		answer(f.Cached, "cached tokens", "in usage", "not in usage", unknown)
	}
	if is(f.Timings) && !f.Sidecar {
		row(!f.estimates, better, "timings", "in answers: vLLM is patched, or is another server that has them", "in answers, and they are estimates")
	}
	return append(facts, f.Metrics.facts()...)
}

// key says how it was asked where a key is needed.
func (f *findings) key() string {
	if f.keyGiven {
		return "with this key"
	}
	return "without a key"
}

func statusText(status int) string {
	if status == 0 {
		return "no answer"
	}
	return fmt.Sprintf("status %d", status)
}

func (f *findings) requestFact() fact {
	const name = "request"
	switch r := f.Request; {
	case r == nil && f.noRequest:
		return fact{open, name, "not sent (--no-request)"}
	case r == nil && f.KeyNeeded:
		return fact{open, name, "not sent " + f.key()}
	case r == nil:
		return fact{open, name, "not sent: no model is known, give --model"}
	case r.Error != "":
		return fact{bad, name, fmt.Sprintf("%s of %s: %s", r.Endpoint, r.Model, r.Error)}
	default:
		return fact{good, name, fmt.Sprintf("%s of %s: answered in %s", r.Endpoint, r.Model, millis(r.MS))}
	}
}

func (m *metricsPage) facts() []fact {
	switch m.mode {
	case metrics.ModeFiltered, metrics.ModeFull:
	case metrics.ModeNoStats:
		return []fact{{better, "/metrics", "has no numbers of requests"}}
	default:
		return []fact{{better, "/metrics", "cannot be read: " + m.Error}}
	}
	page := fact{good, "/metrics", "filtered; a reading takes " + millis(m.ReadingMS)}
	if m.mode == metrics.ModeFull {
		page = fact{better, "/metrics", "only as a whole; a reading takes " + millis(m.ReadingMS)}
	}
	if m.ReadingMS > slowReading {
		page.mark = better
	}
	engines := fact{good, "engines", fmt.Sprint(m.Engines)}
	if m.Balanced {
		engines = fact{bad, "engines", "of several vLLMs, which answer by turns"}
	}
	return []fact{page, engines}
}

func millis(ms float64) string { return fmt.Sprintf("%.1f ms", ms) }

// clean makes a text from elsewhere fit for a terminal: one line, no escape sequences, not too long.
func clean(s string) string {
	const most = 300
	runes := []rune(strings.ToValidUTF8(s, "?"))
	if len(runes) > most {
		runes = append(runes[:most], []rune("...")...)
	}
	for i, r := range runes {
		if !unicode.IsPrint(r) {
			runes[i] = ' '
		}
	}
	return string(runes)
}

package main

import (
	"fmt"
	"io"
	"strings"
)

// writePeers prints the table of --peers as Markdown: what is added to direct, and for what is compared the ratio within a
// repetition.
func (t *table) writePeers(w io.Writer, args []string) {
	samples, loud := 0, 0
	for _, m := range t.measured {
		for _, all := range m.results {
			samples += len(all)
			for _, r := range all {
				if r.Others > mostOthers {
					loud++
				}
			}
		}
	}
	t.head(w, args)
	fmt.Fprintf(w, " In brackets: the ratio to %s, of llama-swap + sidecar to %s alone.", plain, llamaSwap)
	fmt.Fprintf(w, " Of %d samples, %d were left in which other processes had more than %.0f %% (%d were measured again); they count only in cells with a *, where there are no others.\n\n", samples, loud, 100*mostOthers, t.repeated)
	fmt.Fprint(w, "| load | figure |")
	for _, c := range t.list {
		fmt.Fprintf(w, " %s |", c.name)
	}
	fmt.Fprint(w, " sidecar must be |\n|---|---|")
	fmt.Fprintln(w, strings.Repeat("---:|", len(t.list)+1))
	for i := range t.measured {
		t.peerRows(w, &t.measured[i])
	}
	slower := false
	for _, c := range t.list {
		slower = slower || c.slow
	}
	if slower {
		fmt.Fprint(w, "\nLiteLLM got less work, in the first repetition only:")
		for _, m := range t.measured {
			if m.slow > 1 {
				fmt.Fprintf(w, " %s 1/%d;", m.name, m.slow)
			}
		}
		fmt.Fprintln(w, " of the tokens or answers. It gets all of the streams at once, but each begins when it has come through: not in step, and not spread out. Some are over when their memory is looked at.")
	}
	for _, m := range t.measured {
		for _, c := range t.list {
			if why := lastError(m.results[c.name]); why != "" {
				fmt.Fprintf(w, "\nLost by %s, %s: %s\n", c.name, m.name, why)
			}
		}
	}
	t.complain(w)
}

func lastError(all []result) (why string) {
	for _, r := range all {
		if r.Error != "" {
			why, _, _ = strings.Cut(r.Error, "\n")
		}
	}
	return why
}

func (t *table) peerRows(w io.Writer, m *measurement) {
	title := m.title
	for i := range m.figures {
		f := &m.figures[i]
		added := ""
		if f.added {
			added = " added"
		}
		unit := ""
		if f.unit != "" && f.unit != "/s" {
			unit = ", " + f.unit
		}
		fmt.Fprintf(w, "| %s | %s%s%s |", title, f.title, added, unit)
		title = ""
		for j := range t.list {
			fmt.Fprintf(w, " %s |", t.cell(m, f, &t.list[j]))
		}
		fmt.Fprintf(w, " %s |\n", t.wanted(f))
	}
	t.counts(w, m, "lost", "0", func(r *result) int { return r.Failed })
	t.counts(w, m, "with `timings`", "", func(r *result) int { return r.Timings })
}

// counts is a row of how many of all answers are something.
func (t *table) counts(w io.Writer, m *measurement, title, must string, of func(*result) int) {
	fmt.Fprintf(w, "| | %s |", title)
	for _, c := range t.list {
		n, all := 0, 0
		for i := range m.results[c.name] {
			n, all = n+of(&m.results[c.name][i]), all+m.results[c.name][i].Asked
		}
		fmt.Fprintf(w, " %d of %d |", n, all)
	}
	fmt.Fprintf(w, " %s |\n", must)
}

func (t *table) cell(m *measurement, f *figure, c *contender) string {
	values := m.values(c.name, f)
	if len(values) == 0 {
		return "-"
	}
	v := median(values)
	if f.added && c.name != direct {
		v -= median(m.values(direct, f))
	}
	text := number(v)
	if f.added && c.name == direct {
		text = "(" + text + ")" // not added to anything
	}
	quiet := false
	for _, r := range m.results[c.name] {
		quiet = quiet || r.Others <= mostOthers && r.Events > 0
	}
	if !quiet {
		text += "*"
	}
	if ratios := m.ratios(f, c); len(ratios) > 0 {
		text += fmt.Sprintf(" (%.2f)", median(ratios))
	}
	return text
}

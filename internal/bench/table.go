package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// table is what a run prints.
type table struct {
	measured []measurement
	list     []contender
	judged   bool // times are judged, not only what was lost
	repeated int  // samples that were measured again, see measureQuiet
	missed   []string
}

func newTable(measured []measurement, list []contender, judged bool) *table {
	t := &table{measured: measured, list: list, judged: judged}
	for i := range measured {
		t.sane(&measured[i])
		if judged {
			t.judge(&measured[i])
		}
	}
	return t
}

func (t *table) miss(format string, args ...any) {
	t.missed = append(t.missed, fmt.Sprintf(format, args...))
}

func (t *table) ok() bool { return len(t.missed) == 0 }

// sane checks that the sidecar lost nothing and did its work, and that nobody else lost so much that the comparison means nothing.
func (t *table) sane(m *measurement) {
	for _, c := range t.list {
		failed, timings, answers, why := 0, 0, 0, ""
		for _, r := range m.results[c.name] {
			failed, timings, answers = failed+r.Failed, timings+r.Timings, answers+r.Asked
			if r.Error != "" {
				why = r.Error
			}
		}
		switch {
		case !c.foreign && failed > 0:
			t.miss("%s: %s lost %d of %d answers: %s", m.name, c.name, failed, answers, why)
		case c.name == plain && failed > max(5, answers/20):
			t.miss("%s: %s lost %d of %d answers, too many to compare with", m.name, c.name, failed, answers)
		}
		if c.timings && timings != answers-failed {
			t.miss("%s: only %d of %d answers had timings", m.name, timings, answers-failed)
		}
	}
}

// ours is the contender that is judged.
func (t *table) ours() *contender {
	for i := range t.list {
		if t.list[i].name == sidecar {
			return &t.list[i]
		}
	}
	return &contender{}
}

func (t *table) judge(m *measurement) {
	for i := range m.figures {
		f := &m.figures[i]
		if ratios := m.ratios(f, t.ours()); f.target > 0 && len(ratios) > 0 {
			switch ratio := median(ratios); {
			case f.more && ratio < f.target:
				t.miss("%s, %s: %.3f times the plain proxy's, must be at least %g", m.name, f.title, ratio, f.target)
			case !f.more && ratio > f.target:
				t.miss("%s, %s: %.3f times the plain proxy's, must be at most %g", m.name, f.title, ratio, f.target)
			}
		}
		if v := median(m.values(sidecar, f)); f.limit > 0 && v > f.limit {
			t.miss("%s, %s: %.1f %s, must be at most %g", m.name, f.title, v, f.unit, f.limit)
		}
	}
}

// write prints the table as Markdown.
func (t *table) write(w io.Writer, args []string) {
	t.head(w, args)
	fmt.Fprint(w, "\n\n")
	fmt.Fprint(w, "| load | figure |")
	for _, c := range t.list {
		fmt.Fprintf(w, " %s |", c.name)
	}
	fmt.Fprint(w, " sidecar/plain (range) | must be |\n|---|---|")
	fmt.Fprintln(w, strings.Repeat("---:|", len(t.list)+2))
	for i := range t.measured {
		t.rows(w, &t.measured[i])
	}
	t.complain(w)
}

func (t *table) complain(w io.Writer) {
	for _, missed := range t.missed {
		fmt.Fprintf(w, "\nMISSED: %s\n", missed)
	}
}

// head says what was run, where and when.
func (t *table) head(w io.Writer, args []string) {
	reps := 0
	var others []float64
	for _, m := range t.measured {
		for _, all := range m.results {
			reps = max(reps, len(all))
			for _, r := range all {
				others = append(others, 100*r.Others)
			}
		}
	}
	command := strings.Join(append([]string{"go run ./internal/bench"}, args...), " ")
	fmt.Fprintf(w, "`%s`, %s. %s, %d cores, %s, %s/%s. %d repetitions; other processes had %.0f %% of the machine (median; at most %.0f %%).",
		command, time.Now().UTC().Format(time.DateOnly), cpuModel(), runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH, reps, median(others), slices.Max(append(others, 0)))
}

func (t *table) rows(w io.Writer, m *measurement) {
	title := m.title
	for i := range m.figures {
		f := &m.figures[i]
		fmt.Fprintf(w, "| %s | %s%s |", title, f.title, unitOf(f))
		title = ""
		for _, c := range t.list {
			fmt.Fprintf(w, " %s |", number(median(m.values(c.name, f))))
		}
		if r := m.ratios(f, t.ours()); len(r) > 0 {
			fmt.Fprintf(w, " %.2f (%.2f to %.2f) |", median(r), slices.Min(r), slices.Max(r))
		} else {
			fmt.Fprint(w, " |")
		}
		fmt.Fprintf(w, " %s |\n", t.wanted(f))
	}
	fmt.Fprintf(w, "| | lost answers |")
	for _, c := range t.list {
		lost, all := 0, 0
		for _, r := range m.results[c.name] {
			lost += r.Failed
			all += r.Asked
		}
		fmt.Fprintf(w, " %d of %d |", lost, all)
	}
	fmt.Fprint(w, " | 0 |\n")
}

func unitOf(f *figure) string {
	switch {
	case f.added:
		return ", " + f.unit + " (ratio: of what is added to direct)"
	case f.unit != "" && f.unit != "/s":
		return ", " + f.unit
	}
	return ""
}

func (t *table) wanted(f *figure) string {
	switch {
	case f.target > 0 && f.more:
		return fmt.Sprintf("≥ %g", f.target)
	case f.target > 0:
		return fmt.Sprintf("≤ %g", f.target)
	case f.limit > 0:
		return fmt.Sprintf("≤ %g %s", f.limit, f.unit)
	}
	return ""
}

// number gives three digits that count.
func number(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v >= 100 || v <= -100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10 || v <= -10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown CPU"
	}
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}

package main

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"
)

// run is all that was seen.
type run struct {
	options
	clients *load    // of the sidecar
	beside  *load    // of vLLM itself
	gaps    []gap    // without vLLM
	metrics page     // at the end
	samples []sample // under load, one a second
	before  sample
	after   sample
	ended   []string // what the sidecar did at its end that it must not
}

// row is a line of the table.
type row struct {
	what, client, sidecar, allowed string
	ok                             bool
}

// grace is how long after its client left the sidecar may learn that vLLM died, and take that for the reason: it is bounded by
// the delays of a busy machine only.
const grace = 10 * time.Second

// blurred returns how many of those that left did so when vLLM died or was dead, and how many of the others may have had
// their whole answer in the buffers of their connection: which of the two the sidecar sees, nobody can know.
func (r *run) blurred() (dead, complete, tokens int) {
	for _, d := range r.clients.left {
		atGap := false
		for _, g := range r.gaps {
			atGap = atGap || d.from.Before(g.to.Add(grace)) && d.to.Add(grace).After(g.from)
		}
		if atGap {
			dead++
		}
		if d.late {
			complete++
			tokens += d.tokens
		}
	}
	return dead, complete, tokens
}

// equal compares a sum of the clients with the sidecar's, which may be below by less and above by more.
func equal(what string, client int, sidecar float64, less, more int) row {
	allowed := "equal"
	if less > 0 || more > 0 {
		allowed = fmt.Sprintf("%d to +%d", -less, more)
	}
	diff := sidecar - float64(client)
	return row{what, fmt.Sprint(client), fmt.Sprintf("%.0f", sidecar), allowed, -float64(less) <= diff && diff <= float64(more)}
}

// sums are the comparisons of what was counted.
func (r *run) sums() []row {
	c, m := r.clients, r.metrics
	dead, complete, tokens := r.blurred()
	codes := func(list ...string) float64 { return m.sum("requests_total", append([]string{"code"}, list...)...) }
	inAll := c.whole + c.aborted + c.refused + c.broken
	return []row{
		{"sent = whole + aborted + upstream errors", fmt.Sprintf("%d = %d + %d + %d", c.sent, c.whole, c.aborted, c.refused+c.broken), "", "equal", c.sent == inAll},
		{"answers that are not as they must be", fmt.Sprint(c.wrong), "", "0", c.wrong == 0},
		{"the same of vLLM without the sidecar", fmt.Sprintf("%d of %d", r.beside.wrong, r.beside.sent), "", "0", r.beside.wrong == 0},
		equal("`requests_total`", c.sent, m.sum("requests_total"), 0, 0),
		equal("`requests_total`, code 502", c.refused, codes("502"), 0, dead),
		equal("`requests_total`, codes 200 and 499", c.whole+c.broken+c.aborted, codes("200", "499"), dead, 0),
		equal("`upstream_errors_total`", c.refused+c.broken, m.sum("upstream_errors_total"), 0, dead),
		equal("`client_disconnects_total`", c.aborted, m.sum("client_disconnects_total"), max(dead, complete), 0),
		equal("`timings_total`", c.timed, m.sum("timings_total"), 0, complete),
		equal("`timings_total`, estimated", c.estimated, m.sum("timings_total", "exactness", "estimated"), 0, complete),
		equal("`predicted_tokens_total`", c.predicted, m.sum("predicted_tokens_total"), 0, tokens),
		equal("`prompt_tokens_total`", c.computed, m.sum("prompt_tokens_total"), 0, complete*longestPrompt),
		equal("`cached_tokens_total`", c.reused, m.sum("cached_tokens_total"), 0, complete*longestPrompt),
		{"`timings_total` + `unedited_total` = `requests_total`, code 200", "", fmt.Sprintf("%.0f + %.0f = %.0f", m.sum("timings_total"), m.sum("unedited_total"), codes("200")),
			"equal", m.sum("timings_total")+m.sum("unedited_total") == codes("200")},
		{"`in_flight_requests` at the end", "", fmt.Sprint(m.sum("in_flight_requests")), "0", m.sum("in_flight_requests") == 0},
	}
}

// write writes the tables and reports whether everything is as it must be.
func (r *run) write(w io.Writer) (ok bool) {
	c := r.clients
	fmt.Fprintf(w, "`go run ./internal/soak --for %v --streams %d --seed %d --restart-every %v`, %s. %d cores, %s, %s/%s.\n\n",
		r.length, r.streams, r.seed, r.restartEvery, time.Now().Format(time.DateOnly), runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	fmt.Fprintf(w, "%d requests, %d at a time: %d whole answers (%d streams, %d not), %d with `timings` (%d estimated). %d clients left. vLLM was killed %d times, %d answers more broke off by themselves; %d requests were refused with 502, %d answers broke. %d requests went to vLLM without the sidecar.\n\n",
		c.sent, r.streams, c.whole, c.streams, c.whole-c.streams, c.timed, c.estimated, c.aborted, len(r.gaps), c.died, c.refused, c.broken, r.beside.sent)
	ok = true
	sign := func(fine bool) string {
		ok = ok && fine
		if fine {
			return "ok"
		}
		return "**no**"
	}
	fmt.Fprint(w, "| what | clients | sidecar | may differ | |\n|---|---:|---:|---|---|\n")
	for _, line := range r.sums() {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", line.what, line.client, line.sidecar, line.allowed, sign(line.ok))
	}
	fmt.Fprint(w, "\n| | second fifth | last fifth | may grow by | | before | after | may be left | |\n|---|---:|---:|---|---|---:|---:|---|---|\n")
	for _, res := range resources {
		from, to, flat := res.grown(r.samples)
		left, freed := "not judged", ""
		if res.left >= 0 {
			left, freed = res.print(res.left), sign(res.freed(r.before, r.after))
		}
		fmt.Fprintf(w, "| %s | %s | %s | %.0f %% + %s | %s | %s | %s | %s | %s |\n", res.name, res.print(from), res.print(to), 100*res.share, res.print(res.more),
			sign(flat), res.print(res.of(r.before)), res.print(res.of(r.after)), left, freed)
	}
	for _, problems := range [][]string{c.errors, r.beside.errors, r.ended} {
		for _, p := range problems {
			fmt.Fprintf(w, "\n- %s", sign(false)+": "+strings.ReplaceAll(p, "\n", " "))
		}
	}
	fmt.Fprintln(w)
	return ok
}

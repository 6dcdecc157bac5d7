package main

import "slices"

// median returns the middle of values, 0 if there are none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// mean returns one result for several of the same job.
func mean(all []result) (r result) {
	avg := func(of func(*result) *float64) {
		for i := range all {
			*of(&r) += *of(&all[i]) / float64(len(all))
		}
	}
	avg(func(r *result) *float64 { return &r.Seconds })
	avg(func(r *result) *float64 { return &r.P50 })
	avg(func(r *result) *float64 { return &r.P99 })
	avg(func(r *result) *float64 { return &r.TTFT })
	avg(func(r *result) *float64 { return &r.CPU })
	avg(func(r *result) *float64 { return &r.SteadyCPU })
	avg(func(r *result) *float64 { return &r.Allocs })
	avg(func(r *result) *float64 { return &r.PerStream })
	avg(func(r *result) *float64 { return &r.Others })
	for _, one := range all {
		r.Events += one.Events
		r.Asked += one.Asked
		r.Failed += one.Failed
		r.Timings += one.Timings
		r.Max = max(r.Max, one.Max)
		if one.Error != "" {
			r.Error = one.Error
		}
	}
	r.Seconds *= float64(len(all)) // as Events is of all
	return r
}

// ratios returns, for each repetition, what a contender has divided by what the one has that it is compared with.
// Repetitions in which either was disturbed are left out, if there are others.
func (m *measurement) ratios(f *figure, c *contender) []float64 {
	var quiet, all []float64
	for rep := range min(len(m.results[c.name]), len(m.results[c.beside])) {
		mine, other := &m.results[c.name][rep], &m.results[c.beside][rep]
		ours, theirs := f.of(mine), f.of(other)
		if f.added {
			if rep >= len(m.results[direct]) {
				continue
			}
			without := f.of(&m.results[direct][rep])
			ours, theirs = ours-without, theirs-without
		}
		if theirs <= 0 || mine.Events == 0 || other.Events == 0 {
			continue
		}
		all = append(all, ours/theirs)
		if mine.Others <= mostOthers && other.Others <= mostOthers {
			quiet = append(quiet, ours/theirs)
		}
	}
	if m.onlyQuiet && len(quiet) > 0 {
		return quiet
	}
	return all
}

// values returns a contender's figure of each repetition, of those that were not disturbed if there are any.
func (m *measurement) values(name string, f *figure) []float64 {
	var quiet, all []float64
	for i := range m.results[name] {
		r := &m.results[name][i]
		if r.Events == 0 {
			continue // nothing arrived
		}
		all = append(all, f.of(r))
		if r.Others <= mostOthers {
			quiet = append(quiet, f.of(r))
		}
	}
	if m.onlyQuiet && len(quiet) > 0 {
		return quiet
	}
	return all
}

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

// ratios returns, for each repetition, what the sidecar has divided by what the plain proxy has.
func (m *measurement) ratios(f *figure) (ratios []float64) {
	for rep := range m.results[sidecar] {
		ours, theirs := f.of(&m.results[sidecar][rep]), f.of(&m.results[plain][rep])
		if f.added {
			without := f.of(&m.results[direct][rep])
			ours, theirs = ours-without, theirs-without
		}
		if theirs > 0 {
			ratios = append(ratios, ours/theirs)
		}
	}
	return ratios
}

// values returns a contender's figure of each repetition.
func (m *measurement) values(name string, f *figure) (values []float64) {
	for i := range m.results[name] {
		values = append(values, f.of(&m.results[name][i]))
	}
	return values
}

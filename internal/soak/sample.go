package main

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// page is a reading of the sidecar's own metrics.
type page map[string]*dto.MetricFamily

// scraper reads them over one connection.
type scraper struct {
	url    string
	client *http.Client
}

func newScraper(addr string) *scraper {
	return &scraper{"http://" + addr + "/-/metrics", &http.Client{Transport: &http.Transport{}, Timeout: patience}}
}

func (s *scraper) read() (page, error) {
	resp, err := s.client.Get(s.url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	return families, err
}

// sum adds up the samples of a family that have the label, if one is given.
func (p page) sum(name string, label ...string) float64 {
	f := p["vllm_timings_"+name]
	if f == nil {
		return 0
	}
	sum := 0.0
	for _, m := range f.Metric {
		if len(label) > 0 && !slices.ContainsFunc(m.Label, func(l *dto.LabelPair) bool {
			return l.GetName() == label[0] && slices.Contains(label[1:], l.GetValue())
		}) {
			continue
		}
		sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetUntyped().GetValue()
	}
	return sum
}

// sample is what the sidecar uses at one moment.
type sample struct{ goroutines, descriptors, heap, resident, own float64 }

func (s *scraper) sample(pid int) (sample, error) {
	p, err := s.read()
	if err != nil {
		return sample{}, err
	}
	own, err := ownMemory(pid)
	if err != nil {
		return sample{}, err
	}
	return sample{
		p.sum("go_goroutines"), p.sum("process_open_fds"),
		p.sum("go_memstats_heap_alloc_bytes"), p.sum("process_resident_memory_bytes"), own,
	}, nil
}

// readings are how many samples are taken before and after the load: reading the metrics leads to collections, and what is free is
// known to be so only after some.
const readings = 300

// least takes at least that many, until nothing is left of what was needed only under load, or time is up: idle connections are
// closed after seconds.
func (s *scraper) least(pid int, enough func(sample) bool) (low sample, err error) {
	end := time.Now().Add(time.Minute)
	for n := 1; ; n++ {
		time.Sleep(10 * time.Millisecond)
		now, err := s.sample(pid)
		if err != nil {
			return low, err
		}
		if low == (sample{}) {
			low = now
		}
		low = sample{
			min(low.goroutines, now.goroutines), min(low.descriptors, now.descriptors),
			min(low.heap, now.heap), min(low.resident, now.resident), min(low.own, now.own),
		}
		if n >= readings && (enough(low) || time.Now().After(end)) {
			return low, nil
		}
	}
}

// resource is something that a sidecar which leaks has ever more of.
type resource struct {
	name string
	of   func(sample) float64
	unit float64 // of the table, 1 or MiB
	// The median of the last fifth of the load may be above that of the second by a share, and by so much more. What is
	// left after the load may be above what there was before it by so much. Below 0: not judged.
	share, more, left float64
}

const mib = 1 << 20

var resources = []resource{
	{"goroutines", func(s sample) float64 { return s.goroutines }, 1, 0.1, 20, 2},
	{"descriptors", func(s sample) float64 { return s.descriptors }, 1, 0.1, 20, 2},
	{"heap in use (go_memstats_heap_alloc_bytes), MiB", func(s sample) float64 { return s.heap }, mib, 0.2, 4 * mib, 3 * mib},
	{"memory of its own (Pss_Anon), MiB", func(s sample) float64 { return s.own }, mib, 0.1, 8 * mib, -1},
	{"resident memory, MiB", func(s sample) float64 { return s.resident }, mib, 0.1, 8 * mib, -1},
}

// fifth returns the median of one of the fifths, counted from 0, of the samples.
func (r *resource) fifth(all []sample, n int) float64 {
	var values []float64
	for _, s := range all[len(all)*n/5 : len(all)*(n+1)/5] {
		values = append(values, r.of(s))
	}
	slices.Sort(values)
	if len(values) == 0 {
		return 0
	}
	return values[len(values)/2]
}

func (r *resource) grown(all []sample) (from, to float64, ok bool) {
	from, to = r.fifth(all, 1), r.fifth(all, 4)
	return from, to, to <= from*(1+r.share)+r.more
}

func (r *resource) freed(before, after sample) bool {
	return r.left < 0 || r.of(after) <= r.of(before)+r.left
}

func (r *resource) print(v float64) string {
	if r.unit == 1 {
		return fmt.Sprint(v)
	}
	return fmt.Sprintf("%.1f", v/r.unit)
}

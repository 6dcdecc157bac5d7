package vllmsim

import (
	"strconv"
	"strings"
)

// pyFloat writes a float as Python's repr does.
func pyFloat(v float64) string {
	if a := max(v, -v); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(v, 'e', -1, 64)
	}
	s := strconv.FormatFloat(v, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// sampleFloat writes a sample's value as prometheus_client does: like Python,
// but with an exponent from a million on.
func sampleFloat(v float64) string {
	if v < 1e6 {
		return pyFloat(v)
	}
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(v, 'e', -1, 64), "e")
	return mantissa + "e" + exponent
}

// page writes the text exposition of /metrics. With a filter it writes only
// samples of these names, and the head of a family before its first sample.
type page struct {
	buf    []byte
	filter map[string]bool // nil: everything
	model  string          // label value, escaped
	head   string          // of the family in progress, not yet written
}

func newPage(model string, filter map[string]bool) *page {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	return &page{filter: filter, model: escape.Replace(model)}
}

func (p *page) begin(name, kind, help string) {
	p.head = "# HELP " + name + " " + help + "\n# TYPE " + name + " " + kind + "\n"
}

func (p *page) wants(name string) bool { return p.filter == nil || p.filter[name] }

func (p *page) sample(name, labels string, v float64) {
	if !p.wants(name) {
		return
	}
	p.buf = append(p.buf, p.head...)
	p.head = ""
	p.buf = append(p.buf, name...)
	if labels != "" {
		p.buf = append(p.buf, '{')
		p.buf = append(p.buf, labels...)
		p.buf = append(p.buf, '}')
	}
	p.buf = append(p.buf, ' ')
	p.buf = append(p.buf, sampleFloat(v)...)
	p.buf = append(p.buf, '\n')
}

// created writes the time of a family's creation, which is a family of its
// own in the text but belongs to the one before.
func (p *page) created(name, labels, help string, at float64) {
	if !p.wants(name + "_created") {
		return
	}
	head := p.head
	p.begin(name+"_created", "gauge", help)
	p.head = head + p.head
	p.sample(name+"_created", labels, at)
}

// labels are the engine's labels and one more, in alphabetical order.
func (p *page) labels(extra ...string) string {
	model := `model_name="` + p.model + `"`
	if len(extra) == 0 {
		return `engine="0",` + model
	}
	pair := extra[0] + `="` + extra[1] + `"`
	if extra[0] < "model_name" {
		return `engine="0",` + pair + "," + model
	}
	return `engine="0",` + model + "," + pair
}

func (p *page) gauge(name, help string, v float64) {
	p.begin(name, "gauge", help)
	p.sample(name, p.labels(), v)
}

// counter writes name_total and name_created.
func (p *page) counter(name, help string, v, created float64) {
	p.begin(name+"_total", "counter", help)
	p.sample(name+"_total", p.labels(), v)
	p.created(name, p.labels(), help, created)
}

// value is one series of a family with a label beside the usual ones.
type value struct {
	label string
	v     float64
}

func (p *page) counterBy(name, help, label string, created float64, values ...value) {
	p.begin(name+"_total", "counter", help)
	for _, x := range values {
		p.sample(name+"_total", p.labels(label, x.label), x.v)
	}
	for i, x := range values {
		if i == 0 {
			p.created(name, p.labels(label, x.label), help, created)
			continue
		}
		p.sample(name+"_created", p.labels(label, x.label), created)
	}
}

func (p *page) gaugeBy(name, help, label string, values ...value) {
	p.begin(name, "gauge", help)
	for _, x := range values {
		p.sample(name, p.labels(label, x.label), x.v)
	}
}

func (p *page) histogram(name, help string, bounds []float64, h *histogram, created float64) {
	p.begin(name, "histogram", help)
	if p.wants(name + "_bucket") {
		sum := uint64(0)
		for i, b := range bounds {
			sum += h.counts[i]
			p.sample(name+"_bucket", p.labels("le", pyFloat(b)), float64(sum))
		}
		p.sample(name+"_bucket", p.labels("le", "+Inf"), float64(h.count))
	}
	p.sample(name+"_count", p.labels(), float64(h.count))
	p.sample(name+"_sum", p.labels(), h.sum)
	p.created(name, p.labels(), help, created)
}

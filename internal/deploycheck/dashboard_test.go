package deploycheck

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

const dashboardFile = "deploy/grafana/dashboards/vllm-timings.json"

type (
	dashboard struct {
		UID, Title    string
		SchemaVersion int
		Panels        []panel
		Templating    struct{ List []variable }
	}
	panel struct {
		ID         int
		Type       string
		Title      string
		Datasource source
		GridPos    struct{ H, W, X, Y int }
		Targets    []target
	}
	target struct {
		RefID          string
		Datasource     source
		Expr           string
		Instant, Range bool
	}
	source   struct{ Type, UID string }
	variable struct {
		Name, Type string
		Query      json.RawMessage
		Definition string
		AllValue   string
	}
)

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal([]byte(read(t, dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestDashboard: what Grafana would trip over. Its own types read the file in internal/dockercheck.
func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	// 36 came with Grafana 9, 39 with 10.4, 41 and 42 with 12: later ones migrate it.
	if d.SchemaVersion < 36 || d.SchemaVersion > 42 {
		t.Errorf("schemaVersion %d", d.SchemaVersion)
	}
	variables := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		variables[v.Name] = true
	}
	ids, titles := map[int]bool{}, map[string]bool{}
	var taken []panel
	for _, p := range d.Panels {
		if p.ID == 0 || ids[p.ID] {
			t.Errorf("%s: the id %d is not its own", p.Title, p.ID)
		}
		if p.Title == "" || titles[p.Type+p.Title] {
			t.Errorf("two panels with the title %q", p.Title)
		}
		ids[p.ID], titles[p.Type+p.Title] = true, true
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("%s is at %+v", p.Title, g)
		}
		for _, other := range taken {
			if o := other.GridPos; g.X < o.X+o.W && o.X < g.X+g.W && g.Y < o.Y+o.H && o.Y < g.Y+g.H {
				t.Errorf("%s covers %s", p.Title, other.Title)
			}
		}
		taken = append(taken, p)
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s has no query", p.Title)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] {
				t.Errorf("%s: the refId %q is not its own", p.Title, q.RefID)
			}
			refs[q.RefID] = true
			if want := (source{"prometheus", "${datasource}"}); q.Datasource != want || p.Datasource != want {
				t.Errorf("%s has the data source %v", p.Title, q.Datasource)
			}
			if q.Instant == q.Range {
				t.Errorf("%s %s must be either instant or range", p.Title, q.RefID)
			}
			for _, part := range strings.Split(q.Expr, "$")[1:] {
				name := part[:strings.IndexFunc(part, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') })]
				if !variables[name] {
					t.Errorf("%s %s has the variable %q, which there is not", p.Title, q.RefID, name)
				}
			}
		}
	}
}

// What must come out for the simulated vLLM, at the least and at the most, for each series of a panel. Medians are as
// coarse as their buckets. A busy machine makes a simulated vLLM slower, never faster.
var known = map[string][2]float64{
	"vLLM":                                 {1, 1},
	"Version":                              {1, 1},
	"Exact":                                {0.01, 0.99},
	"Decode speed":                         {1, 1.5 / decodeStep.Seconds()},
	"Parts of the time to the first token": {0.00001, 30},
	"Decode time":                          {0.05, 100},
	"Prefix cache hits":                    {0.1, 0.999},
	"Requests in a window":                 {1, 16},
	"Failed requests":                      {0.01, 0.5},
	"Overhead":                             {0.00001, 1},
}

// liveDashboard runs every query of the dashboard.
func liveDashboard(t *testing.T, s server, page string) {
	d := readDashboard(t)
	values := []string{"$__rate_interval", "1m"}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			if v.AllValue != ".*" {
				t.Errorf("%s: its value for all is %q", v.Name, v.AllValue)
			}
			values = append(values, "$"+v.Name, v.AllValue)
		}
	}
	fill := strings.NewReplacer(values...)
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			expr := fill.Replace(q.Expr)
			checkNames(t, p.Title, expr, page, nil)
			wait(t, fmt.Sprintf("%s %s: %s", p.Title, q.RefID, expr), func() error {
				samples, err := s.query(expr)
				if err != nil {
					return err
				}
				if err := has(samples); err != nil {
					return err
				}
				limits, ok := known[p.Title]
				for _, x := range samples {
					if v := x.value(); ok && (v < limits[0] || v > limits[1]) {
						return fmt.Errorf("%v is %v, must be from %v to %v", x.Metric, v, limits[0], limits[1])
					}
				}
				return nil
			})
		}
	}
	for _, v := range d.Templating.List {
		if v.Type != "query" {
			continue
		}
		// label_values(SELECTOR, LABEL) is Grafana's own; Prometheus' API has it as /label/LABEL/values.
		inner, ok := strings.CutPrefix(strings.TrimSuffix(fill.Replace(v.Definition), ")"), "label_values(")
		comma := strings.LastIndex(inner, ", ")
		if !ok || comma < 0 || !bytes.Contains(v.Query, []byte(`"query"`)) {
			t.Errorf("the variable %s has the query %q", v.Name, v.Definition)
			continue
		}
		samples, err := s.query(fmt.Sprintf("count by (%s) (%s)", inner[comma+2:], inner[:comma]))
		if err != nil || !slices.ContainsFunc(samples, func(x sample) bool { return x.Metric[inner[comma+2:]] != "" }) {
			t.Errorf("the variable %s has no values: %v %v", v.Name, samples, err)
		}
	}
}

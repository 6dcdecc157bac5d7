package deploycheck

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/deploycheck/live"
)

const dashboardFile = "deploy/grafana/dashboards/vllm-timings.json"

func readDashboard(t *testing.T) live.Dashboard {
	t.Helper()
	return live.ReadDashboard(t, filepath.Join(root, dashboardFile))
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
	var taken []live.Panel
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
			if want := (live.Source{Type: "prometheus", UID: "${datasource}"}); q.Datasource != want || p.Datasource != want {
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
func liveDashboard(t *testing.T, s live.Server, page string) {
	d := readDashboard(t)
	for _, q := range d.Queries() {
		checkNames(t, q.Panel, q.Expr, page, nil)
	}
	d.Run(t, s, func(q live.Query, samples []live.Sample) error {
		limits, ok := known[q.Panel]
		for _, x := range samples {
			if v := x.Value(); ok && (v < limits[0] || v > limits[1]) {
				return fmt.Errorf("%v is %v, must be from %v to %v", x.Metric, v, limits[0], limits[1])
			}
		}
		return nil
	})
}

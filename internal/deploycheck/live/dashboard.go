package live

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// Dashboard is what tests look at in a dashboard of Grafana.
type (
	Dashboard struct {
		UID, Title    string
		SchemaVersion int
		Panels        []Panel
		Templating    struct{ List []Variable }
	}
	Panel struct {
		ID         int
		Type       string
		Title      string
		Datasource Source
		GridPos    struct{ H, W, X, Y int }
		Targets    []Target
	}
	Target struct {
		RefID          string
		Datasource     Source
		Expr           string
		Instant, Range bool
	}
	Source   struct{ Type, UID string }
	Variable struct {
		Name, Type string
		Query      json.RawMessage
		Definition string
		AllValue   string
	}
)

// ReadDashboard reads a dashboard's file.
func ReadDashboard(t *testing.T, file string) Dashboard {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var d Dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return d
}

// Query is one query of a panel, as Prometheus gets it.
type Query struct{ Panel, RefID, Expr string }

// fill puts in what Grafana would with "All" chosen everywhere.
func (d Dashboard) fill() *strings.Replacer {
	values := []string{"$__rate_interval", "1m"}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			values = append(values, "$"+v.Name, v.AllValue)
		}
	}
	return strings.NewReplacer(values...)
}

// Queries gives all queries.
func (d Dashboard) Queries() []Query {
	fill := d.fill()
	var all []Query
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			all = append(all, Query{p.Title, q.RefID, fill.Replace(q.Expr)})
		}
	}
	return all
}

// Run runs every query until it has data that check, where not nil, finds right, and then looks for the values of every
// variable.
func (d Dashboard) Run(t *testing.T, s Server, check func(Query, []Sample) error) {
	t.Helper()
	for _, q := range d.Queries() {
		Wait(t, fmt.Sprintf("%s %s: %s", q.Panel, q.RefID, q.Expr), func() error {
			samples, err := s.Query(q.Expr)
			if err == nil {
				err = Has(samples)
			}
			if err == nil && check != nil {
				err = check(q, samples)
			}
			return err
		})
	}
	fill := d.fill()
	for _, v := range d.Templating.List {
		if v.Type != "query" {
			continue
		}
		if v.AllValue != ".*" {
			t.Errorf("%s: its value for all is %q", v.Name, v.AllValue)
		}
		// label_values(SELECTOR, LABEL) is Grafana's own; Prometheus' API has it as /label/LABEL/values.
		inner, ok := strings.CutPrefix(strings.TrimSuffix(fill.Replace(v.Definition), ")"), "label_values(")
		comma := strings.LastIndex(inner, ", ")
		if !ok || comma < 0 || !bytes.Contains(v.Query, []byte(`"query"`)) {
			t.Errorf("the variable %s has the query %q", v.Name, v.Definition)
			continue
		}
		label := inner[comma+2:]
		samples, err := s.Query(fmt.Sprintf("count by (%s) (%s)", label, inner[:comma]))
		if err != nil || !slices.ContainsFunc(samples, func(x Sample) bool { return x.Metric[label] != "" }) {
			t.Errorf("the variable %s has no values: %v %v", v.Name, samples, err)
		}
	}
}

package dockercheck

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	"sigs.k8s.io/yaml"
)

// There is no Grafana here. Its own types of dashboards, panels and queries read the dashboard; what it provisions has
// types only within Grafana itself, which are written down below as its documentation has them.

// classic is the form of dashboards that files have and that every Grafana loads.
//
//lint:ignore SA1019 what is preferred to it needs Grafana 12 and its Kubernetes-like API
type classic = dashboard.Dashboard

// TestGrafanaDashboard: an unknown member is an error, in the options of panels and in queries too.
func TestGrafanaDashboard(t *testing.T) {
	runtime := cog.NewRuntime()
	runtime.RegisterPanelcfgVariant(stat.VariantConfig())
	runtime.RegisterPanelcfgVariant(timeseries.VariantConfig())
	runtime.RegisterDataqueryVariant(prometheus.VariantConfig())
	text := string(contents(t, "deploy/grafana/dashboards/vllm-timings.json"))
	if problems := strict(text); problems != "" {
		t.Fatal(problems)
	}
	for _, member := range []string{"gridPos", "graphMode", "showPoints", "editorMode", "allValue"} {
		if strings.Contains(strict(strings.Replace(text, `"`+member+`"`, `"x`+member+`"`, 1)), "x"+member) {
			continue
		}
		t.Errorf("a wrong name for %s would not be noticed", member)
	}
	var d classic
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatal(err)
	}
	if err := d.Validate(); err != nil {
		t.Error(err)
	}
	queries := 0
	for _, p := range d.Panels {
		if p.Panel == nil || p.Panel.Type == "row" {
			continue
		}
		for _, q := range p.Panel.Targets {
			if _, ok := q.(*prometheus.Dataquery); !ok {
				t.Errorf("%s has a query of the type %T", *p.Panel.Title, q)
			}
			queries++
		}
	}
	if queries < 30 {
		t.Errorf("%d queries", queries)
	}
}

// strict tells what is wrong with a dashboard, "" if nothing is.
func strict(text string) string {
	var d classic
	err := d.UnmarshalJSONStrict([]byte(text))
	// An empty list of errors is nothing wrong, but no nil either.
	if errs, ok := err.(cog.BuildErrors); err == nil || ok && len(errs) == 0 {
		return ""
	}
	return err.Error()
}

// TestGrafanaProvisioning: the data source and the folder are where the dashboard and Prometheus' example have them.
func TestGrafanaProvisioning(t *testing.T) {
	var sources struct {
		APIVersion  int `json:"apiVersion"`
		Datasources []struct {
			Name, UID, Type, Access, URL string
			IsDefault                    bool `json:"isDefault"`
			JSONData                     struct {
				TimeInterval string `json:"timeInterval"`
				HTTPMethod   string `json:"httpMethod"`
			} `json:"jsonData"`
		}
	}
	const file = "deploy/grafana/provisioning/datasources/prometheus.yaml"
	decode(t, file, contents(t, file), &sources)
	var config struct {
		Global struct {
			ScrapeInterval string `json:"scrape_interval"`
		}
	}
	if err := yaml.Unmarshal(contents(t, "deploy/prometheus/prometheus.yml"), &config); err != nil {
		t.Fatal(err)
	}
	if len(sources.Datasources) != 1 || sources.APIVersion != 1 {
		t.Fatalf("%+v", sources)
	}
	if s := sources.Datasources[0]; s.Type != "prometheus" || s.Access != "proxy" || s.URL != "http://prometheus:9090" || s.JSONData.TimeInterval != config.Global.ScrapeInterval {
		t.Errorf("%+v, Prometheus scrapes every %s", s, config.Global.ScrapeInterval)
	}

	var providers struct {
		APIVersion int `json:"apiVersion"`
		Providers  []struct {
			Name, Type            string
			DisableDeletion       bool `json:"disableDeletion"`
			AllowUIUpdates        bool `json:"allowUiUpdates"`
			UpdateIntervalSeconds int  `json:"updateIntervalSeconds"`
			Options               struct{ Path string }
		}
	}
	const provider = "deploy/grafana/provisioning/dashboards/vllm-timings.yaml"
	decode(t, provider, contents(t, provider), &providers)
	if len(providers.Providers) != 1 || providers.APIVersion != 1 || providers.Providers[0].Type != "file" || providers.Providers[0].Options.Path != "/var/lib/grafana/dashboards" {
		t.Errorf("%+v", providers)
	}
}

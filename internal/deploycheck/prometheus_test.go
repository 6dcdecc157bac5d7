package deploycheck

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// prometheusFolder copies deploy/prometheus, with changes to prometheus.yml.
func prometheusFolder(t *testing.T, changes ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"prometheus.yml", "rules.yml", "rules_test.yml"} {
		text := read(t, "deploy/prometheus/"+name)
		if name == "prometheus.yml" {
			for i := 0; i < len(changes); i += 2 {
				if !strings.Contains(text, changes[i]) {
					t.Fatalf("prometheus.yml has no %q", changes[i])
				}
			}
			text = strings.NewReplacer(changes...).Replace(text)
		}
		write(t, dir, name, text)
	}
	return dir
}

// TestPromtool: the files are well-formed, the rules do what their tests say, and each alert has a test in which it
// fires.
func TestPromtool(t *testing.T) {
	promtool := needs.Program(t, "promtool", "prometheus")
	dir := prometheusFolder(t)
	for _, args := range []string{
		"check config --lint=all --lint-fatal prometheus.yml",
		"check rules --lint=all --lint-fatal rules.yml",
		"test rules rules_test.yml",
	} {
		cmd := exec.Command(promtool, strings.Fields(args)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", args, err, out)
		}
	}
	tests := read(t, "deploy/prometheus/rules_test.yml")
	for _, alert := range regexp.MustCompile(`(?m)- alert: (\w+)$`).FindAllStringSubmatch(read(t, "deploy/prometheus/rules.yml"), -1) {
		fires := regexp.MustCompile(`alertname: ` + alert[1] + `\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels`)
		if !fires.MatchString(tests) {
			t.Errorf("rules_test.yml has no test in which %s fires", alert[1])
		}
	}
}

// TestPage: what the program answers at /-/metrics, with samples in every family, is as Prometheus would have it.
func TestPage(t *testing.T) {
	promtool := needs.Program(t, "promtool", "prometheus")
	e := newEngine(t)
	sidecar := sidecar(t, e.url)
	e.round(t.Context(), sidecar, 3)
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = strings.NewReader(get(t, sidecar+"/-/metrics"))
	if out, err := check.CombinedOutput(); err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

// server is a running Prometheus.
type server struct{ url string }

// query runs an expression now.
func (s server) query(expr string) ([]sample, error) {
	var answer struct {
		Status, Error string
		Data          struct {
			ResultType string
			Result     []sample
		}
	}
	if err := s.ask("/api/v1/query?"+url.Values{"query": {expr}}.Encode(), &answer); err != nil {
		return nil, err
	}
	if answer.Status != "success" || answer.Data.ResultType != "vector" {
		return nil, fmt.Errorf("%s: %s %s: %s", expr, answer.Status, answer.Data.ResultType, answer.Error)
	}
	return answer.Data.Result, nil
}

func (s server) ask(path string, answer any) error {
	resp, err := http.Get(s.url + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(answer)
}

// sample is one series of an answer.
type sample struct {
	Metric map[string]string
	Value  [2]any // time, value as a text
}

func (s sample) value() float64 {
	text, _ := s.Value[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// has tells whether there is data: a finite number.
func has(samples []sample) error {
	for _, s := range samples {
		if v := s.value(); !math.IsNaN(v) && !math.IsInf(v, 0) {
			return nil
		}
	}
	return fmt.Errorf("no data: %v", samples)
}

// prometheus starts the real one with our files, before the real program, before a simulated vLLM that always has
// requests. Only the target and the intervals are others.
func prometheus(t *testing.T) (s server, page string) {
	t.Helper()
	program := needs.Program(t, "prometheus", "prometheus")
	e := newEngine(t)
	sidecar := sidecar(t, e.url)
	dir := prometheusFolder(t, "vllm-timings:8010", strings.TrimPrefix(sidecar, "http://"), "_interval: 15s", "_interval: 1s")
	e.traffic(t, sidecar)
	address, _ := start(t, `msg="Listening on" address=(\S+)`, program, "--config.file="+dir+"/prometheus.yml",
		"--storage.tsdb.path="+dir+"/data", "--web.listen-address=127.0.0.1:0", "--log.level=info")
	s = server{"http://" + address}
	wait(t, "samples of each kind", func() error {
		page = get(t, sidecar+"/metrics")
		for _, part := range []string{"upstream_errors_total{", `exactness="estimated"`, `exactness="exact"`, `reason="several_choices"`, `code="503"`} {
			if !strings.Contains(page, part) {
				return errors.New("no " + part)
			}
		}
		return nil
	})
	return s, get(t, sidecar+"/metrics")
}

var metricNames = regexp.MustCompile(`\b(?:vllm_timings_|vllm:)[a-z0-9_]+`)

// checkNames makes sure that each metric in an expression is on the real page, or recorded by a rule.
func checkNames(t *testing.T, where, expr, page string, recorded map[string]bool) {
	t.Helper()
	for name := range recorded {
		expr = strings.ReplaceAll(expr, name, "")
	}
	for _, name := range metricNames.FindAllString(expr, -1) {
		if !strings.Contains(page, "\n"+name+"{") && !strings.Contains(page, "\n"+name+" ") {
			t.Errorf("%s: %s is not on the page of the program", where, name)
		}
	}
}

// TestLive: a real Prometheus with our files scrapes the real program. Every rule works, every recording rule and every
// panel of the dashboard has data, and what is known beforehand has its value.
func TestLive(t *testing.T) {
	s, page := prometheus(t)
	t.Run("rules", func(t *testing.T) { liveRules(t, s, page) })
	t.Run("dashboard", func(t *testing.T) { liveDashboard(t, s, page) })
}

func liveRules(t *testing.T, s server, page string) {
	type rule struct{ Name, Query, Health, LastError, Type string }
	var rules []rule
	recorded := map[string]bool{}
	wait(t, "the rules' first evaluation", func() error {
		var answer struct {
			Data struct{ Groups []struct{ Rules []rule } }
		}
		if err := s.ask("/api/v1/rules", &answer); err != nil {
			return err
		}
		rules = nil
		for _, g := range answer.Data.Groups {
			rules = append(rules, g.Rules...)
		}
		for _, r := range rules {
			if r.Health == "unknown" {
				return errors.New(r.Name + " was not evaluated yet")
			}
		}
		return nil
	})
	for _, r := range rules {
		if r.Health != "ok" {
			t.Errorf("%s: %s: %s", r.Name, r.Health, r.LastError)
		}
		if r.Type == "recording" {
			recorded[r.Name] = true
		}
	}
	if len(recorded) < 9 || len(rules)-len(recorded) < 11 {
		t.Errorf("%d recording rules of %d rules", len(recorded), len(rules))
	}
	for _, r := range rules {
		checkNames(t, r.Name, r.Query, page, recorded)
	}
	for _, name := range slices.Sorted(maps.Keys(recorded)) {
		wait(t, name, func() error {
			samples, err := s.query(name)
			if err != nil {
				return err
			}
			return has(samples)
		})
	}
	if samples, err := s.query(`ALERTS{alertname="VllmTimingsDown"}`); err != nil || len(samples) > 0 {
		t.Error(samples, err)
	}
}

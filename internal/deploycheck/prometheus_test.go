package deploycheck

import (
	"bytes"
	"errors"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/deploycheck/live"
	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// prometheusFolder copies deploy/prometheus, with changes to prometheus.yml.
func prometheusFolder(t *testing.T, changes ...string) string {
	t.Helper()
	return live.PrometheusFolder(t, filepath.Join(root, "deploy/prometheus"), changes...)
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

// prometheus starts the real one with our files, before the real program, before a simulated vLLM that always has
// requests. Only the target and the intervals are others.
func prometheus(t *testing.T) (s live.Server, page string) {
	t.Helper()
	program := needs.Program(t, "prometheus", "prometheus")
	e := newEngine(t)
	sidecar := sidecar(t, e.url)
	dir := prometheusFolder(t, "vllm-timings:8010", strings.TrimPrefix(sidecar, "http://"), "_interval: 15s", "_interval: 1s")
	e.traffic(t, sidecar)
	address, _ := start(t, `msg="Listening on" address=(\S+)`, program, "--config.file="+dir+"/prometheus.yml",
		"--storage.tsdb.path="+dir+"/data", "--web.listen-address=127.0.0.1:0", "--log.level=info")
	s = live.Server{URL: "http://" + address}
	live.Wait(t, "samples of each kind", func() error {
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

func liveRules(t *testing.T, s live.Server, page string) {
	type rule struct{ Name, Query, Health, LastError, Type string }
	var rules []rule
	recorded := map[string]bool{}
	live.Wait(t, "the rules' first evaluation", func() error {
		var answer struct {
			Data struct{ Groups []struct{ Rules []rule } }
		}
		if err := s.Ask("/api/v1/rules", &answer); err != nil {
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
		live.Wait(t, name, func() error {
			samples, err := s.Query(name)
			if err != nil {
				return err
			}
			return live.Has(samples)
		})
	}
	if samples, err := s.Query(`ALERTS{alertname="VllmTimingsDown"}`); err != nil || len(samples) > 0 {
		t.Error(samples, err)
	}
}

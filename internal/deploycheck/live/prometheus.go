// Package live asks a running Prometheus, in tests, whether there is data for what is in deploy: with a simulated vLLM in
// internal/deploycheck, with a real one in internal/e2e.
package live

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// patience is how long something may take that only a busy machine makes slow.
const patience = 2 * time.Minute

// Wait tries until there is no error.
func Wait(t *testing.T, what string, try func() error) {
	t.Helper()
	end := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Replace replaces texts, in pairs, each of which must be there.
func Replace(t *testing.T, where, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("%s has no %q", where, pairs[i])
		}
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// PrometheusFolder copies a folder with a prometheus.yml and other files, with changes to prometheus.yml. Go's test cache
// notices when a file changes that the test reads, but not what only another program reads: so that gets a copy.
func PrometheusFolder(t *testing.T, from string, changes ...string) string {
	t.Helper()
	const config = "prometheus.yml"
	files, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	found := false
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(from, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if f.Name() == config {
			found = true
			text = []byte(Replace(t, config, string(text), changes...))
		}
		if err := os.WriteFile(filepath.Join(dir, f.Name()), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if !found {
		t.Fatalf("%s has no %s", from, config)
	}
	return dir
}

// Server is a running Prometheus.
type Server struct{ URL string }

// Query runs an expression now.
func (s Server) Query(expr string) ([]Sample, error) {
	var answer struct {
		Status, Error string
		Data          struct {
			ResultType string
			Result     []Sample
		}
	}
	if err := s.Ask("/api/v1/query?"+url.Values{"query": {expr}}.Encode(), &answer); err != nil {
		return nil, err
	}
	if answer.Status != "success" || answer.Data.ResultType != "vector" {
		return nil, fmt.Errorf("%s: %s %s: %s", expr, answer.Status, answer.Data.ResultType, answer.Error)
	}
	return answer.Data.Result, nil
}

// Ask gets a JSON answer of its API.
func (s Server) Ask(path string, answer any) error {
	resp, err := http.Get(s.URL + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(answer)
}

// Sample is one series of an answer.
type Sample struct {
	Metric map[string]string
	Point  [2]any `json:"value"` // time, value as a text
}

// Value is the number of the sample, NaN where it is none.
func (s Sample) Value() float64 {
	text, _ := s.Point[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// Has tells whether there is data: a finite number.
func Has(samples []Sample) error {
	for _, s := range samples {
		if v := s.Value(); !math.IsNaN(v) && !math.IsInf(v, 0) {
			return nil
		}
	}
	return fmt.Errorf("no data: %v", samples)
}

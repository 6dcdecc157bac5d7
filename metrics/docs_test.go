package metrics

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

const docsHead = `# The metrics of vllm-timings

` + "`GET /-/metrics`" + ` has these alone, as text or OpenMetrics, as asked. ` + "`GET /metrics`" + ` has them behind vLLM's own, as text.
Besides them there are those of the Go runtime and the process, as ` + "`vllm_timings_go_...` and `vllm_timings_process_...`" + `.

- ` + "`endpoint`" + ` is the route, such as ` + "`/v1/chat/completions`" + `, or ` + "`other`" + ` for what goes through untouched.
- ` + "`source` is `upstream`, `native`, `window` or `observed`; `exactness` is `exact` or `estimated`" + `: see the [README](../README.md#where-each-number-comes-from).
- ` + "`model`" + ` is as the answer names it: the first %d, then ` + "`other`" + `.
- A figure that is not known is not observed. It is never taken for 0.

The table is made from the code: ` + "`go test ./metrics -run TestDocs -update`" + `.

| metric | type | labels | what it is |
|---|---|---|---|
`

// TestDocs: docs/metrics.md has each family of ours, as the code registers it.
func TestDocs(t *testing.T) {
	reg := prometheus.NewRegistry()
	exercised(reg)
	names := ours(t, reg)
	registered(t, reg, names)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, docsHead, maxModels)
	for _, f := range families {
		if !slices.Contains(names, f.GetName()) {
			continue
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), strings.ReplaceAll(f.GetHelp(), "|", `\|`))
	}
	const file = "../docs/metrics.md"
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Errorf("docs/metrics.md is not what the code has; -update writes it. It should be\n%s", &b)
	}
}

// registered makes sure that names are all families of ours: one that has no sample yet is not gathered.
func registered(t *testing.T, reg *prometheus.Registry, names []string) {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() {
		reg.Describe(descs)
		close(descs)
	}()
	n := 0
	for d := range descs {
		m := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())
		switch {
		case m == nil:
			t.Errorf("no name in %s", d)
		case strings.HasPrefix(m[1], Prefix+"go_"), strings.HasPrefix(m[1], Prefix+"process_"):
		case !slices.Contains(names, m[1]):
			t.Errorf("exercised does not move %s", m[1])
		default:
			n++
		}
	}
	if n != len(names) {
		t.Errorf("%d families are registered, %d gathered", n, len(names))
	}
}

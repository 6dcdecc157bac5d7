package main

import (
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// row is a row of the README's table of flags.
type row struct{ flag, env, value string }

// TestREADMEFlags: the table has each flag, its environment variable and its default, in the order of --help. What another
// command has exactly as serve has it stands there once.
func TestREADMEFlags(t *testing.T) {
	exited := -1
	parser, err := newParser(io.Discard, io.Discard, &exited)
	if err != nil {
		t.Fatal(err)
	}
	var want []row
	shared := map[string]*kong.Flag{}
	for _, command := range parser.Model.Children {
		for _, f := range command.Flags {
			if f.Name == "help" {
				continue
			}
			checkHelp(t, command.Name, f)
			name := "--" + f.Name
			if s := shared[f.Name]; s != nil && s.Default == f.Default && s.Help == f.Help {
				continue
			}
			if command.Name == "serve" {
				shared[f.Name] = f
			} else {
				name = command.Name + " " + name
			}
			if (command.Name == "serve" || command.Name == "run") && (len(f.Envs) != 1 || f.Envs[0] != envName(f.Name)) {
				t.Errorf("--%s has the variables %q, errors name %s", f.Name, f.Envs, envName(f.Name))
			}
			want = append(want, row{name, strings.Join(f.Envs, " "), f.Default})
		}
	}
	var got []row
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| `(VLLM_TIMINGS_[^`]+)` \\| (?:`([^`]*)`)? ?\\|").FindAllStringSubmatch(readme(t), -1) {
		got = append(got, row{m[1], m[2], m[3]})
	}
	if !slices.Equal(got, want) {
		t.Errorf("README.md has\n%q\nwant\n%q", got, want)
	}
}

// checkHelp: --help has what the table has.
func checkHelp(t *testing.T, command string, f *kong.Flag) {
	t.Helper()
	_, stdout, _ := run(command, "--help")
	help := strings.Join(strings.Fields(stdout), " ")
	i := strings.Index(help, "--"+f.Name)
	if i < 0 {
		t.Errorf("%s --help has no --%s", command, f.Name)
		return
	}
	end := strings.Index(help[i:], "($"+f.Envs[0]+")")
	if end < 0 || !f.IsBool() && !strings.Contains(help[i:i+end], f.Default) {
		t.Errorf("%s --help does not tell variable and default of --%s", command, f.Name)
	}
}

// TestREADMEExamples: the configurations in the README are those that ship, which TestLlamaSwapExamples tries.
func TestREADMEExamples(t *testing.T) {
	shipped := ""
	for _, name := range []string{"peer", "cmd"} {
		text, err := os.ReadFile("../../deploy/llama-swap/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(strings.TrimSpace(line), "#") {
				shipped += line
			}
		}
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(readme(t), -1)
	if len(blocks) != 2 {
		t.Errorf("%d blocks", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(shipped, b[1]) {
			t.Errorf("not in deploy/llama-swap:\n%s", b[1])
		}
	}
}

// TestREADMEMetrics: the list of metrics has all that are there after a request.
func TestREADMEMetrics(t *testing.T) {
	sim := startSim(t)
	p := start(t, "--listen", "127.0.0.1:0", "--upstream", sim.URL)
	p.log.await(t, "found vLLM")
	ask(t, p)
	p.log.await(t, "predicted_n=5")
	resp, err := client.Get(p.url + "/-/metrics")
	if err != nil {
		t.Fatal(err)
	}
	page := readAll(t, resp)
	names := regexp.MustCompile(`(?m)^# TYPE vllm_timings_(\S+) `).FindAllStringSubmatch(page, -1)
	if resp.StatusCode != http.StatusOK || len(names) < 10 {
		t.Fatalf("%s\n%s", resp.Status, page)
	}
	text := readme(t)
	for _, m := range names {
		if !strings.HasPrefix(m[1], "go_") && !strings.HasPrefix(m[1], "process_") && !strings.Contains(text, "`"+m[1]+"`") {
			t.Errorf("README.md does not name %s", m[1])
		}
	}
}

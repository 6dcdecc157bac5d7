package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// page is a page of the documentation.
func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// row is a row of the table of flags.
type row struct{ flag, env, value string }

// TestFlagsPage: the table has each flag, its environment variable and its default, in the order of --help. What another
// command has exactly as serve has it stands there once.
func TestFlagsPage(t *testing.T) {
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
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| `(VLLM_TIMINGS_[^`]+)` \\| (?:`([^`]*)`)? ?\\|").FindAllStringSubmatch(page(t, "docs/flags.md"), -1) {
		got = append(got, row{m[1], m[2], m[3]})
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/flags.md has\n%q\nwant\n%q", got, want)
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
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(page(t, "README.md"), -1)
	if len(blocks) != 2 {
		t.Errorf("%d blocks", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(shipped, b[1]) {
			t.Errorf("not in deploy/llama-swap:\n%s", b[1])
		}
	}
}

// TestLinks: what the documentation links to is there, headings included.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#: ]*)(?:#([^)]+))?\)`)
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	odd := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	links := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*/*.md"} {
		paths, err := filepath.Glob(filepath.Join("..", "..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text := page(t, strings.TrimPrefix(path, "../../"))
			for _, m := range link.FindAllStringSubmatch(text, -1) {
				links++
				target := path
				if m[1] != "" {
					target = filepath.Join(filepath.Dir(path), m[1])
				}
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s: %s is not there", path, m[1])
				} else if m[2] != "" && !slices.ContainsFunc(heading.FindAllStringSubmatch(page(t, strings.TrimPrefix(target, "../../")), -1), func(h []string) bool {
					return strings.ReplaceAll(strings.ToLower(odd.ReplaceAllString(h[1], "")), " ", "-") == m[2] // as GitHub makes them
				}) {
					t.Errorf("%s: %s has no heading #%s", path, target, m[2])
				}
			}
		}
	}
	if links < 30 {
		t.Errorf("only %d links", links)
	}
}

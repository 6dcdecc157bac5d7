package main

import (
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// TestPatchDocs: the table in docs/patch.md has each flag of each command below `patch`, and its environment variable.
func TestPatchDocs(t *testing.T) {
	exited := -1
	parser, err := newParser(io.Discard, io.Discard, &exited)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(parser.Model.Children, func(n *kong.Node) bool { return n.Name == "patch" })
	type row struct{ env, commands string }
	want := map[string]row{}
	for _, command := range parser.Model.Children[i].Children {
		for _, f := range command.Flags {
			if f.Name != "help" {
				r := want["--"+f.Name]
				want["--"+f.Name] = row{strings.Join(f.Envs, " "), strings.TrimSpace(r.commands + " " + command.Name)}
			}
		}
	}
	text, err := os.ReadFile("../../docs/patch.md")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]row{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(--[^`]+)` \\| ([^|]+) \\| `([^`]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		commands := strings.NewReplacer("`", "", ",", "", "all but `list`", "check apply revert status export").Replace(m[2])
		got[m[1]] = row{m[3], commands}
	}
	for flag, r := range want {
		if got[flag] != r {
			t.Errorf("%s: docs/patch.md has %+v, want %+v", flag, got[flag], r)
		}
	}
	if len(got) != len(want) {
		t.Errorf("docs/patch.md has %d flags, there are %d", len(got), len(want))
	}
}

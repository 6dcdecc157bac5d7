package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
)

// exitNoVLLM is doctor's code where there is no vLLM. exitOK stands for exact numbers, exitFailed for others.
const exitNoVLLM = 2

// doctorCmd has rows of its own in docs/flags.md.
type doctorCmd struct {
	Upstream string `default:"http://127.0.0.1:8000" placeholder:"URL" help:"Address of vLLM itself, or of its socket: unix:///run/vllm.sock. Default ${default}."`
	AccessFlags
	Model     string `env:"VLLM_TIMINGS_DOCTOR_MODEL" placeholder:"NAME" help:"The model that is asked. Default: the first that vLLM serves."`
	NoRequest toggle `env:"VLLM_TIMINGS_DOCTOR_NO_REQUEST" default:"false" help:"Send no request to the model. What its answers have stays unknown then."`
	JSON      toggle `name:"json" env:"VLLM_TIMINGS_DOCTOR_JSON" default:"false" help:"Print JSON."`
}

// Help is what --help says besides the flags.
func (doctorCmd) Help() string {
	return "It sends vLLM one request for two tokens. The key, if one is given, goes with that too. " +
		"Exit codes: 0 every number is exact (/v1/messages at least alone: under load only a patched vLLM has them exact there); " +
		"1 some are estimates, or that could not be found out; 2 no vLLM can be reached, or the command line is wrong."
}

// doctorSettings are the flags as values that can be used.
type doctorSettings struct {
	settings
	model     string
	noRequest bool
	json      bool
}

// complete reads all flags and reports all that is wrong with them at once.
func (c *doctorCmd) complete() (doctorSettings, error) {
	s := doctorSettings{model: c.Model}
	var wrong problems
	var err error
	s.upstream, err = parseUpstream(c.Upstream)
	wrong.add("upstream", c.Upstream, err)
	c.AccessFlags.complete(&s.settings, &wrong)
	s.noRequest, err = parseToggle(c.NoRequest)
	wrong.add("no-request", string(c.NoRequest), err)
	s.json, err = parseToggle(c.JSON)
	wrong.add("json", string(c.JSON), err)
	return s, wrong.err()
}

// check implements checker.
func (c *doctorCmd) check() error {
	_, err := c.complete()
	return err
}

// Run examines vLLM once.
func (c *doctorCmd) Run(e *env) error {
	s, err := c.complete()
	if err != nil {
		return err
	}
	f := examine(e.ctx, &s)
	if e.ctx.Err() != nil {
		return errors.New("it was stopped before all was found out")
	}
	f.conclude()
	if s.json {
		enc := json.NewEncoder(e.stdout)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		err = enc.Encode(f)
	} else {
		_, err = io.WriteString(e.stdout, f.table(colours(e.stdout)))
	}
	if err != nil {
		return err
	}
	return asError(f.ExitCode)
}

// colours reports whether w is a terminal whose user has not said no to colours (https://no-color.org).
func colours(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Command composejson prints compose files as docker compose understands them, as JSON: one on another, with their .env,
// and with variables of the environment before it. So internal/e2e can read them without docker compose's own parser.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vllm-timings/vllm-timings/internal/dockercheck"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "composejson:", err)
		os.Exit(1)
	}
}

func run(files []string) error {
	if len(files) == 0 {
		return errors.New("no FILE given")
	}
	project, err := dockercheck.LoadCompose(context.Background(), filepath.Dir(files[0]), os.Environ(), files...)
	if err != nil {
		return err
	}
	text, err := project.MarshalJSON()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}

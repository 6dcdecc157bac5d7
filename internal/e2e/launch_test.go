//go:build e2e

package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/vllm-timings/vllm-timings/cmd/vllm-timings/launch"
	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

// TestRunFindsVLLM: vllm-timings run finds an installed vLLM and what it has without importing it, quickly.
func TestRunFindsVLLM(t *testing.T) {
	older, err := stack.InstallVLLM(t.Context(), "0.19.1")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		executable, version string
		flags               []string
	}{
		{shared.vllm, "0.32.0", stack.ExactFlags},
		{older, "0.19.1", nil},
	} {
		command := []string{c.executable, "serve", "m"}
		began := time.Now()
		v, serves := launch.Find(command)
		took := time.Since(began)
		if !serves || v.Version != c.version || took > 100*time.Millisecond {
			t.Errorf("%+v, %v, after %s", v, serves, took)
		}
		if flags, why := launch.NativeMetrics(command, false); !slices.Equal(flags, c.flags) || (why == "") != (c.flags != nil) {
			t.Errorf("%s: adds %q, %q", c.version, flags, why)
		}
		t.Logf("%s: found in %s", c.version, took)
	}
}

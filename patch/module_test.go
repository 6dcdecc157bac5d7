package patch

import (
	"os/exec"
	"testing"

	"github.com/vllm-timings/vllm-timings/internal/needs"
)

// TestModule runs the tests of the module that our sets add to vLLM.
func TestModule(t *testing.T) {
	cmd := exec.Command(needs.Python(t), "-B", "-W", "error", "-m", "unittest", "-q", "vllm_timings_test")
	cmd.Dir = "sets"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

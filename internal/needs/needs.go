// Package needs is for tests that need what not every machine has: they skip with a sentence, and fail where CI is set, as
// CI must not pass without them.
package needs

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// Unable ends a test that cannot run here.
func Unable(t testing.TB, why ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why...)
	}
	t.Skip(why...)
}

// Program returns the path of a program, which is in that Debian package.
func Program(t testing.TB, name, debian string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Unable(t, "needs ", name, " (Debian: ", debian, "): ", err)
	}
	return path
}

// thePython asks a python3 for its own path, as the one in PATH may be a slow script that looks for the right one.
var thePython = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
})

// Python returns the path of a python3.
func Python(t testing.TB) string {
	t.Helper()
	python, err := thePython()
	if err != nil {
		Unable(t, "needs python3: ", err)
	}
	return python
}

// Root ends the test of a user that is not root.
func Root(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Unable(t, "only root can ", why)
	}
}

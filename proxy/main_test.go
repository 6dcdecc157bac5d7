package proxy

import (
	"testing"

	"go.uber.org/goleak"
)

// No test may leave a goroutine behind: a stream has none, and those of a Proxy end with Close.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

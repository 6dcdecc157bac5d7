package proxy

import (
	"testing"

	"go.uber.org/goleak"
)

// No test may leave a goroutine behind: a stream has none, and those of a Proxy end with Close. Toxiproxy's are not ours: where
// one end of a connection is gone, those that slow the other down stay.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).read"),
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).write"),
	)
}

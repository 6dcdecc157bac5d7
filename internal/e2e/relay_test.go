//go:build e2e

package e2e

import (
	"context"
	"io"
	"net"
	"testing"
)

// relay passes connections to address on to target. stop ends them all, and then nobody listens there.
func relay(t *testing.T, address, target string) (stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stop = func() {
		_ = l.Close()
		cancel()
	}
	t.Cleanup(stop)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go pass(ctx, in, target)
		}
	}()
	return stop
}

// pass carries both directions of one connection until one ends.
func pass(ctx context.Context, in net.Conn, target string) {
	defer in.Close()
	out, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer out.Close()
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		_, _ = io.Copy(out, in)
	}()
	go func() {
		defer cancel()
		_, _ = io.Copy(in, out)
	}()
	<-ctx.Done()
}

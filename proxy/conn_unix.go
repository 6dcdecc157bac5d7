//go:build unix

package proxy

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// canAttempt says that connections can be read without waiting.
const canAttempt = true

// tryFill reads what is there, and reports whether anything is, be it an end.
func (c *conn) tryFill(fd uintptr) bool {
	c.acquire()
	for {
		n, err := unix.Read(int(fd), c.buf[:])
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			c.letGo()
			return false
		case err != nil:
			c.err = os.NewSyscallError("read", err)
		case n == 0:
			c.err = io.EOF
		default:
			c.to = n
		}
		return true
	}
}

// quiet reports whether the connection is open and nothing came that nobody asked for: the answer to another request, say.
func (c *conn) quiet() bool {
	if c.raw == nil || c.more() || c.err != nil {
		return false
	}
	var err error
	failed := c.raw.Control(func(fd uintptr) {
		_, _, err = unix.Recvfrom(int(fd), c.peeked[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	return failed == nil && err == unix.EAGAIN
}

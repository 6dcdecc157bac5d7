//go:build !unix

package proxy

// canAttempt says that connections can be read without waiting. Here each keeps its buffer, and serves one request.
const canAttempt = false

func (c *conn) tryFill(uintptr) bool { return true }

func (c *conn) quiet() bool { return false }

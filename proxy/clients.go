package proxy

import (
	"bytes"
	"context"
	"net"
)

// Clients is a listener for the http.Server that a Proxy is the handler of, with ConnContext. It lets an answer that is
// there as a whole be sent as a whole: that server has a buffer of 4 KiB for each connection, and sends what is longer in
// pieces, each of which wakes the client.
type Clients struct{ net.Listener }

// Accept implements net.Listener.
func (l Clients) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if _, ok := c.(*net.TCPConn); ok {
		return &client{Conn: c}, err
	}
	return c, err
}

type clientKey struct{}

// ConnContext is for http.Server.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*client); ok {
		return context.WithValue(ctx, clientKey{}, c)
	}
	return ctx
}

// client is a client's connection, of TCP. It has no ReadFrom, so that all that is sent comes through Write.
type client struct {
	net.Conn
	body int              // bytes of the answer's body that will be written next, behind its head, without a pause
	held *[bigBuffer]byte // with the beginning of an answer
	size int              // of that
}

// gather says that an answer will be written next whose body of that many bytes is there. Nobody else may write meanwhile.
func gather(ctx context.Context, body int) {
	if c, ok := ctx.Value(clientKey{}).(*client); ok {
		c.body = body
	}
}

// Write keeps the beginning of an answer of which the rest will be written next, and sends it with that.
func (c *client) Write(p []byte) (int, error) {
	if c.held != nil {
		both := net.Buffers{c.held[:c.size], p}
		n, err := both.WriteTo(c.Conn)
		bigBuffers.Put(c.held)
		c.held = nil
		return max(0, int(n)-c.size), err
	}
	if c.body > 0 {
		head := bytes.Index(p, headEnd)
		more := head >= 0 && len(p) < head+len(headEnd)+c.body
		if c.body = 0; more && len(p) <= bigBuffer {
			c.held = bigBuffers.Get().(*[bigBuffer]byte)
			c.size = copy(c.held[:], p)
			return len(p), nil
		}
	}
	return c.Conn.Write(p)
}

var headEnd = []byte("\r\n\r\n")

// CloseWrite is what http.Server ends a connection with before it closes it, when all is written.
func (c *client) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

package proxy

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// delivered waits until the other end has all that was written to conn: to reset a connection throws away what it has not.
func delivered(conn *net.TCPConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	for waiting := 1; waiting > 0; {
		if raw.Control(func(fd uintptr) { waiting, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }) != nil || err != nil {
			return
		}
		if waiting > 0 {
			time.Sleep(100 * time.Microsecond)
		}
	}
}

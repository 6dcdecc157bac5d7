package launch

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// FreePort returns a free port of 127.0.0.1. vLLM binds its own some seconds after it was started, so it is one of those
// that the kernel gives to nobody who does not ask for that very port.
func FreePort() (int, error) {
	low := 32768
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if f := strings.Fields(string(text)); len(f) == 2 {
			if n, err := strconv.Atoi(f[0]); err == nil {
				low = n
			}
		}
	}
	const lowest, tries = 16384, 64
	for range tries {
		if low <= lowest {
			break
		}
		if port := lowest + rand.IntN(low-lowest); !PortTaken(net.JoinHostPort("127.0.0.1", strconv.Itoa(port))) {
			return port, nil
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// PortTaken reports whether another process holds the address.
func PortTaken(address string) bool {
	l, err := net.Listen("tcp", address)
	if err == nil {
		_ = l.Close()
	}
	return errors.Is(err, syscall.EADDRINUSE)
}

package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// frame is a WebSocket frame with a payload of n bytes (RFC 6455, section 5.2). Those of clients are masked.
func frame(opcode byte, n int, masked bool) []byte {
	mask := byte(0)
	if masked {
		mask = 0x80
	}
	b := []byte{0x80 | opcode}
	switch {
	case n < 126:
		b = append(b, mask|byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(n))
	}
	if masked {
		b = append(b, 0, '\r', '\n', 0xff)
	}
	for i := range n {
		b = append(b, byte(i))
	}
	return b
}

const (
	opText, opBinary, opClose, opPing, opPong = 1, 2, 8, 9, 10

	handshake = "GET %s HTTP/1.1\r\nHost: vllm.example:8443\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nOrigin: https://page.example\r\n" +
		"Authorization: Bearer k\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n" +
		"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.k\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
	switched = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: realtime\r\n\r\n"
)

// realtime is vLLM's end of a WebSocket: it speaks first, then takes want, and sends each frame of answers as it gets one.
// After the last it waits for the client to close the connection, or closes it itself.
type realtime struct {
	want, answers [][]byte
	closes        bool
	ended         chan error
}

func (s *realtime) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if notAVLLM(w, r) {
		return
	}
	s.ended <- s.serve(w, r)
}

func (s *realtime) serve(w http.ResponseWriter, r *http.Request) error {
	for name, want := range map[string]string{
		"Connection": "Upgrade", "Upgrade": "WebSocket", "Origin": "https://page.example", "Authorization": "Bearer k", "Sec-Websocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
		"Sec-Websocket-Version": "13", "Sec-Websocket-Protocol": "realtime, openai-insecure-api-key.k", "Sec-Websocket-Extensions": "permessage-deflate",
	} {
		if got := r.Header.Values(name); !slices.Equal(got, []string{want}) {
			return fmt.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if r.Host != "vllm.example:8443" || r.URL.RequestURI() != "/v1/realtime?model=a%2Fb" {
		return fmt.Errorf("asked %s for %s", r.Host, r.URL.RequestURI())
	}
	conn, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = conn.Write(append([]byte(switched), s.answers[0]...)) // it need not wait before it speaks
	for i, want := range s.want {
		got := make([]byte, len(want))
		if _, err := io.ReadFull(buf, got); err != nil || !bytes.Equal(got, want) {
			return fmt.Errorf("frame %d of the client's: %d of %d bytes as they were, %v", i, common(string(got), string(want)), len(want), err)
		}
		if _, err := conn.Write(s.answers[i+1]); err != nil {
			return err
		}
	}
	if s.closes {
		return nil
	}
	if rest, err := io.ReadAll(buf); len(rest) > 0 || err != nil {
		return fmt.Errorf("%d bytes behind the client's last frame, %w", len(rest), err)
	}
	return nil
}

// TestUpgrade: a WebSocket is opened as the client asks for it, and what either side sends then is the other's at once, byte for
// byte, until one of them closes it, wherever vLLM is.
func TestUpgrade(t *testing.T) {
	client := [][]byte{frame(opText, 5, true), frame(opPing, 0, true), frame(opBinary, 300, true), frame(opBinary, 1<<20, true), frame(opClose, 2, true)}
	server := [][]byte{frame(opText, 125, false), frame(opText, 126, false), frame(opPong, 0, false), frame(opText, 1<<16, false), frame(opBinary, 1<<20, false), frame(opClose, 2, false)}
	for where, listen := range map[string]func(t *testing.T, h http.Handler) *rig{
		"TCP": func(t *testing.T, h http.Handler) *rig { return newRig(t, startUpstream(t, h.ServeHTTP).URL) },
		"prefix": func(t *testing.T, h http.Handler) *rig {
			return newRig(t, startUpstream(t, http.StripPrefix("/a/b", h).ServeHTTP).URL+"/a/b/")
		},
		"TLS": func(t *testing.T, h http.Handler) *rig {
			up, trusted := serveTLS(t, h)
			return newRig(t, up, trusted)
		},
		"socket": func(t *testing.T, h http.Handler) *rig {
			path := filepath.Join(t.TempDir(), "s")
			serveSocket(t, path, h)
			return newRig(t, "http://localhost", func(c *Config) { c.Socket = path })
		},
	} {
		for _, closes := range []bool{true, false} { // vLLM does
			s := &realtime{want: client, answers: server, closes: closes, ended: make(chan error, 1)}
			r := listen(t, s)
			conn, reader := r.open(t, "/v1/realtime?model=a%2Fb")
			resp, err := http.ReadResponse(reader, nil)
			if err != nil {
				t.Fatalf("%s: %v", where, err)
			}
			if h := resp.Header; resp.StatusCode != http.StatusSwitchingProtocols || h.Get("Connection") != "Upgrade" || h.Get("Upgrade") != "websocket" ||
				!slices.Equal(h["Sec-Websocket-Accept"], []string{"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="}) || !slices.Equal(h["Sec-Websocket-Protocol"], []string{"realtime"}) {
				t.Errorf("%s: %d %v", where, resp.StatusCode, h)
			}
			for i, want := range server {
				got := make([]byte, len(want))
				if _, err := io.ReadFull(reader, got); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%s: frame %d of vLLM's: %d of %d bytes as they were, %v", where, i, common(string(got), string(want)), len(want), err)
				}
				if i < len(client) {
					_, _ = conn.Write(client[i])
				}
			}
			if closes {
				if rest, err := io.ReadAll(reader); len(rest) > 0 || err != nil {
					t.Errorf("%s: %d bytes behind vLLM's last frame, %v", where, len(rest), err)
				}
			}
			conn.Close()
			if err := <-s.ended; err != nil {
				t.Errorf("%s, vLLM closes %v: %v", where, closes, err)
			}
			r.wantMetric(1, "requests_total", "endpoint", string(other), "code", "101")
			r.wantMetric(0, "in_flight_requests")
			r.wantMetric(0, "upstream_errors_total")
			r.wantMetric(0, "client_disconnects_total")
		}
	}
}

// open asks for a WebSocket over a connection of its own.
func (r *rig) open(t *testing.T, target string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprintf(conn, handshake, target)
	return conn, bufio.NewReader(conn)
}

// TestUpgradeRefused: what vLLM answers instead is the client's, whose connection is an ordinary one again.
func TestUpgradeRefused(t *testing.T) {
	r := newRig(t, startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if notAVLLM(w, r) {
			return
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusForbidden) // as uvicorn does where there is no such route
		_, _ = io.WriteString(w, "no")
	}).URL)
	conn, reader := r.open(t, "/v1/realtime")
	for range 2 {
		resp, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); resp.StatusCode != http.StatusForbidden || string(body) != "no" || err != nil || resp.Header.Get("Upgrade") != "" {
			t.Errorf("%d %v %q, %v", resp.StatusCode, resp.Header, body, err)
		}
		fmt.Fprintf(conn, handshake, "/again")
	}
	down := newRig(t, "http://"+freeAddress(t))
	_, reader = down.open(t, "/v1/realtime")
	if resp, err := http.ReadResponse(reader, nil); err != nil || resp.StatusCode != http.StatusBadGateway {
		t.Errorf("%v, %v", resp, err)
	}
}

// TestUpgradeOfChat: Java's client offers HTTP/2 in each of its first requests. vLLM does not take that, and answers.
func TestUpgradeOfChat(t *testing.T) {
	vllm := startEngine(t)
	r := newRig(t, vllm.URL)
	r.warm()
	for _, stream := range []bool{true, false} {
		a := r.send(http.MethodPost, string(chat), chatRequest(stream, 5+prompts.next()%7, "x"),
			"Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "HTTP2-Settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
		if a.status != http.StatusOK || a.err != nil || !a.timings.Exists() {
			t.Errorf("stream %v: %d %s, %v", stream, a.status, a.body, a.err)
		}
	}
}

// An answer that switches, but to something else, or only half says so, is 502, and its connection is closed.
func TestSwitchToSomethingElse(t *testing.T) {
	for name, head := range map[string]string{
		"another protocol":                  "Connection: Upgrade\r\nUpgrade: h2c\r\n",
		"no protocol":                       "Connection: Upgrade\r\n",
		"Upgrade is not for this neighbour": "Upgrade: websocket\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan error, 1)
			r := newRig(t, "http://"+acceptConns(t, func(conn *net.TCPConn) {
				defer conn.Close()
				from := bufio.NewReader(conn)
				for {
					req, err := http.ReadRequest(from)
					if err != nil {
						return
					}
					if req.Header.Get("Upgrade") == "" { // a reading of ours
						_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
						continue
					}
					_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\n"+head+"\r\n")
					_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
					_, err = from.ReadByte()
					ended <- err
					return
				}
			}))
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, handshake, "/v1/realtime")
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusBadGateway {
				t.Errorf("status %d", resp.StatusCode)
			}
			if err := <-ended; err != io.EOF {
				t.Errorf("the connection to vLLM: %v", err)
			}
		})
	}
}

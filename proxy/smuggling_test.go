package proxy

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// strict is an upstream that reads requests as the standard has them (RFC 9112) and forgives nothing: what it takes is one
// request to everybody. It answers each, and keeps the connection.
type strict struct {
	t        *testing.T
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	conn   map[net.Conn]bool
	got    []strictRequest
	answer string // "" is okay
}

type strictRequest struct {
	line   string // without its end
	header http.Header
	body   string
}

func startStrict(t *testing.T) *strict {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &strict{t: t, listener: l, conn: map[net.Conn]bool{}}
	s.wg.Go(s.accept)
	t.Cleanup(func() {
		l.Close()
		s.mu.Lock()
		for conn := range s.conn {
			conn.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s
}

const okay = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

func (s *strict) url() string { return "http://" + s.listener.Addr().String() }

// requests returns what came since it was asked last, but not what the sidecar asks of itself.
func (s *strict) requests() []strictRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.got
	s.got = nil
	return got
}

func (s *strict) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conn[conn] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			defer conn.Close()
			s.serve(conn)
		})
	}
}

// malformed is an error that no cut connection can be the reason for.
type malformed string

func (m malformed) Error() string { return string(m) }

func (s *strict) serve(conn net.Conn) {
	reader := bufio.NewReader(conn)
	for {
		r, err := readStrictly(reader)
		if err != nil {
			if errors.As(err, new(malformed)) {
				s.t.Errorf("vLLM was sent what is no request: %v", err)
			}
			return
		}
		if r.header.Get("User-Agent") == "vllm-timings" {
			_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		s.mu.Lock()
		s.got = append(s.got, r)
		answer := cmp.Or(s.answer, okay)
		s.mu.Unlock()
		_, _ = io.WriteString(conn, answer)
	}
}

var (
	strictLine   = regexp.MustCompile(`^[A-Z]+ (/[!-~]*|\*) HTTP/1\.1$`)
	strictHeader = regexp.MustCompile("^([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([^\\x00-\\x08\\x0a-\\x1f\\x7f]*)$")
	strictLength = regexp.MustCompile(`^[0-9]{1,18}$`)
	strictChunk  = regexp.MustCompile(`^[0-9A-Fa-f]{1,15}$`)
)

func readStrictly(r *bufio.Reader) (got strictRequest, err error) {
	line := func(what string, form *regexp.Regexp) (string, error) {
		text, err := r.ReadString('\n')
		if err != nil {
			return "", err
		}
		plain, ok := strings.CutSuffix(text, "\r\n")
		if !ok || strings.ContainsAny(plain, "\r\x00") || plain != "" && !form.MatchString(plain) {
			return "", malformed(fmt.Sprintf("%s: %q", what, text))
		}
		return plain, nil
	}
	if got.line, err = line("request line", strictLine); err != nil {
		return got, err
	} else if got.line == "" {
		return got, malformed("an empty request line")
	}
	got.header = http.Header{}
	for {
		text, err := line("header", strictHeader)
		if err != nil {
			return got, err
		}
		if text == "" {
			break
		}
		m := strictHeader.FindStringSubmatch(text)
		got.header.Add(m[1], m[2])
	}
	length, coding := got.header["Content-Length"], got.header["Transfer-Encoding"]
	switch {
	case len(got.header["Host"]) != 1:
		return got, malformed(fmt.Sprintf("Host: %q", got.header["Host"]))
	case len(length)+len(coding) > 1:
		return got, malformed(fmt.Sprintf("two framings: Content-Length %q, Transfer-Encoding %q", length, coding))
	case len(length) == 1:
		if !strictLength.MatchString(length[0]) {
			return got, malformed("Content-Length: " + length[0])
		}
		n, _ := strconv.Atoi(length[0])
		body := make([]byte, n)
		_, err := io.ReadFull(r, body)
		got.body = string(body)
		return got, err
	case len(coding) == 1:
		if coding[0] != "chunked" {
			return got, malformed("Transfer-Encoding: " + coding[0])
		}
		for {
			text, err := line("chunk", strictChunk)
			if err != nil {
				return got, err
			} else if text == "" {
				return got, malformed("a chunk without size")
			}
			n, _ := strconv.ParseInt(text, 16, 64)
			chunk := make([]byte, n)
			if _, err := io.ReadFull(r, chunk); err != nil {
				return got, err
			}
			got.body += string(chunk)
			end, err := line("end of a chunk", strictHeader) // after the last, trailers
			if err != nil {
				return got, err
			} else if end != "" {
				return got, malformed("behind a chunk: " + end)
			}
			if n == 0 {
				return got, nil
			}
		}
	}
	return got, nil
}

// What becomes of a request of the corpus.
const (
	refused = "refused" // by the sidecar itself; vLLM sees no whole request; the connection is closed
	closed  = "closed"  // vLLM gets just one, and nothing more is read from the connection
	kept    = "kept"    // vLLM gets just one, and the connection is good for the next
	own     = "own"     // the sidecar answers it with 200, vLLM sees nothing of it
)

// smuggled is what must never become a request of its own.
const smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

// corpus has requests with a doubt about where they end or whom they are for. {path} is the endpoint, {body} a body that
// it takes, {n} its length, {x} that in hexadecimal digits, and {smuggled} a request behind it, or in it.
var corpus = []struct{ name, raw, want, body string }{
	// Nothing wrong.
	{"length", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},
	{"chunked", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n", closed, "{body}"},
	{"no body", "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n", kept, ""},
	{"a body of GET", "GET {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},

	// Two framings, one of which somebody before may have taken.
	{"CL.TE", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"CL.TE, the end only", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}", closed, ""},
	{"TE.CL", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"TE.CL, length 0", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"CL.TE, taken away", "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: Transfer-Encoding\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"CL, taken away", "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: Content-Length, Host\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},

	// Transfer-Encoding in disguise.
	{"TE twice", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE twice, identity", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE list", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE list, last", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE identity", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE unknown", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE with parameter", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked;q=1\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE quoted", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \"chunked\"\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE empty", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE, vertical tab", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \vchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE, other case", "POST {path} HTTP/1.1\r\nHost: x\r\ntRANSFER-eNCODING: CHUNKED\r\nContent-Length: 4\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"TE, tab", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\tchunked \t\r\nContent-Length: 4\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"TE, folded", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n chunked\r\nContent-Length: 4\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", closed, "{body}"},
	{"TE, space before the colon", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"TE, underscore", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer_Encoding: chunked\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},

	// Lengths.
	{"CL twice", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},
	{"CL twice, other", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: {n}\r\n\r\n{smuggled}", refused, ""},
	{"CL list", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}, {n}\r\n\r\n{body}", refused, ""},
	{"CL with plus", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: +{n}\r\n\r\n{body}", refused, ""},
	{"CL below 0", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{smuggled}", refused, ""},
	{"CL in hexadecimal", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0x{x}\r\n\r\n{body}", refused, ""},
	{"CL with a space in it", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0 {n}\r\n\r\n{smuggled}", refused, ""},
	{"CL with an underscore", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n{smuggled}", refused, ""},
	{"CL with a fraction", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}.0\r\n\r\n{body}", refused, ""},
	{"CL empty", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length:\r\n\r\n{smuggled}", refused, ""},
	{"CL beyond 64 bits", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551617\r\n\r\nB{smuggled}", refused, ""},
	{"CL, other digits", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: \xd9\xa5\r\n\r\n{smuggled}", refused, ""},
	{"CL, spaces around", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: \t {n} \t\r\n\r\n{body}", kept, "{body}"},
	{"CL, zeros before", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 000{n}\r\n\r\n{body}", kept, "{body}"},
	{"CL, folded", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length:\r\n\t{n}\r\n\r\n{body}", kept, "{body}"},
	{"CL, folded in two", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n {n}\r\n\r\n{smuggled}", refused, ""},
	{"CL, space before the colon", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length : {n}\r\n\r\n{smuggled}", refused, ""},
	{"CL, a tab before the colon", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length\t: {n}\r\n\r\n{smuggled}", refused, ""},

	// Lines.
	{"folded", "POST {path} HTTP/1.1\r\nHost: x\r\nX-Folded: a\r\n  Content-Length: 3\r\n\t b\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},
	{"folded first", "POST {path} HTTP/1.1\r\n Content-Length: 3\r\nHost: x\r\n\r\n{smuggled}", refused, ""},
	{"bare LF", "POST {path} HTTP/1.1\nHost: x\nContent-Length: {n}\n\n{body}", kept, "{body}"},
	{"bare CR in a value", "POST {path} HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 3\r\n\r\n{smuggled}", refused, ""},
	{"bare CR before the end", "POST {path} HTTP/1.1\r\nHost: x\r\nX: a\r\r\nContent-Length: {n}\r\n\r\n{body}", refused, ""},
	{"bare CR as an end", "POST {path} HTTP/1.1\rHost: x\r\r" + "{smuggled}", refused, ""},
	{"NUL in a value", "POST {path} HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\nContent-Length: {n}\r\n\r\n{body}", refused, ""},
	{"NUL in a name", "POST {path} HTTP/1.1\r\nHost: x\r\nX\x00: a\r\nContent-Length: {n}\r\n\r\n{body}", refused, ""},
	{"no colon", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length\r\n\r\n{smuggled}", refused, ""},
	{"no name", "POST {path} HTTP/1.1\r\nHost: x\r\n: 3\r\n\r\n{smuggled}", refused, ""},
	{"no token", "POST {path} HTTP/1.1\r\nHost: x\r\nContent(Length): 3\r\n\r\n{smuggled}", refused, ""},
	{"no end", "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n} {smuggled}", refused, ""},

	// Chunks.
	{"extension", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x};a=\"b\"\r\n{body}\r\n0;c\r\n\r\n{smuggled}", closed, "{body}"},
	{"extension with LF", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;\nxx\r\n45\r\n0\r\n\r\n{smuggled}0\r\n\r\n", refused, ""},
	{"extension with CR", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x};a\rb\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"extension without end", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x};" + strings.Repeat("a", 20_000) + "\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size beyond 64 bits", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1000000000000000{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size with a sign", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n+{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size below 0", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size with 0x", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x{x}\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size, empty", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size, a space before", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n {x}\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk size, a space in it", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x} 0\r\n{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"chunk ends in LF", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\n{body}\n0\n\n{smuggled}", refused, ""},
	{"chunk too long", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}{body}\r\n0\r\n\r\n{smuggled}", refused, ""},
	{"garbage for trailers", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\ngarbage\r\n\r\n{smuggled}", refused, ""},
	{"garbage behind", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\n\r\ngarbage {smuggled}", closed, "{body}"},
	{"framing in trailers", "POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\nContent-Length: 7\r\nTransfer-Encoding: x\r\nHost: evil\r\n\r\n{smuggled}", closed, "{body}"},
	{"framing announced as trailer", "POST {path} HTTP/1.1\r\nHost: x\r\nTrailer: Content-Length\r\nTransfer-Encoding: chunked\r\n\r\n{x}\r\n{body}\r\n0\r\nContent-Length: 7\r\n\r\n{smuggled}", refused, ""},

	// Versions and request lines.
	{"HTTP/0.9", "GET {path}\r\n{smuggled}", refused, ""},
	{"HTTP/1.0", "POST {path} HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: {n}\r\n\r\n{body}{smuggled}", closed, "{body}"},
	{"HTTP/1.0 with TE", "POST {path} HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n{smuggled}", closed, ""},
	{"HTTP/1.0 with both", "POST {path} HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: {n}\r\nTransfer-Encoding: chunked\r\n\r\n{body}{smuggled}", closed, "{body}"},
	{"HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{smuggled}", refused, ""},
	{"HTTP/2 in name", "POST {path} HTTP/2.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"small letters", "POST {path} http/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"two spaces", "POST  {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"a space in the target", "POST {path} HTTP/1.1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"NUL in the target", "POST {path}\x00 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"no method", " {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"no Host", "POST {path} HTTP/1.1\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"two Hosts", "POST {path} HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"a Host that is none", "POST {path} HTTP/1.1\r\nHost: x\x80 y\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},

	// Forms of targets.
	{"absolute", "POST http://other.example:1{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {n}\r\n\r\n{body}", kept, "{body}"},
	{"authority", "CONNECT other.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n{smuggled}", refused, ""},
	{"authority and a path", "CONNECT {path} HTTP/1.1\r\nHost: other.example:443\r\n\r\n{smuggled}", refused, ""},
	{"authority of another method", "POST other.example:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"opaque", "POST http:other.example{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"no slash", "POST v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
	{"asterisk", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", own, ""},
	{"asterisk of another method", "POST * HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{smuggled}", refused, ""},
}

// TestSmuggling: a request about whose end there may be two opinions is refused, or is one to vLLM, and what comes behind it in
// the same connection is no request then.
func TestSmuggling(t *testing.T) {
	vllm := startStrict(t)
	r := newRig(t, vllm.url())
	r.learned()
	for _, to := range []struct{ name, path, body string }{
		{"edited", string(chat), `{"messages":[]}`},
		{"streamed", string(chat), streamed},
		{"passed on", "/v1/embeddings", `{"input":"a"}`},
	} {
		for _, c := range corpus {
			t.Run(to.name+"/"+c.name, func(t *testing.T) {
				fill := strings.NewReplacer("{path}", to.path, "{body}", to.body, "{n}", strconv.Itoa(len(to.body)), "{x}", strconv.FormatInt(int64(len(to.body)), 16), "{smuggled}", smuggled)
				conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
				if _, err := io.WriteString(conn, fill.Replace(c.raw)); err != nil {
					t.Fatal(err)
				}
				if c.name == "no end" || c.name == "bare CR as an end" {
					_ = conn.(*net.TCPConn).CloseWrite() // what is to come for it to be a request is not known
				}
				reader := bufio.NewReader(conn)
				resp, err := http.ReadResponse(reader, nil)
				status := 0
				if err == nil {
					status = resp.StatusCode
					_, _ = io.Copy(io.Discard, resp.Body)
				} else if c.want != refused { // that may be said by closing the connection
					t.Fatal(err)
				}
				switch keeps := c.want == kept && (to.name != "streamed" || strings.HasPrefix(c.raw, "GET ")) || c.want == own; {
				case c.want == refused && status != 0 && (status < 400 || status > 505 || status == 502):
					t.Errorf("status %d", status)
				case c.want != refused && status != http.StatusOK:
					t.Errorf("status %d", status)
				case !keeps:
					if rest, err := io.ReadAll(reader); len(rest) > 0 || err != nil && !strings.Contains(err.Error(), "reset") {
						t.Errorf("behind the answer: %q, %v", rest, err)
					}
				default:
					fmt.Fprintf(conn, "GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
					if resp, err := http.ReadResponse(reader, nil); err != nil || resp.StatusCode != http.StatusOK {
						t.Errorf("the next request: %v, %v", resp, err)
					}
				}
				r.quiet()
				got := vllm.requests()
				if n := len(got); n > 0 && got[n-1].line == "GET /next HTTP/1.1" {
					got = got[:n-1]
				}
				if want := map[string]int{refused: 0, own: 0}[c.want]; (c.want == refused || c.want == own) && len(got) != want {
					t.Errorf("vLLM was asked %q", got)
				}
				if c.want == closed || c.want == kept {
					method, _, _ := strings.Cut(c.raw, " ")
					line := fmt.Sprintf("%s %s HTTP/1.1", method, to.path)
					if len(got) != 1 || got[0].line != line || got[0].body != fill.Replace(c.body) {
						t.Errorf("vLLM was asked %q", got)
					}
				}
				if i := slices.IndexFunc(got, func(r strictRequest) bool { return strings.Contains(r.line, "smuggled") }); i >= 0 {
					t.Errorf("smuggled: %q", got[i])
				}
			})
		}
	}
}

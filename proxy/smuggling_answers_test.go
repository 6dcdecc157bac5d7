package proxy

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// What becomes of an answer of answerCorpus, and of the connection to vLLM.
const (
	reused = "reused" // the client has it, and the connection is good for the next
	shut   = "shut"   // the client has it, and the connection is closed
	broken = "broken" // the client sees that it breaks off, behind the body that it has
	bad    = "bad"    // the client gets 502
)

// smuggledAnswer is what must never be the answer to another request.
const smuggledAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nSMUGGLED"

// answerCorpus has answers with a doubt about where they end. {200} is the beginning of a head, {smuggled} an answer that
// nobody asked for. vLLM closes the connection behind those that end in {close}.
var answerCorpus = []struct {
	name, raw, want string
	status          int // 200 if it is 0
	body            string
}{
	// Nothing wrong.
	{"length", "{200}Content-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"chunked", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", reused, 0, "hello"},
	{"to the end", "{200}\r\nhello{close}", shut, 0, "hello"},

	// Two framings.
	{"CL.TE", "{200}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"CL.TE, nothing behind", "{200}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", reused, 0, "hello"},
	{"CL.TE, the end only", "{200}Content-Length: 1000\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}", shut, 0, ""},
	{"TE.CL", "{200}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"TE.CL, length 0", "{200}Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"CL.TE, taken away", "{200}Connection: Transfer-Encoding\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"CL, taken away", "{200}Connection: Content-Length\r\nContent-Length: 5\r\n\r\nhello{smuggled}", shut, 0, "hello"},

	// Transfer-Encoding in disguise.
	{"TE twice", "{200}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE twice, identity", "{200}Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE list", "{200}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE list, last", "{200}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE identity", "{200}Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE unknown", "{200}Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE empty", "{200}Transfer-Encoding:\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE, vertical tab", "{200}Transfer-Encoding: \vchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", bad, 0, ""},
	{"TE, folded", "{200}Transfer-Encoding:\r\n chunked\r\nContent-Length: 4\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"TE, space before the colon", "{200}Transfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", shut, 0, "0\r\n\r\n"},
	{"TE in HTTP/1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{close}", shut, 0, "5\r\nhello\r\n0\r\n\r\n"},
	{"TE.CL in HTTP/1.0", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}", shut, 0, "0\r\n\r\n"},

	// Lengths.
	{"CL twice", "{200}Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"CL twice, other", "{200}Content-Length: 0\r\nContent-Length: 5\r\n\r\n{smuggled}", bad, 0, ""},
	{"CL list", "{200}Content-Length: 5, 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL with plus", "{200}Content-Length: +5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL below 0", "{200}Content-Length: -5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL in hexadecimal", "{200}Content-Length: 0x5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL with a space in it", "{200}Content-Length: 0 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL empty", "{200}Content-Length:\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL beyond 64 bits", "{200}Content-Length: 18446744073709551621\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL, folded", "{200}Content-Length:\r\n\t5\r\n\r\nhello", reused, 0, "hello"},
	{"CL, folded in two", "{200}Content-Length: 0\r\n 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"CL, space before the colon", "{200}Content-Length : 5\r\n\r\nhello, hello{close}", shut, 0, "hello, hello"},
	{"CL, too large", "{200}Content-Length: 9\r\n\r\nhello{close}", broken, 0, "hello"},

	// Lines.
	{"bare LF", "HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", reused, 0, "hello"},
	{"bare CR in a value", "{200}X: a\rContent-Length: 3\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"bare CR before the end", "{200}X: a\r\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"bare CR as an end", "HTTP/1.1 200 OK\rContent-Length: 5\r\rhello{close}", bad, 0, ""},
	{"bare CR in the reason", "HTTP/1.1 200 O\rX: K\r\nContent-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"NUL in a value", "{200}X: a\x00b\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"NUL in a name", "{200}X\x00: a\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"folded first", "HTTP/1.1 200 OK\r\n Content-Length: 3\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"no colon", "{200}Content-Length\r\n\r\n{smuggled}", bad, 0, ""},
	{"no name", "{200}: 5\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"no end", "{200}Content-Length: 5{close}", bad, 0, ""},

	// Statuses.
	{"204 with CL", "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello{smuggled}", shut, 204, ""},
	{"204 with TE", "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 204, ""},
	{"304 with a length", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", reused, 304, ""},
	{"304 with a body", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nhello{smuggled}", shut, 304, ""},
	{"304 with TE", "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 304, ""},
	{"103 with CL", "HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n{200}Content-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"103 with TE", "HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked\r\n\r\n{200}Content-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"103 with a body", "HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"101", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n{smuggled}", bad, 0, ""},
	{"000", "HTTP/1.1 000 x\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"099", "HTTP/1.1 099 x\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"1000", "HTTP/1.1 1000 x\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"+20", "HTTP/1.1 +20 x\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"-20", "HTTP/1.1 -20 x\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"no reason", "HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"no reason and no space", "HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", reused, 0, "hello"},
	{"no version", "200 OK\r\nContent-Length: 5\r\n\r\nhello{smuggled}", bad, 0, ""},
	{"HTTP/0.9", "hello{close}", bad, 0, ""},

	// Chunks.
	{"extension", "{200}Transfer-Encoding: chunked\r\n\r\n5;a=\"b\"\r\nhello\r\n0;c\r\n\r\n", reused, 0, "hello"},
	{"extension with LF", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n2;\nxx\r\n45\r\n0\r\n\r\n{smuggled}0\r\n\r\n", broken, 0, "hello"},
	{"extension with CR", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;a\rb\r\nabc\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size, huge", "{200}Transfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\nhello{close}", broken, 0, "hello"},
	{"chunk size, the highest", "{200}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nhello{close}", broken, 0, "hello"},
	{"chunk size beyond 64 bits", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n10000000000000005\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size with a sign", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n+5\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size below 0", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n-5\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size with 0x", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0x5\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size, empty", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size, a space before", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n 5\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size, a space in it", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5 0\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size with junk", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5 junk\r\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk size ends in LF", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\nhello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk ends in LF", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"chunk too long", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhellohello\r\n0\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"cut in a chunk", "{200}Transfer-Encoding: chunked\r\n\r\n9\r\nhello{close}", broken, 0, "hello"},
	{"cut behind a chunk", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n{close}", broken, 0, "hello"},
	{"cut in the last", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0{close}", broken, 0, "hello"},
	{"cut before the trailer's end", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n{close}", broken, 0, "hello"},
	{"garbage for trailers", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\ngarbage\r\n\r\n{smuggled}", broken, 0, "hello"},
	{"trailer", "{200}Trailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n", reused, 0, "hello"},
	{"framing in trailers", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 7\r\nTransfer-Encoding: x\r\nTe: trailers\r\nConnection: X-Gone\r\nX-Gone: 1\r\nX-Sum: 1\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"framing announced as trailer", "{200}Trailer: Content-Length\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 7\r\n\r\n{smuggled}", bad, 0, ""},

	// What comes behind a whole one.
	{"length, and another", "{200}Content-Length: 5\r\n\r\nhello{smuggled}", shut, 0, "hello"},
	{"length 0, and another", "{200}Content-Length: 0\r\n\r\n{smuggled}", shut, 0, ""},
	{"chunked, and another", "{200}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{smuggled}", shut, 0, "hello"},
	{"length, and garbage", "{200}Content-Length: 5\r\n\r\nhello\r\n", shut, 0, "hello"},
	{"204, and another", "HTTP/1.1 204 No Content\r\n\r\n{smuggled}", shut, 204, ""},
}

// strictAnswer is what a client has got when its connection ends.
type strictAnswer struct {
	status  int
	body    string
	whole   bool
	trailer string // lines, with their ends
}

var strictStatus = regexp.MustCompile(`^HTTP/1\.1 [1-9][0-9]{2} [ -~]*$`)

// parseStrictly parses all that a client has read as the one answer that the standard lets it be, interim ones before it.
func parseStrictly(raw string) (got strictAnswer, err error) {
	line := func(form *regexp.Regexp) string {
		text, rest, ok := strings.Cut(raw, "\r\n")
		if (!ok || text != "" && !form.MatchString(text)) && err == nil {
			err = malformed(fmt.Sprintf("%q before %q", text, rest))
		}
		raw = rest
		return text
	}
	fields := func() http.Header {
		h := http.Header{}
		for text := line(strictHeader); text != "" && err == nil; text = line(strictHeader) {
			name, value, _ := strings.Cut(text, ":")
			h.Add(name, strings.TrimSpace(value))
		}
		return h
	}
	var length, coding []string
	for got.status < 200 && err == nil {
		first := line(strictStatus)
		if first == "" || err != nil {
			return got, malformed("status line: " + first)
		}
		got.status, _ = strconv.Atoi(first[9:12])
		h := fields()
		for _, name := range strings.Split(strings.Join(h["Trailer"], ","), ",") {
			if slices.Contains([]string{"content-length", "transfer-encoding", "connection", "te"}, strings.ToLower(strings.TrimSpace(name))) {
				return got, malformed("announced trailer: " + name)
			}
		}
		length, coding = h["Content-Length"], h["Transfer-Encoding"]
		none := got.status < 200 || got.status == http.StatusNoContent
		if len(length)+len(coding) > 1 || none && len(length)+len(coding) > 0 || len(coding) == 1 && coding[0] != "chunked" || len(length) == 1 && !strictLength.MatchString(length[0]) {
			return got, malformed(fmt.Sprintf("status %d, Content-Length %q, Transfer-Encoding %q", got.status, length, coding))
		}
	}
	switch {
	case err != nil:
		return got, err
	case got.status == http.StatusNoContent || got.status == http.StatusNotModified:
		got.whole = true
	case len(length) == 1:
		n, _ := strconv.Atoi(length[0])
		got.whole = len(raw) >= n
		n = min(n, len(raw))
		got.body, raw = raw[:n], raw[n:]
	case len(coding) == 0:
		got.body, raw, got.whole = raw, "", true
	}
	for len(coding) == 1 && raw != "" && !got.whole {
		size, _ := strconv.ParseInt(line(strictChunk), 16, 64)
		if got.whole = size == 0; got.whole {
			lines := raw
			fields()
			got.trailer = strings.TrimSuffix(strings.TrimSuffix(lines, raw), "\r\n")
			break
		}
		n := min(int(size), len(raw))
		got.body, raw = got.body+raw[:n], raw[n:]
		if raw != "" && line(regexp.MustCompile(`^$`)) != "" || err != nil {
			return got, malformed("behind a chunk: " + raw)
		}
	}
	if raw != "" && err == nil {
		err = malformed("behind the answer: " + raw)
	}
	return got, err
}

// answerer is an upstream that answers a request with what its header X-Raw says, or with okay.
type answerer struct {
	ended chan string // the X-Raw whose connection has ended behind it
}

func (a *answerer) serve(conn *net.TCPConn) {
	defer conn.Close()
	from := bufio.NewReader(conn)
	last := ""
	for {
		r, err := http.ReadRequest(from)
		if err != nil {
			a.ended <- last
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Header.Get("User-Agent") == "vllm-timings" {
			_, _ = io.WriteString(conn, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		last, _ = strconv.Unquote(r.Header.Get("X-Raw"))
		raw, closes := strings.CutSuffix(last, "{close}")
		if last == "" {
			raw = okay
		}
		if _, _ = io.WriteString(conn, raw); closes {
			_ = conn.CloseWrite()
		}
	}
}

// TestSmuggledAnswers: an answer about whose end there may be two opinions is one to the client or none, and what comes behind
// it in the same connection is no answer to the next request.
func TestSmuggledAnswers(t *testing.T) {
	vllm := &answerer{make(chan string, 1000)}
	r := newRig(t, "http://"+acceptConns(t, vllm.serve))
	r.learned()
	log.SetOutput(io.Discard) // net/http's Transport says there what comes unasked
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	for _, way := range []struct{ name, path, body, contentType string }{
		{"streamed", string(chat), streamed, "text/event-stream"},
		{"streamed, text", string(chat), streamed, "text/plain"},
		{"whole", string(chat), `{"messages":[]}`, "application/json"},
		{"whole, text", string(chat), `{"messages":[]}`, "text/plain"},
		{"passed on", "/v1/embeddings", `{"input":"a"}`, "application/json"},
	} {
		ask := func(t *testing.T, raw string) strictAnswer {
			t.Helper()
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Raw: %q\r\nContent-Length: %d\r\n\r\n%s", way.path, raw, len(way.body), way.body)
			all, err := io.ReadAll(conn)
			if err != nil {
				t.Fatalf("%q, %v", all, err)
			}
			got, err := parseStrictly(string(all))
			if err != nil {
				t.Errorf("%q: %v", all, err)
			}
			return got
		}
		for _, c := range answerCorpus {
			t.Run(way.name+"/"+c.name, func(t *testing.T) {
				raw := strings.NewReplacer("{200}", "HTTP/1.1 200 OK\r\nContent-Type: "+way.contentType+"\r\n", "{smuggled}", smuggledAnswer).Replace(c.raw)
				got := ask(t, raw)
				want := strictAnswer{status: max(c.status, http.StatusOK), body: c.body, whole: c.want != broken}
				if c.want == bad {
					want.status, want.body = http.StatusBadGateway, got.body
				}
				if want.whole && strings.Contains(raw, "X-Sum") {
					want.trailer = "X-Sum: 1\r\n"
				}
				if got != want {
					t.Errorf("%+v, want %+v", got, want)
				}
				// net/http's Transport sees a moment later than it takes the connection back what came behind the answer.
				for ended := c.want == reused; !ended; {
					select {
					case which := <-vllm.ended:
						ended = which == raw
					case <-time.After(20 * time.Second):
						t.Fatal("the connection to vLLM is still open")
					}
				}
				if next := ask(t, ""); next.status != http.StatusOK || next.body != "ok" || !next.whole {
					t.Errorf("the next request: %+v", next)
				}
			})
		}
	}
}

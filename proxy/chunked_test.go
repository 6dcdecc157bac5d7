package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// dechunk decodes raw, which comes in pieces of size bytes, into a buffer of room bytes at a time. rest is what follows.
func dechunk(raw string, size, room int) (data string, trailer http.Header, rest string, err error) {
	var c chunked
	var out bytes.Buffer
	p := make([]byte, room)
	b := []byte(nil)
	for err == nil {
		if len(b) == 0 {
			if raw == "" {
				return out.String(), nil, "", io.ErrUnexpectedEOF
			}
			n := min(size, len(raw))
			b, raw = []byte(raw[:n]), raw[n:]
		}
		var n, used int
		n, used, err = c.decode(p, b)
		out.Write(p[:n])
		b = b[used:]
	}
	if err == io.EOF {
		if trailer, err = c.header(); err == nil {
			err = io.EOF
		}
	}
	return out.String(), trailer, string(b) + raw, err
}

func TestChunked(t *testing.T) {
	for name, tt := range map[string]struct {
		raw, data, rest string
		trailer         http.Header
		err             error
	}{
		"one":                       {"5\r\nhello\r\n0\r\n\r\n", "hello", "", nil, io.EOF},
		"nothing":                   {"0\r\n\r\n", "", "", nil, io.EOF},
		"several, and what follows": {"3\r\nabc\r\nA\r\n0123456789\r\n000\r\n\r\nHTTP/1.1", "abc0123456789", "HTTP/1.1", nil, io.EOF},
		"extensions":                {"3;a=b;c=\"d\"\r\nabc\r\n0 ;x\r\n\r\n", "abc", "", nil, io.EOF},
		"blanks":                    {"3 \t\r\nabc\r\n0 \r\n\r\n", "abc", "", nil, io.EOF},
		"blanks, then a digit":      {"3 0\r\nabc\r\n0\r\n\r\n", "", "", nil, errChunk},
		"blanks, then junk":         {"3 junk\r\nabc\r\n0\r\n\r\n", "", "", nil, errChunk},
		"blanks, then a line feed":  {"3 \nabc\r\n0\r\n\r\n", "", "", nil, errChunk},
		"blanks before the size":    {" 3\r\nabc\r\n0\r\n\r\n", "", "", nil, errChunk},
		"16 digits":                 {"0000000000000001\r\na\r\n0\r\n\r\n", "a", "", nil, io.EOF},
		"17 digits":                 {"00000000000000001\r\na\r\n0\r\n\r\n", "", "", nil, errChunk},
		"a blank trailer":           {"1\r\na\r\n0\r\n \r\n\r\n", "a", "", nil, textproto.ProtocolError("malformed MIME header initial line: \" \"")},
		"endless blanks":            {"1" + strings.Repeat(" ", maxChunkExtra+2), "", "", nil, errChunkExtra},
		"trailers":                  {"1\r\na\r\n0\r\nX-Sum: 1\r\nX-Sum: 2\r\nY:3\r\n\r\nz", "a", "z", http.Header{"X-Sum": {"1", "2"}, "Y": {"3"}}, io.EOF},
		"line feeds alone":          {"1\na\n0\nX: 1\n\n", "", "\na\n0\nX: 1\n\n", nil, errChunk},
		"and in the trailer":        {"1\r\na\r\n0\r\nX: 1\n\n", "a", "", http.Header{"X": {"1"}}, io.EOF},
		"ends in the data":          {"5\r\nhel", "hel", "", nil, io.ErrUnexpectedEOF},
		"ends before the last":      {"5\r\nhello\r\n", "hello", "", nil, io.ErrUnexpectedEOF},
		"ends in the trailer":       {"0\r\nX: 1\r\n", "", "", nil, io.ErrUnexpectedEOF},
		"no size":                   {"\r\nhello", "", "\r\nhello", nil, errChunk},
		"a signed size":             {"+5\r\nhello\r\n", "", "+5\r\nhello\r\n", nil, errChunk},
		"0x":                        {"0x5\r\nhello\r\n", "", "x5\r\nhello\r\n", nil, errChunk},
		"too large a size":          {"10000000000000000\r\n", "", "0\r\n", nil, errChunk},
		"more data than its size":   {"2\r\nabc\r\n", "ab", "c\r\n", nil, errChunk},
		"a carriage return alone":   {"2\rab\r\n", "", "ab\r\n", nil, errChunk},
		"no line feed at its end":   {"2\r\nab\rx", "ab", "x", nil, errChunk},
		"an endless extension":      {"1;" + strings.Repeat("x", maxChunkExtra+1), "", "x", nil, errChunkExtra},
		"an endless trailer":        {"0\r\n" + strings.Repeat("x", maxChunkExtra+2), "", "xx", nil, errChunkExtra},
	} {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{1, 2, 3, 7, 1 << 20} {
				for _, room := range []int{1, 4, 1 << 10} {
					data, trailer, rest, err := dechunk(tt.raw, size, room)
					if data != tt.data || !errors.Is(err, tt.err) || cmp.Diff(tt.trailer, trailer) != "" {
						t.Errorf("in pieces of %d, %d at a time: %q, %v, %v", size, room, data, trailer, err)
					}
					if want := tt.rest; tt.err == io.EOF && rest != want {
						t.Errorf("in pieces of %d: %q follows, want %q", size, rest, want)
					}
				}
			}
		})
	}
}

// FuzzChunked compares it with net/http's reader: what that one takes gives the same data, trailer and rest here, in
// whatever pieces it comes.
func FuzzChunked(f *testing.F) {
	for _, raw := range []string{"5\r\nhello\r\n0\r\n\r\n", "3;a=b\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\nz", "1\na\n0\n\n", "0\r\n\r\n", "ffffffffffffffff\r\n", "2\r\nab\rx"} {
		f.Add(raw, 1, 4)
		f.Add(raw, 1000, 1000)
	}
	f.Fuzz(func(t *testing.T, raw string, size, room int) {
		size, room = 1+abs(size)%64, 1+abs(room)%64
		data, trailer, rest, err := dechunk(raw, size, room)
		from := bufio.NewReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw))
		resp, failed := http.ReadResponse(from, nil)
		if failed != nil {
			t.Fatal(failed)
		}
		want, failed := io.ReadAll(resp.Body)
		if !strings.HasPrefix(data, string(want)) && !strings.HasPrefix(string(want), data) {
			t.Fatalf("%q, net/http has %q", data, want)
		}
		switch {
		case errors.Is(failed, io.ErrUnexpectedEOF), failed != nil && strings.Contains(failed.Error(), "unexpected EOF"):
			return // it looks for two bytes behind the last chunk, where a line feed alone may be all
		case failed != nil && (err != io.EOF || stricter(failed, raw)):
			return
		case failed != nil:
			t.Fatalf("%q is whole, net/http has %q, %v", data, want, failed)
		}
		left, _ := io.ReadAll(from)
		if err != io.EOF || data != string(want) || rest != string(left) {
			t.Fatalf("%q, %q, %v; net/http has %q, %q", data, rest, err, want, left)
		}
		if diff := cmp.Diff(http.Header(resp.Trailer), trailer); len(resp.Trailer)+len(trailer) > 0 && diff != "" {
			t.Fatal(diff)
		}
	})
}

// stricter reports whether net/http's reader fails for what is none of ours: it allows less that is not data, wants CRLF at
// the end of the trailer's last two lines, and refuses blanks before an extension, which the standard allows.
func stricter(failed error, raw string) bool {
	for _, about := range []string{"line too long", "too much non-data", "suspiciously long trailer"} {
		if strings.Contains(failed.Error(), about) {
			return true
		}
	}
	return failed.Error() == "invalid byte in chunk length" && blanksBefore.MatchString(raw)
}

var blanksBefore = regexp.MustCompile(`(?m)^[0-9A-Fa-f]{1,16}[ \t]+;`)

func abs(n int) int {
	if n < 0 {
		return -(n + 1)
	}
	return n
}

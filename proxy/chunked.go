package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
)

// chunked takes the chunks' coding off an answer (RFC 9112, section 7.1), however its bytes are cut. net/http's reader of
// it needs a buffer of its own for as long as the answer lasts.
type chunked struct {
	state   chunkState
	left    uint64 // bytes of the chunk
	digits  int
	extra   int    // bytes of the chunk's extensions, and of the blanks before them
	trailer []byte // lines, with their ends
}

type chunkState int

const (
	chunkSize   chunkState = iota
	chunkBlanks            // behind the size
	chunkExtension
	chunkSizeEnd // the line feed behind the carriage return
	chunkData
	chunkDataEnd      // the carriage return behind the data
	chunkDataLineFeed // and the line feed
	chunkTrailer
	chunkEnd
)

// maxChunkExtra bounds what is not data: the extensions of a chunk, and the trailer, in bytes.
const maxChunkExtra = 64 << 10

var (
	errChunk      = errors.New("malformed chunked coding in vLLM's answer")
	errChunkExtra = errors.New("too long a line in the chunked coding of vLLM's answer")
)

// decode moves data out of b into p, and returns how many bytes of p it has filled and how many of b it has used. The
// error is io.EOF behind the trailer.
func (c *chunked) decode(p, b []byte) (n, used int, err error) {
	for used < len(b) && c.state != chunkEnd {
		if c.state == chunkData {
			if n == len(p) {
				return n, used, nil
			}
			moved := copy(p[n:], b[used:used+int(min(c.left, uint64(len(b)-used)))])
			n, used = n+moved, used+moved
			if c.left -= uint64(moved); c.left == 0 {
				c.state = chunkDataEnd
			}
			continue
		}
		if err := c.step(b[used]); err != nil {
			return n, used, err
		}
		used++
	}
	if c.state == chunkEnd {
		return n, used, io.EOF
	}
	return n, used, nil
}

// step takes one byte that is not data. A chunk's lines end in CRLF and nothing else, as net/http has it too; those of the
// trailer may end in a line feed alone.
func (c *chunked) step(b byte) error {
	switch c.state {
	case chunkSize:
		digit, ok := hexDigit(b)
		switch {
		case ok && c.digits < 16: // more do not fit into left
			c.left, c.digits = c.left<<4|uint64(digit), c.digits+1
		case ok, c.digits == 0:
			return errChunk
		case b == ' ', b == '\t':
			c.state = chunkBlanks
		case b == ';':
			c.state = chunkExtension
		case b == '\r':
			c.state = chunkSizeEnd
		default:
			return errChunk
		}
	case chunkBlanks:
		switch c.extra++; {
		case c.extra > maxChunkExtra:
			return errChunkExtra
		case b == ' ', b == '\t':
		case b == ';':
			c.state = chunkExtension
		case b == '\r':
			c.state = chunkSizeEnd
		default: // another may take it for a digit of the size
			return errChunk
		}
	case chunkExtension:
		switch c.extra++; {
		case b == '\r':
			c.state = chunkSizeEnd
		case b == '\n':
			return errChunk
		case c.extra > maxChunkExtra:
			return errChunkExtra
		}
	case chunkSizeEnd:
		if b != '\n' {
			return errChunk
		}
		c.began()
	case chunkDataEnd:
		if c.state = chunkDataLineFeed; b != '\r' {
			return errChunk
		}
	case chunkDataLineFeed:
		if c.state = chunkSize; b != '\n' {
			return errChunk
		}
	case chunkTrailer:
		if c.trailer = append(c.trailer, b); len(c.trailer) > maxChunkExtra {
			return errChunkExtra
		}
		if before, ok := bytes.CutSuffix(c.trailer, crlf[1:]); ok {
			if before = bytes.TrimSuffix(before, crlf[:1]); len(before) == 0 || before[len(before)-1] == '\n' {
				c.state = chunkEnd // the line is empty
			}
		}
	}
	return nil
}

// began is the end of a chunk's first line.
func (c *chunked) began() {
	c.state = chunkData
	if c.left == 0 {
		c.state = chunkTrailer
	}
	c.digits, c.extra = 0, 0
}

// header returns the trailer.
func (c *chunked) header() (http.Header, error) {
	if len(c.trailer) <= len(crlf) { // the empty line at its end
		return nil, nil
	}
	h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(c.trailer))).ReadMIMEHeader()
	if err != nil {
		return nil, err
	}
	return http.Header(h), nil
}

func hexDigit(b byte) (byte, bool) {
	switch {
	case '0' <= b && b <= '9':
		return b - '0', true
	case 'a' <= b && b <= 'f':
		return b - 'a' + 10, true
	case 'A' <= b && b <= 'F':
		return b - 'A' + 10, true
	}
	return 0, false
}

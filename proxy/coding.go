package proxy

import (
	"bufio"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"io"
	"net/http"
	"strings"
)

// coding is the content coding of an answer. vLLM uses none; something that stands before it may. An answer that is edited
// goes on without.
type coding int

const (
	identity coding = iota
	gzipCoding
	deflateCoding
	otherCoding // one that is not understood: the answer goes through untouched
)

// codingOf returns the coding of an answer, otherCoding too where its client does not take one without coding.
func codingOf(resp *http.Response) coding {
	c := otherCoding
	switch strings.ToLower(strings.TrimSpace(strings.Join(resp.Header.Values("Content-Encoding"), ","))) {
	case "", "identity":
		return identity
	case "gzip", "x-gzip":
		c = gzipCoding
	case "deflate":
		c = deflateCoding
	}
	if !takesIdentity(resp.Request.Header.Values("Accept-Encoding")) {
		return otherCoding
	}
	return c
}

// blanks are what may stand around the parts of a list in a header.
var blanks = strings.NewReplacer(" ", "", "\t", "")

// takesIdentity reports whether a client takes an answer without coding, which it does unless it says otherwise (RFC 9110,
// section 12.5.3).
func takesIdentity(accept []string) bool {
	takes := true
	for part := range strings.SplitSeq(strings.ToLower(strings.Join(accept, ",")), ",") {
		name, weight, _ := strings.Cut(blanks.Replace(part), ";")
		zero := weight != "" && strings.Trim(strings.TrimPrefix(weight, "q="), "0.") == ""
		switch name {
		case "identity":
			return !zero
		case "*":
			takes = !zero
		}
	}
	return takes
}

// decode returns what body holds without its coding. It reads when it is read.
func (c coding) decode(body io.ReadCloser) io.ReadCloser {
	if c == identity {
		return body
	}
	return &decoder{coding: c, body: body}
}

type decoder struct {
	coding coding
	body   io.ReadCloser
	plain  io.Reader
}

func (d *decoder) Read(p []byte) (int, error) {
	if d.plain == nil {
		if err := d.open(); err != nil {
			return 0, err
		}
	}
	n, err := d.plain.Read(p)
	if err == io.EOF {
		// The body's end is behind that of what it holds: there it may break off, and has its trailers, and not before it
		// can its connection be used again.
		if _, broken := io.Copy(io.Discard, d.body); broken != nil {
			err = broken
		}
	}
	return n, err
}

// open reads the coding's header. What HTTP calls deflate is in zlib's format (RFC 9110, section 8.4.1.2), but some
// servers leave that away.
func (d *decoder) open() (err error) {
	buffered := bufio.NewReader(d.body)
	if d.coding == gzipCoding {
		d.plain, err = gzip.NewReader(buffered)
		return err
	}
	head, err := buffered.Peek(2)
	switch {
	case err == io.EOF && len(head) > 0:
		return io.ErrUnexpectedEOF
	case err != nil:
		return err
	}
	if head[0]&0x0f == 8 && (int(head[0])<<8|int(head[1]))%31 == 0 {
		d.plain, err = zlib.NewReader(buffered)
		return err
	}
	d.plain = flate.NewReader(buffered)
	return nil
}

func (d *decoder) Close() error { return d.body.Close() }

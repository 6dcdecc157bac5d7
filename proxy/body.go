package proxy

import (
	"bytes"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vllm-timings/vllm-timings/timings"
)

// editBody adds timings to an answer that comes whole. What has to be read of it to know is kept, so that whatever
// happens the client gets every byte, and the error that vLLM's answer ended in.
func (ex *exchange) editBody(resp *http.Response, coding coding) {
	limit := int64(ex.proxy.maxEvent)
	if resp.ContentLength > limit {
		ex.unedited("answer_too_large")
		return
	}
	buf := wholeAnswers.Get().(*bytes.Buffer)
	buf.Reset()
	if resp.ContentLength > 0 {
		buf.Grow(int(resp.ContentLength) + bytes.MinRead)
	}
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, limit+1))
	seen := time.Now()
	switch {
	case err != nil:
		ex.bodyFailed(err)
		resp.Body = body{io.MultiReader(buf, failing{err}), resp.Body}
	case n > limit:
		ex.unedited("answer_too_large")
		resp.Body = body{io.MultiReader(buf, resp.Body), resp.Body}
	default:
		answer, edited := ex.editCoded(buf.Bytes(), coding, seen)
		if edited {
			resp.Header.Del("Content-Encoding")
			resp.ContentLength = int64(len(answer))
			resp.Header.Set("Content-Length", strconv.Itoa(len(answer)))
		}
		if ex.upload == nil { // else a late "100 Continue" might be written meanwhile
			gather(ex.ctx, len(answer))
		}
		resp.Body = body{bytes.NewReader(answer), &lent{resp.Body, buf}}
	}
}

// editCoded returns the answer with timings, in no content coding, or as it is.
func (ex *exchange) editCoded(raw []byte, coding coding, seen time.Time) (answer []byte, edited bool) {
	if coding == identity {
		return ex.editJSON(raw, seen)
	}
	limit := int64(ex.proxy.maxEvent)
	plain, err := io.ReadAll(io.LimitReader(coding.decode(io.NopCloser(bytes.NewReader(raw))), limit+1))
	switch {
	case err != nil:
		ex.unedited("content_encoding")
		return raw, false
	case int64(len(plain)) > limit:
		ex.unedited("answer_too_large")
		return raw, false
	}
	if answer, edited = ex.editJSON(plain, seen); !edited {
		return raw, false
	}
	return answer, true
}

// editJSON returns the answer with timings, or as it is.
func (ex *exchange) editJSON(raw []byte, seen time.Time) (answer []byte, edited bool) {
	var o object
	if !o.parse(raw) {
		ex.unedited("invalid_json")
		return raw, false
	}
	ex.upstreamTimings = o.has("timings")
	ex.readUsage(o.result("usage"), o.result("metrics"))
	switch {
	case o.several("choices"):
		ex.unedited("several_choices")
		return raw, false
	case ex.dialect == responsesDialect && !ex.usage.Known: // it runs in the background
		ex.proxy.background.add(o.result("id").Str, ex.sent)
		ex.unedited("not_finished")
		return raw, false
	}
	member := ex.settle(timings.Phases{}, ex.sent, seen)
	if member == nil {
		return raw, false
	}
	return splice(raw, ex.edit(&o, member)), true
}

// body reads from one and closes another.
type body struct {
	io.Reader
	io.Closer
}

// ending is a body that notes when the client is given the end of it. Who has that may leave, and closes the connection
// perhaps before the request is over here.
type ending struct {
	io.ReadCloser
	ex   *exchange
	resp *http.Response
	left int64 // below 0: unknown
}

func newEnding(ex *exchange, resp *http.Response) *ending {
	e := &ending{resp.Body, ex, resp, resp.ContentLength}
	e.note(nil)
	return e
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	e.left -= int64(n)
	e.note(err)
	return n, err
}

func (e *ending) note(err error) {
	if err == io.EOF {
		cleanTrailer(e.resp.Trailer)
	}
	if e.left == 0 || err == io.EOF {
		e.ex.complete = e.ex.complete || !e.ex.clientLeft()
	}
}

// wholeAnswers are buffers for answers that come whole: new memory for each megabyte takes longer than checking what is in it.
var wholeAnswers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// maxKept is how large a buffer is kept at most, in bytes: a small answer would keep what a huge one has needed.
const maxKept = 4 << 20

// lent closes an answer, and gives back the buffer that it was in.
type lent struct {
	io.Closer
	buf *bytes.Buffer // nil: it was given back
}

func (l *lent) Close() error {
	if l.buf != nil && l.buf.Cap() <= maxKept {
		wholeAnswers.Put(l.buf)
	}
	l.buf = nil
	return l.Closer.Close()
}

// failing is a reader that fails.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// isJSON reports whether a content type is that of JSON.
func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(media), "application/json")
}

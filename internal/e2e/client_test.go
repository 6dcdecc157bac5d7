//go:build e2e

package e2e

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// request is what a test sends.
type request struct {
	path string
	body string
}

// answer is what came back, whole.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// send posts the request below base and reads the whole answer.
func send(t *testing.T, base string, r request) answer {
	t.Helper()
	a, err := trySend(t, base, r)
	if err != nil {
		t.Fatalf("POST %s: %v", r.path, err)
	}
	return a
}

func trySend(t *testing.T, base string, r request) (answer, error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, base+r.path, strings.NewReader(r.body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: body}, nil
}

// documents returns the JSON documents of an answer: its events' data, or the body alone.
func (a answer) documents() [][]byte {
	if !strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream") {
		return [][]byte{a.body}
	}
	var docs [][]byte
	for line := range bytes.Lines(a.body) {
		data, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data: "))
		if ok && !bytes.Equal(data, []byte("[DONE]")) {
			docs = append(docs, data)
		}
	}
	return docs
}

// member returns the member of the only document that has it as an object, and how many have it at all. It is at the top
// level, or in the response that the last event of the Responses API carries.
func (a answer) member(name string) (value gjson.Result, count int) {
	for _, doc := range a.documents() {
		for _, v := range gjson.GetManyBytes(doc, name, "response."+name) {
			if v.IsObject() {
				value = v
				count++
			}
		}
	}
	return value, count
}

// timings returns the answer's one `timings`.
func (a answer) timings(t *testing.T) gjson.Result {
	t.Helper()
	v, n := a.member("timings")
	if a.status != http.StatusOK || n != 1 {
		t.Fatalf("status %d with %d `timings`, want 200 with one:\n%s", a.status, n, a.body)
	}
	return v
}

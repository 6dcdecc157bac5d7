package metrics

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// versions are the vLLM versions whose pages were recorded.
var versions = []string{"0.11.2", "0.19.1", "0.32.0"}

// recording is the body of testdata/NAME, an answer of real vLLM as `curl -i`
// printed it, and the value of its content type.
func recording(t testing.TB, name string) (body []byte, contentType string) {
	t.Helper()
	whole, err := os.ReadFile(filepath.Join("testdata", filepath.FromSlash(name)))
	if err != nil {
		t.Fatal(err)
	}
	head, body, ok := bytes.Cut(whole, []byte("\r\n\r\n"))
	if !ok { // the api2_ ones were written by another tool
		head, body, ok = bytes.Cut(whole, []byte("\n\n"))
	}
	if !ok {
		t.Fatalf("%s: no end of the header", name)
	}
	for line := range strings.Lines(string(head)) {
		if v, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "content-type: "); ok {
			contentType = v
		}
	}
	return body, contentType
}

// replay answers with a recording.
func replay(t testing.TB, name string) http.HandlerFunc {
	body, contentType := recording(t, name)
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(body)
	}
}

// filtering answers with a recorded whole page as prometheus_client's handler
// does that knows name[].
func filtering(t testing.TB, name string) http.HandlerFunc {
	body, _ := recording(t, name)
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		if names := r.URL.Query()["name[]"]; len(names) > 0 {
			_, _ = w.Write(filterPage(body, names))
			return
		}
		_, _ = w.Write(body)
	}
}

// filterPage keeps the samples with these names, and HELP and TYPE of their
// families.
func filterPage(body []byte, names []string) []byte {
	var out, comments bytes.Buffer
	var was byte
	for line := range bytes.Lines(body) {
		if line[0] == '#' {
			if was != '#' {
				comments.Reset()
			}
			comments.Write(line)
		} else if slices.Contains(names, string(line[:bytes.IndexAny(line, "{ ")])) {
			_, _ = comments.WriteTo(&out)
			out.Write(line)
		}
		was = line[0]
	}
	return out.Bytes()
}

// wantedNames are the names that a filtered reading asks for.
func wantedNames() []string {
	names := []string{processStartName}
	for _, n := range wanted {
		names = append(names, namePrefix+n)
	}
	return names
}

// TestFilterPage holds the imitation against real filtered pages.
func TestFilterPage(t *testing.T) {
	for _, v := range versions {
		full, _ := recording(t, v+"/metrics_full.txt")
		want, _ := recording(t, v+"/metrics_filtered_slash.txt")
		got := filterPage(full, []string{
			"vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count", "vllm:request_decode_time_seconds_sum",
		})
		// The order of families is not stable in vLLM.
		if !slices.Equal(sortedLines(got), sortedLines(want)) {
			t.Errorf("%s: got\n%s\nwant\n%s", v, got, want)
		}
	}
}

func sortedLines(b []byte) []string {
	return slices.Sorted(strings.Lines(string(b)))
}

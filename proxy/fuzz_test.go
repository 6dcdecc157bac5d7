package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/vllm-timings/vllm-timings/timings"
)

// document decodes JSON with all digits of its numbers.
func document(t *testing.T, raw []byte) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var doc any
	if err := d.Decode(&doc); err != nil {
		t.Fatalf("%q: %v", raw, err)
	}
	return doc
}

// FuzzRequestEdit: what is sent to vLLM is the client's document, but for stream_options.include_usage, and every byte
// around that is the client's. What is no valid JSON goes through untouched.
func FuzzRequestEdit(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","stream":true}`, `{"stream":true,"stream_options":null,"n":1}`, "{\n \"stream\": true,\n \"stream_options\": {}\n}",
		`{"stream":true,"stream_options":{"include_usage":false,"a":1e999}}`, `{"str\u0065am":true,"prompt":[[1],[2]]}`, `{"stream":NaN}`,
		`{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":null}}`, `[{"stream":true}]`, `{"stream":true}x`, "{\"stream\":true,\"\xff\":\"\\ud800\"}",
		`{"stream":true,"stream_options":{},"stream_options":{}}`, `{"echo":true,"messages":[{"content":"x"}]}`, `{"n":"\u0031","best_of":[]}`,
	} {
		for kind := range byte(4) {
			f.Add([]byte(s), kind, kind%2 == 0)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, kind byte, always bool) {
		q := []quirks{{}, quirks011, quirks019, quirks032}[kind%4]
		e := []endpoint{chat, completions}[kind/4%2]
		p, out := planRequest(e, bytes.Clone(body), always, q)
		if p.known && !json.Valid(body) {
			t.Fatalf("%q was understood", body)
		}
		if bytes.Equal(out, body) {
			return
		}
		if !p.known || !p.stream || !p.single {
			t.Fatalf("%q became %q without need", body, out)
		}
		// One place is edited, where `false` or `null` may have stood.
		head, tail := 0, 0
		for head < len(body) && head < len(out) && body[head] == out[head] {
			head++
		}
		for tail < len(body)-head && body[len(body)-1-tail] == out[len(out)-1-tail] {
			tail++
		}
		if head+tail < len(body)-len("false") {
			t.Fatalf("%q became %q", body, out)
		}
		was, is := document(t, body).(map[string]any), document(t, out).(map[string]any)
		options, _ := is["stream_options"].(map[string]any)
		if is["stream"] != true || options["include_usage"] != true {
			t.Fatalf("%q does not ask for usage", out)
		}
		for _, doc := range []map[string]any{was, is} {
			if o, _ := doc["stream_options"].(map[string]any); o != nil {
				delete(o, "include_usage")
			}
			if o, ok := doc["stream_options"]; ok && (o == nil || len(o.(map[string]any)) == 0) {
				delete(doc, "stream_options")
			}
		}
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("%q became %q", body, out)
		}
	})
}

// membersOf lists the members of an object as encoding/json reads them, the values as they stand.
func membersOf(t *testing.T, raw []byte) (list []string) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	if _, err := d.Token(); err != nil {
		t.Fatalf("%q: %v", raw, err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		list = append(list, fmt.Sprintf("%q=%s", key, value))
	}
	return list
}

// FuzzObjectEdit: an edited object is valid and has just the members that it should, judged by encoding/json.
func FuzzObjectEdit(f *testing.F) {
	for _, e := range edits {
		f.Add([]byte(e.raw), uint16(len(e.remove)))
	}
	f.Add([]byte(`{"a":{"b":[1,"}"]},"c":"\\\"","d":-1.5e-3}`), uint16(5))
	f.Fuzz(func(t *testing.T, raw []byte, which uint16) {
		var o object
		if ok := o.parse(raw); !ok {
			if json.Valid(raw) && bytes.HasPrefix(bytes.TrimLeft(raw, " \t\r\n"), []byte("{")) {
				t.Fatalf("%q is an object", raw)
			}
			return
		}
		all := membersOf(t, raw)
		if len(all) != len(o.members) {
			t.Fatalf("%q has %d members, not %d", raw, len(all), len(o.members))
		}
		gone := func(i int) bool { return which>>(i%16)&1 == 1 }
		var want []string
		for i, m := range all {
			if !gone(i) {
				want = append(want, m)
			}
		}
		index := map[member]int{}
		for i, m := range o.members {
			index[m] = i
		}
		remove := func(m member) bool { return gone(index[m]) }
		if same := splice(bytes.Clone(raw), o.edit(nil)); !bytes.Equal(same, raw) {
			t.Fatalf("%q became %q", raw, same)
		}
		without := splice(bytes.Clone(raw), o.edit(remove))
		if !json.Valid(without) {
			t.Fatalf("%q became %q", raw, without)
		}
		if diff := cmp.Diff(want, membersOf(t, without)); diff != "" {
			t.Fatalf("%q became %q: %s", raw, without, diff)
		}
		with := splice(bytes.Clone(raw), o.edit(remove, []byte(`"x":[]`), nil, []byte(`"y":1`)))
		if !json.Valid(with) {
			t.Fatalf("%q became %q", raw, with)
		}
		if diff := cmp.Diff(append(want, `"x"=[]`, `"y"=1`), membersOf(t, with)); diff != "" {
			t.Fatalf("%q became %q: %s", raw, with, diff)
		}
	})
}

// testExchange is that of a streamed answer of which only the given sources may tell.
func testExchange(p plan, sources ...timings.Source) *exchange {
	p.known, p.stream, p.single, p.dialect = true, true, true, p.endpoint.dialect()
	return &exchange{plan: p, proxy: &Proxy{sources: sources, windows: &windows{}}, ctx: context.Background()}
}

// throughStream gives what a client receives of an answer that arrives in pieces of sizes, through a buffer of n bytes.
func throughStream(t *testing.T, ex *exchange, answer io.Reader, sizes []byte, n int) (string, error) {
	t.Helper()
	s := newStream(ex, io.NopCloser(&sized{answer, sizes, 0}), 0)
	var out strings.Builder
	buf := make([]byte, n)
	for {
		n, err := s.Read(buf)
		out.Write(buf[:n])
		switch {
		case err != nil:
			return out.String(), err
		case n == 0:
			t.Fatal("nothing was read")
		}
	}
}

// sized reads pieces of sizes, which are used again and again.
type sized struct {
	io.Reader
	sizes []byte
	at    int
}

func (r *sized) Read(p []byte) (int, error) {
	if len(r.sizes) > 0 {
		p = p[:min(len(p), 1+int(r.sizes[r.at%len(r.sizes)]))]
		r.at++
	}
	return r.Reader.Read(p)
}

// chunks are the events of a chat answer with these texts: without usage, and with usage as the proxy asks for it. The
// metrics are there so that timings can be made.
func chunks(eol string, texts ...string) (straight, asked string) {
	const open = `data: {"id":"chatcmpl-1","choices":[{"index":0,`
	var b strings.Builder
	event := func(choice string) { b.WriteString(open + choice + `,"finish_reason":null}]}` + eol + eol) }
	event(`"delta":{"role":"assistant","content":""}`)
	for _, text := range texts {
		quoted, _ := json.Marshal(text)
		event(`"delta":{"content":` + string(quoted) + `}`)
	}
	b.WriteString(": comment" + eol + eol + open + `"delta":{},"finish_reason":"stop"}]}` + eol + eol)
	usage := fmt.Sprintf(`data: {"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":3}},`+
		`"metrics":{"time_to_first_token_ms":5,"generation_time_ms":7}}`, len(texts)) + eol + eol
	done := "data: [DONE]" + eol + eol
	return b.String() + done, b.String() + usage + done
}

// FuzzStream: where nothing may be edited all bytes come out as they came in, and the error that they ended in; and what
// is edited is the straight answer with one member more, whatever the texts, the line ends and the read boundaries.
func FuzzStream(f *testing.F) {
	// The fuzzer makes what it finds shorter in a time that grows with the square of the length, so seeds are short.
	f.Add([]byte("a  \"usage\":{} \u00e9"), []byte{0}, byte(0))
	f.Add([]byte("data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"x\"}]}\n\n"), []byte{6, 200}, byte(1))
	f.Add([]byte("\xef\xbb\xbfdata:{\"usage\":{}}\r\n\r\ndata: [DONE]\r\rdata"), []byte{}, byte(3))
	f.Add([]byte("data: {\"usage\":\ndata: null}\n\n"), []byte{40}, byte(7))
	f.Add([]byte("data: {\"choices\":[{},{}]}\n\ndata: [DONE]\n\n"), []byte{1, 2, 3}, byte(11))
	f.Add([]byte("data: {\"error\":{}}\n\n: \n\n"), []byte{9}, byte(6))
	f.Fuzz(func(t *testing.T, stream, sizes []byte, kind byte) {
		p := plan{endpoint: chat, showUsage: kind&1 == 1, nullUsage: kind&2 == 2, askedRunning: kind&8 == 8}
		client := 1 << 10
		if kind&4 == 4 {
			client = 1 + int(kind>>4)
		}
		// No source, so nothing is added; usage is taken out where the client did not ask, unless there is none.
		if p.showUsage || !bytes.Contains(stream, []byte("usage")) && !bytes.Contains(stream, []byte(`\`)) {
			for _, end := range []error{io.EOF, io.ErrUnexpectedEOF} {
				answer := io.MultiReader(bytes.NewReader(stream), iotest.ErrReader(end))
				got, err := throughStream(t, testExchange(p), answer, sizes, client)
				if got != string(stream) || !errors.Is(err, end) {
					t.Fatalf("%q became %q, %v", stream, got, err)
				}
			}
		}
		eol := []string{"\n", "\r\n", "\r"}[int(kind)%3]
		straight, asked := chunks(eol, strings.SplitAfter(string(stream), " ")...)
		p.showUsage = false
		got, err := throughStream(t, testExchange(p, timings.Native), strings.NewReader(asked), sizes, client)
		if err != io.EOF {
			t.Fatal(err)
		}
		const member = `,"timings":{"cache_n":3,"prompt_n":6,"prompt_ms":5,`
		before, after, ok := strings.Cut(got, member)
		_, after, _ = strings.Cut(after, "}")
		if !ok || before+after != straight {
			t.Fatalf("got %q, want one member more in %q", got, straight)
		}
	})
}

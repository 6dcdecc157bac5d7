package proxy

import (
	"bytes"
	"slices"

	"github.com/tidwall/gjson"

	"github.com/vllm-timings/vllm-timings/sse"
)

// JSON is edited in place: members are found by their byte offsets and cut out or added, and every other byte stays what
// it was, white space, number formats and escapes included. (sjson drops what stands behind the object and lays out
// a new member differently in indented text, so it is not used here.)

// member is one member of a JSON object, as byte offsets.
type member struct {
	key        int // its opening quote
	keyEnd     int // behind its closing quote
	value, end int // its value, without white space around it
}

// object is a JSON object with its members.
type object struct {
	raw     []byte
	open    int // offset of the opening brace
	members []member
}

// parse finds the members of the object that is the whole of raw. It is false where raw is not valid JSON or no object.
// The slice of members is reused.
func (o *object) parse(raw []byte) bool {
	if !valid(raw) {
		return false
	}
	at := skipSpace(raw, 0)
	if raw[at] != '{' {
		return false
	}
	o.scan(raw, at)
	return true
}

// sub returns the object that is the value of m, with offsets in the same raw bytes.
func (o *object) sub(m member) (object, bool) {
	if o.raw[m.value] != '{' {
		return object{}, false
	}
	var s object
	s.scan(o.raw, m.value)
	return s, true
}

// scan finds the members of the object that opens at offset open of raw, which is valid JSON.
func (o *object) scan(raw []byte, open int) {
	o.raw, o.open = raw, open
	if o.members = o.members[:0]; cap(o.members) == 0 {
		o.members = make([]member, 0, 16)
	}
	for at := skipSpace(raw, open+1); raw[at] != '}'; {
		m := member{key: at, keyEnd: skipString(raw, at)}
		m.value = skipSpace(raw, skipSpace(raw, m.keyEnd)+1)
		m.end = skipValue(raw, m.value)
		o.members = append(o.members, m)
		if at = skipSpace(raw, m.end); raw[at] == ',' {
			at = skipSpace(raw, at+1)
		}
	}
}

// is reports whether the key of m is key, which has no character that JSON must escape. Escapes in m's key count.
func (o *object) is(m member, key string) bool {
	raw := o.raw[m.key+1 : m.keyEnd-1]
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw) == key
	}
	return gjson.ParseBytes(o.raw[m.key:m.keyEnd]).String() == key
}

// get returns the last member with that key, the one that Python's JSON reader takes, and how many there are.
func (o *object) get(key string) (m member, n int) {
	for _, x := range o.members {
		if o.is(x, key) {
			m = x
			n++
		}
	}
	return m, n
}

// has reports whether there is a member with that key.
func (o *object) has(key string) bool {
	_, n := o.get(key)
	return n > 0
}

// bytes returns the value of m.
func (o *object) bytes(m member) []byte { return o.raw[m.value:m.end] }

// result returns the value of the member with that key; one that does not exist if there is none.
func (o *object) result(key string) gjson.Result {
	m, n := o.get(key)
	if n == 0 {
		return gjson.Result{}
	}
	return gjson.ParseBytes(o.bytes(m))
}

// several reports whether the value of the member with that key is an array of more than one.
func (o *object) several(key string) bool {
	m, n := o.get(key)
	if n == 0 || o.raw[m.value] != '[' {
		return false
	}
	first := skipSpace(o.raw, m.value+1)
	return o.raw[first] != ']' && o.raw[skipSpace(o.raw, skipValue(o.raw, first))] == ','
}

// edit returns the splices that remove the members for which remove is true and add others, given as `"key":value` (empty
// ones are none), behind the last. They are in ascending order and do not overlap.
func (o *object) edit(remove func(member) bool, add ...[]byte) []sse.Splice {
	var splices []sse.Splice
	kept := -1 // the last member that stays
	for i, m := range o.members {
		switch {
		case remove == nil || !remove(m):
			kept = i
		case kept >= 0: // with the comma before it
			splices = append(splices, sse.Splice{From: o.members[i-1].end, To: m.end})
		case i+1 < len(o.members): // with the comma behind it
			splices = append(splices, sse.Splice{From: m.key, To: o.members[i+1].key})
		default:
			splices = append(splices, sse.Splice{From: m.key, To: m.end})
		}
	}
	var with []byte
	for _, a := range add {
		if len(a) == 0 {
			continue
		}
		if kept >= 0 || len(with) > 0 {
			with = append(with, ',')
		}
		with = append(with, a...)
	}
	if len(with) == 0 {
		return splices
	}
	at := o.open + 1
	if len(o.members) > 0 {
		at = o.members[len(o.members)-1].end
	}
	return append(splices, sse.Splice{From: at, To: at, With: with})
}

// splice returns raw with splices made, in raw's own memory where that has room for them. They are mostly at the end, so
// that little of raw has to move.
func splice(raw []byte, splices []sse.Splice) []byte {
	for _, s := range slices.Backward(splices) {
		raw = slices.Replace(raw, s.From, s.To, s.With...)
	}
	return raw
}

// The functions below walk over JSON that is known to be valid.

func skipSpace(raw []byte, at int) int {
	for at < len(raw) && (raw[at] == ' ' || raw[at] == '\t' || raw[at] == '\n' || raw[at] == '\r') {
		at++
	}
	return at
}

func skipString(raw []byte, at int) int {
	for at++; ; {
		end := at + bytes.IndexByte(raw[at:], '"')
		for at <= end { // behind it, the quote is escaped
			escape := bytes.IndexByte(raw[at:end], '\\')
			if escape < 0 {
				return end + 1
			}
			at += escape + 2
		}
	}
}

func skipValue(raw []byte, at int) int {
	depth := 0
	for at < len(raw) {
		switch raw[at] {
		case '"':
			at = skipString(raw, at)
			if depth == 0 {
				return at
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return at
			}
			if depth--; depth == 0 {
				return at + 1
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return at
			}
		}
		at++
	}
	return at
}

// hasMember reports whether b holds `"name"`, a colon and a value that starts with first (0 is any), with any white space
// between. name has its quotes. It is a cheap test for what then is parsed: b may be any text that holds JSON.
func hasMember(b, name []byte, first byte) bool {
	for {
		i := bytes.Index(b, name)
		if i < 0 {
			return false
		}
		b = b[i+len(name):]
		at := skipSpace(b, 0)
		if at == len(b) || b[at] != ':' {
			continue
		}
		if at = skipSpace(b, at+1); at < len(b) && (first == 0 || b[at] == first) {
			return true
		}
	}
}

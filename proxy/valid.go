package proxy

import (
	"encoding/binary"
	"math/bits"
)

// maxDepth is how many levels deep JSON is read; encoding/json has the same limit. Python gives up much earlier.
const maxDepth = 10_000

// valid reports whether raw is JSON (RFC 8259), as json.Valid does. An answer is mostly text, which it looks at eight bytes at a
// time: gjson's, which does not, takes nearly three times as long for a megabyte, and its recursion overflows the stack where
// millions of brackets are nested.
func valid(raw []byte) bool {
	var objects [maxDepth/64 + 1]uint64 // which of the levels around are objects
	depth := 0
	inObject := func() bool { return objects[depth/64]&(1<<(depth%64)) != 0 }
	at := skipSpace(raw, 0)
	for {
		// A value begins at at, which is below 0 where something was wrong.
		if at < 0 || at >= len(raw) {
			return false
		}
		switch c := raw[at]; c {
		case '{', '[':
			if depth++; depth > maxDepth {
				return false
			}
			objects[depth/64] &^= 1 << (depth % 64)
			if c == '{' {
				objects[depth/64] |= 1 << (depth % 64)
			}
			if at = skipSpace(raw, at+1); at == len(raw) {
				return false
			}
			if raw[at] != c+2 { // the bracket that closes it
				if c == '{' {
					at = validKey(raw, at)
				}
				continue
			}
		case '"':
			at = validString(raw, at)
		case 't':
			at = validWord(raw, at, "true")
		case 'f':
			at = validWord(raw, at, "false")
		case 'n':
			at = validWord(raw, at, "null")
		default:
			at = validNumber(raw, at)
		}
		if at < 0 {
			return false
		}
		// What ends it, or the object or list that it is the last of.
		for more := false; !more; {
			at = skipSpace(raw, at)
			if depth == 0 && at == len(raw) {
				return true
			}
			if depth == 0 || at == len(raw) {
				return false
			}
			switch c := raw[at]; {
			case c == ',':
				if at = skipSpace(raw, at+1); inObject() {
					at = validKey(raw, at)
				}
				more = true
			case c == '}' && inObject(), c == ']' && !inObject():
				depth--
				at++
			default:
				return false
			}
		}
	}
}

// The functions below return where what begins at at ends, -1 if it is not valid.

// validKey is a name with its colon, and the white space behind it.
func validKey(raw []byte, at int) int {
	if at == len(raw) || raw[at] != '"' {
		return -1
	}
	if at = validString(raw, at); at < 0 {
		return -1
	}
	if at = skipSpace(raw, at); at == len(raw) || raw[at] != ':' {
		return -1
	}
	return skipSpace(raw, at+1)
}

func validWord(raw []byte, at int, word string) int {
	if end := at + len(word); end <= len(raw) && string(raw[at:end]) == word {
		return end
	}
	return -1
}

const (
	everyByte = 0x0101010101010101
	highBits  = 0x80 * everyByte
)

// special returns the high bits of those bytes of w that cannot be in the midst of a string: quotes, backslashes and control
// characters. The lowest of them is right; those above it may be wrong, as a subtraction borrows.
func special(w uint64) uint64 {
	quote, backslash := w^('"'*everyByte), w^('\\'*everyByte)
	return ((quote-everyByte)&^quote | (backslash-everyByte)&^backslash | (w-' '*everyByte)&^w) & highBits
}

func validString(raw []byte, at int) int {
	for at++; at < len(raw); {
		if len(raw)-at >= 8 {
			found := special(binary.LittleEndian.Uint64(raw[at:]))
			if found == 0 {
				at += 8
				continue
			}
			at += bits.TrailingZeros64(found) / 8
		}
		switch c := raw[at]; {
		case c == '"':
			return at + 1
		case c < ' ':
			return -1
		case c != '\\':
			at++
		default:
			if at = validEscape(raw, at); at < 0 {
				return -1
			}
		}
	}
	return -1
}

func validEscape(raw []byte, at int) int {
	if at++; at == len(raw) {
		return -1
	}
	switch raw[at] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return at + 1
	case 'u':
		if len(raw)-at < 5 {
			return -1
		}
		for _, c := range raw[at+1 : at+5] {
			if _, ok := hexDigit(c); !ok {
				return -1
			}
		}
		return at + 5
	}
	return -1
}

func validNumber(raw []byte, at int) int {
	digits := func() bool {
		from := at
		for at < len(raw) && '0' <= raw[at] && raw[at] <= '9' {
			at++
		}
		return at > from
	}
	if raw[at] == '-' {
		at++
	}
	if at < len(raw) && raw[at] == '0' {
		at++
	} else if !digits() {
		return -1
	}
	if at < len(raw) && raw[at] == '.' {
		if at++; !digits() {
			return -1
		}
	}
	if at < len(raw) && (raw[at] == 'e' || raw[at] == 'E') {
		if at++; at < len(raw) && (raw[at] == '+' || raw[at] == '-') {
			at++
		}
		if !digits() {
			return -1
		}
	}
	return at
}

package proxy

import (
	"regexp"
	"strings"
	"testing"
)

// element is one of a list in Accept-Encoding (RFC 9110, sections 5.6.1, 5.6.2, 12.4.2 and 12.5.3), with the blanks around it.
var element = regexp.MustCompile("^[ \t]*(?:([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*;[ \t]*[qQ]=(0(?:\\.[0-9]{0,3})?|1(?:\\.0{0,3})?))?)?[ \t]*$")

// referenceTakesIdentity is what the RFC says. It says nothing about what is not in its grammar, nor about a name that stands
// twice with different answers: known is false then.
func referenceTakesIdentity(lines []string) (takes, known bool) {
	answers := map[string]bool{}
	for _, line := range lines {
		for _, part := range strings.Split(line, ",") {
			m := element.FindStringSubmatch(part)
			if m == nil {
				return false, false
			}
			name, weight := strings.ToLower(m[1]), m[2]
			takes := weight == "" || strings.ContainsAny(weight, "123456789")
			if before, twice := answers[name]; twice && before != takes {
				return false, false
			}
			answers[name] = takes
		}
	}
	for _, name := range []string{"identity", "*"} {
		if takes, there := answers[name]; there {
			return takes, true
		}
	}
	return true, true
}

// FuzzAcceptEncoding: whether a client takes an answer without coding is read as the RFC has it, in one line or several.
func FuzzAcceptEncoding(f *testing.F) {
	for _, s := range []string{
		"", "gzip", "gzip, deflate, br, zstd", "identity;q=0", "*;q=0", "identity, *;q=0", "*;q=0, identity;q=0.001", "identity;q=0.000,*;q=1.000",
		"gzip;q=0, , *;q=0.", "IDENTITY ; Q=0", "*\t;\tq=0", "gzip\n*;q=0", "identity;q=00", "identityx;q=0", "x;q=0,\tidentity\t;q=0",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		lines := strings.Split(header, "\n")
		got := takesIdentity(lines)
		if want, known := referenceTakesIdentity(lines); known && got != want {
			t.Fatalf("%q: %v, want %v", lines, got, want)
		}
	})
}

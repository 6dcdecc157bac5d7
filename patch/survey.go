package patch

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Survey says where a tree stands towards one set.
type Survey struct {
	Set   string       `json:"set"`
	State State        `json:"state"`
	Gate  string       `json:"gate,omitempty"` // of a patched tree: the environment variable that switches it on
	Files []FileSurvey `json:"files"`

	raw Set // as it was loaded
	set Set // with the gate that the tree has
}

// FileSurvey says where one file stands.
type FileSurvey struct {
	Path    string  `json:"path"`
	State   State   `json:"state"`
	Anchors int     `json:"anchors"`           // how many the set has for it; 0 where it adds the file
	Missing bool    `json:"missing,omitempty"` // where it edits one: the file is not there
	Drifts  []Drift `json:"drifts,omitempty"`
}

// Drift is why an anchor, or a whole file, is neither pristine nor patched.
type Drift struct {
	Anchor int    `json:"anchor,omitempty"` // counted from 1; 0 is the whole file
	Reason string `json:"reason"`
	Line   int    `json:"line,omitempty"`   // the nearest line, counted from 1
	Found  string `json:"found,omitempty"`  // what that line is
	Wanted string `json:"wanted,omitempty"` // what the set expects there
}

func (d Drift) String() string {
	var b strings.Builder
	if d.Anchor > 0 {
		fmt.Fprintf(&b, "anchor %d: ", d.Anchor)
	}
	b.WriteString(d.Reason)
	switch {
	case d.Line > 0 && d.Found != d.Wanted:
		fmt.Fprintf(&b, "; nearest is line %d, %q where %q should be", d.Line, d.Found, d.Wanted)
	case d.Line > 0:
		fmt.Fprintf(&b, "; nearest is line %d, %q", d.Line, d.Found)
	case d.Wanted != "":
		fmt.Fprintf(&b, "; no line of it is, such as %q", d.Wanted)
	}
	return b.String()
}

// contents are files by their path below the package folder. Of one that is not there, ok is false.
type contents interface {
	read(path string) (content []byte, ok bool, err error)
}

// survey looks where each anchor of the set stands.
func survey(c contents, set Set) (Survey, error) {
	gate, err := gateOf(c, set)
	if err != nil {
		return Survey{}, err
	}
	s := Survey{Set: set.Name, Gate: gate, raw: set, set: set.replaceGate([]byte(gate))}
	for _, f := range s.set.Files {
		content, ok, err := c.read(f.Path)
		if err != nil {
			return Survey{}, err
		}
		s.Files = append(s.Files, surveyFile(f, content, ok))
	}
	s.State = s.Files[0].State
	for _, f := range s.Files[1:] {
		if f.State != s.State {
			s.State = Drifted
		}
	}
	if s.State != Patched {
		s.Gate = ""
	}
	return s, nil
}

func gateOf(c contents, set Set) (string, error) {
	for _, f := range set.Files {
		content, ok, err := c.read(f.Path)
		if err != nil {
			return "", err
		}
		if gate, found := gateIn(f, content); ok && found {
			return gate, nil
		}
	}
	return "", nil
}

func surveyFile(f File, content []byte, ok bool) FileSurvey {
	s := FileSurvey{Path: f.Path, Anchors: len(f.Anchors), State: Drifted}
	drift := func(d Drift) { s.Drifts = append(s.Drifts, d) }
	if f.Content != nil {
		switch {
		case !ok:
			s.State = Pristine
		case bytes.Equal(content, f.Content):
			s.State = Patched
		case bytes.Contains(content, []byte(Marker)):
			drift(Drift{Reason: "it is of another version of this set, or was edited: revert with what put it there, or install vLLM again"})
		default:
			drift(Drift{Reason: "there is another file of this name"})
		}
		return s
	}
	if !ok {
		s.Missing = true
		drift(Drift{Reason: "the file is not there"})
		return s
	}
	var states []State
	for i, a := range f.Anchors {
		a = a.ends(content)
		p := a.in(content)
		states = append(states, p.state)
		if p.state == Drifted {
			line, found, wanted := a.nearest(content)
			drift(Drift{Anchor: i + 1, Reason: p.reason, Line: line, Found: found, Wanted: wanted})
		}
	}
	slices.Sort(states)
	switch states = slices.Compact(states); {
	case len(states) == 1:
		s.State = states[0]
	case len(s.Drifts) == 0:
		drift(Drift{Reason: "some of its anchors are patched and some are not"})
	}
	if s.State == Patched {
		// What one anchor left may look like what another leaves: then only one of them is there.
		if _, err := f.replace(content, backward); err != nil {
			s.State = Drifted
			drift(Drift{Reason: err.Error()})
		}
	}
	return s
}

// drifted is the error of a survey that is neither.
func (s Survey) drifted() error {
	var lines []string
	byState := map[State][]string{}
	for _, f := range s.Files {
		byState[f.State] = append(byState[f.State], f.Path)
		for _, d := range f.Drifts {
			lines = append(lines, fmt.Sprintf("  %s: %s", f.Path, d))
		}
	}
	if len(byState[Pristine]) > 0 && len(byState[Patched]) > 0 {
		lines = append(lines, fmt.Sprintf("  only a part is patched: %s is, %s is not",
			strings.Join(byState[Patched], ", "), strings.Join(byState[Pristine], ", ")))
	}
	return &DriftError{Set: s.Set, Survey: s, lines: lines}
}

// DriftError says that a set fits a tree neither as it was nor as the set leaves it.
type DriftError struct {
	Set    string
	Survey Survey
	lines  []string
}

func (e *DriftError) Error() string {
	return fmt.Sprintf("the set %s does not fit:\n%s", e.Set, strings.Join(e.lines, "\n"))
}

// drifts counts what does not fit.
func (s Survey) drifts() int {
	n := 0
	for _, f := range s.Files {
		n += len(f.Drifts)
		if f.State == Drifted && f.Anchors == len(f.Drifts) { // nothing of it fits
			n++
		}
	}
	return n
}

// choose returns the one of several sets that fits the tree, or none of which fits best. Where several fit, it is the
// one with the most edits: it knows most of the tree.
func choose(c contents, sets []Set) (Survey, error) {
	var best []Survey
	rank := func(s Survey) int { // the higher the better
		if s.State == Drifted {
			return -s.drifts() - 1
		}
		return s.set.edits()
	}
	for _, set := range sets {
		s, err := survey(c, set)
		if err != nil {
			return Survey{}, err
		}
		if len(best) > 0 && rank(s) < rank(best[0]) {
			continue
		}
		if len(best) > 0 && rank(s) > rank(best[0]) {
			best = nil
		}
		best = append(best, s)
	}
	switch {
	case len(best) == 0:
		return Survey{}, errors.New("no set to choose from")
	case len(best) > 1 && best[0].State != Drifted:
		return Survey{}, fmt.Errorf("the sets %s and %s fit alike; name one with --set", best[0].Set, best[1].Set)
	}
	return best[0], nil
}

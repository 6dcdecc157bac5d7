package main

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestSection(t *testing.T) {
	const changelog = "# Changelog\n\nText.\n\n## [Unreleased]\n\n### Added\n\n- New.\n\n## [1.1.0] - 2026-12-02\n\n### Fixed\n\n- One.\n\n### Added\n\n- Two.\n\n## [1.0.1] - 2026-12-01\n\n## [1.0.0]\n\n- First.\n"
	for version, want := range map[string]struct{ notes, err string }{
		"1.1.0": {notes: "### Fixed\n\n- One.\n\n### Added\n\n- Two.\n"},
		"1.0.1": {err: "says nothing of 1.0.1"},
		"1.0.0": {err: "has no date: ## [1.0.0] - YYYY-MM-DD"},
		"1.1":   {err: "has no section for 1.1:"},
		"1.2.0": {err: "has no section for 1.2.0: its heading is ## [1.2.0] - YYYY-MM-DD"},
	} {
		notes, err := section(changelog, version)
		if notes != want.notes || (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%s: %q, %v", version, notes, err)
		}
	}
}

// TestChangelog: ours has the form that a release reads, the newest first.
func TestChangelog(t *testing.T) {
	text, err := os.ReadFile("../../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	before := ""
	for i, part := range strings.Split(string(text), "\n## ")[1:] {
		heading, _, _ := strings.Cut(part, "\n")
		m := headingForm.FindStringSubmatch("## " + heading)
		switch {
		case m == nil:
			t.Errorf("heading %q", heading)
		case i == 0:
			if m[1] != "Unreleased" || m[2] != "" {
				t.Errorf("the first section is %q, want Unreleased", heading)
			}
		default:
			if _, err := section(string(text), m[1]); err != nil || !isRelease("v"+m[1]) {
				t.Errorf("%s: %v", heading, err)
			}
			if _, err := time.Parse(time.DateOnly, m[2]); err != nil || before != "" && m[2] > before {
				t.Errorf("%s: %v, after one of %s", heading, err, before)
			}
			before = m[2]
		}
	}
}

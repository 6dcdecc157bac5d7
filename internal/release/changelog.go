package main

import (
	"fmt"
	"regexp"
	"strings"
)

// headingForm is a version's heading as keepachangelog.com has it.
var headingForm = regexp.MustCompile(`^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$`)

// section returns what CHANGELOG.md says of a version, without the heading.
func section(changelog, version string) (string, error) {
	var text []string
	in, found := false, false
	for line := range strings.Lines(changelog) {
		if !strings.HasPrefix(line, "## ") {
			if in {
				text = append(text, line)
			}
			continue
		}
		m := headingForm.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if in = m != nil && m[1] == version; !in {
			continue
		}
		found = true
		if m[2] == "" {
			return "", fmt.Errorf("CHANGELOG.md: the heading of %s has no date: ## [%s] - YYYY-MM-DD", version, version)
		}
	}
	notes := strings.TrimSpace(strings.Join(text, ""))
	switch {
	case !found:
		return "", fmt.Errorf("CHANGELOG.md has no section for %s: its heading is ## [%s] - YYYY-MM-DD", version, version)
	case notes == "":
		return "", fmt.Errorf("CHANGELOG.md says nothing of %s", version)
	}
	return notes + "\n", nil
}

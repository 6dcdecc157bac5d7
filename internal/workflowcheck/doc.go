// Package workflowcheck tests GitHub's workflows with actionlint.
//
// It is a Go module of its own: actionlint needs another version of a YAML
// library than docker compose, which internal/dockercheck has.
package workflowcheck

// Package dockercheck tests the Dockerfile of vllm-timings where there is no
// container engine: it reads the file with BuildKit's own parser, and builds
// and runs the program as the Dockerfile says, in a sandbox made by bubblewrap.
//
// It is a Go module of its own, so that BuildKit's dependencies stay out of
// the program's.
package dockercheck

// Package dockercheck tests what is for containers where there is no container
// engine: it reads Dockerfiles with BuildKit's own parser, compose files with
// that of docker compose, and builds and runs the program as the Dockerfile
// says, in a sandbox made by bubblewrap.
//
// It is a Go module of its own, so that the dependencies of BuildKit and of
// docker compose stay out of the program's. Its command composejson gives
// internal/e2e what a compose file says.
package dockercheck

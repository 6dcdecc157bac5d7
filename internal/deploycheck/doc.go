// Package deploycheck tests the examples in deploy with the programs that they
// are for: Prometheus and its promtool, and systemd-analyze. Those for
// containers and Kubernetes are tested in internal/dockercheck, a module of its
// own, as their types come with many dependencies.
package deploycheck

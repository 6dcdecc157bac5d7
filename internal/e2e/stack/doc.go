//go:build unix

// Package stack starts and stops the real programs that the end-to-end tests and the accuracy measurement run on:
// vLLM on the CPU, llama-swap and the sidecar itself.
package stack

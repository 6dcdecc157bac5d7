// Package vllmsim is a simulated vLLM server: an http.Handler that answers
// like the real one (see the recordings in testdata), with an engine behind it
// whose figures agree with one another. The per-request metrics of an answer,
// the difference of two readings of /metrics around it, its usage, and the
// times at which its events were sent all describe the same request.
//
// It serves `make run`, fault tests and benchmarks. It has no model: the text
// is made of fixed words, and a token is four bytes of prompt.
//
// The engine works in steps, as vLLM's does. All running requests get one
// token at the end of each step, at the same instant; a request whose prefill
// ended in the middle of a step gets its first token at the end of that step;
// with nothing decoding, it gets it when its prefill ends. Requests beyond
// [Config].MaxRunning wait in a queue.
package vllmsim

// Command soak runs the sidecar for half an hour under a load with everything that goes wrong in real life: clients that
// leave, answers whose connection dies, a vLLM that is killed and started again.
//
// The sidecar is the real program; it and a simulated vLLM are processes of their own. Clients keep a number of requests
// open, streamed and whole, at every endpoint that gets timings; a few more ask vLLM itself, beside the sidecar. What is
// judged are counts, never times: each answer is checked as it comes, the sums of all clients are compared with the
// sidecar's own metrics, and its goroutines, descriptors and memory must not grow.
//
// The program starts itself again as the simulated vLLM: "vllm" is a hidden command. docs/soak.md has the last table.
package main

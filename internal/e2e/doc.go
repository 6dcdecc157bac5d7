// Package e2e holds the end-to-end tests on real programs: client -> llama-swap -> sidecar -> vLLM.
//
// They need a real vLLM (vllm-env.sh installs one for the CPU, with a tiny random model), a real llama-swap, a real
// Prometheus and the client libraries of OpenAI, Anthropic and LiteLLM (clients-env.sh; Node must be there), take about
// fifteen minutes, and so stand behind the build tag e2e:
//
//	go test -tags e2e -count=1 -timeout 60m -v ./internal/e2e/...
//
// Nothing here skips: a missing program is a failure that says what to do.
package e2e

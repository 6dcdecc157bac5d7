// Package e2e holds the end-to-end tests on real programs: client -> llama-swap -> sidecar -> vLLM.
//
// They need a real vLLM (vllm-env.sh installs one for the CPU, with a tiny random model), a real llama-swap, a real
// Prometheus and the client libraries of OpenAI, Anthropic and LiteLLM (clients-env.sh; Node must be there), take about
// twenty minutes, and so stand behind the build tag e2e:
//
//	go test -tags e2e -count=1 -timeout 60m -v ./internal/e2e/...
//
// A missing program is a failure that says what to do. Only TestBrowser skips, where there is no Chromium and CI is not set.
package e2e

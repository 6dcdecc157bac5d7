# vllm-timings. "make help" lists the targets.
# build, run and test need nothing but Go (and make).

SHELL := /bin/sh
.DEFAULT_GOAL := build

GO       ?= go
BIN      := bin/vllm-timings
IMAGE    ?= vllm-timings
FUZZTIME ?= 30s

# The commit goes into the program through Go's build info. Said explicitly,
# as some environments set GOFLAGS=-buildvcs=false; outside a git checkout (a
# tarball, or before the first commit) there is nothing to put in.
BUILDVCS := $(if $(wildcard .git),$(if $(shell git rev-parse -q --verify HEAD 2>/dev/null),true,auto),auto)

# The race detector needs cgo, so a C compiler. Without one the tests run
# without it, and say so.
RACE := $(if $(shell command -v "$$($(GO) env CC)" 2>/dev/null),-race)

# Go modules of their own: the dependencies of BuildKit, Compose, Kubernetes and
# actionlint stay out of ours.
NESTED := internal/dockercheck internal/workflowcheck

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: ## build the static program bin/vllm-timings
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=$(BUILDVCS) -o $(BIN) ./cmd/vllm-timings

.PHONY: run
run: build ## run it before a simulated vLLM, or before a real one with UPSTREAM=http://host:port
ifdef UPSTREAM
	$(BIN) serve --upstream "$(UPSTREAM)"
else
	$(GO) build -o bin/demo ./internal/vllmsim/demo
	bin/demo -- $(BIN) serve
endif

# The nested modules read files of the main one, which Go's test cache does not
# notice: -count=1.
.PHONY: test
test: ## go vet, and all tests with the race detector
	@test -n "$(RACE)" || echo "make test: no C compiler, so without the race detector"
	$(GO) vet ./...
	$(GO) test $(RACE) ./...
	set -e; for m in $(NESTED); do (cd $$m; $(GO) vet ./...; $(GO) test $(RACE) -count=1 ./...); done

.PHONY: fmt
fmt: ## gofmt all Go files
	gofmt -w .

.PHONY: lint
lint: ## gofmt, vet, staticcheck, go.mod, the syntax of shell scripts
	@files="$$(gofmt -l .)" || exit 1; \
	if [ -n "$$files" ]; then echo "not gofmt-ed (make fmt):"; echo "$$files"; exit 1; fi
	$(GO) vet ./...
	$(GO) vet -tags e2e ./...
	$(GO) tool staticcheck ./...
	$(GO) tool staticcheck -tags e2e ./...
	$(GO) mod tidy -diff
	$(GO) build -o bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	set -e; for m in $(NESTED); do (cd $$m; $(GO) vet ./...; $(CURDIR)/bin/staticcheck ./...; $(GO) mod tidy -diff); done
	@for f in .ci/run $$(find . -name .git -prune -o -name '*.sh' -print); do \
		bash -n "$$f" || exit 1; \
	done

# One target at a time, each alone on all cores. Go before 1.27 sometimes ends
# a target with a bare "context deadline exceeded" just when its time is up
# (golang/go#75804): with no failing input written, that target is tried once
# more. What is new but no failure is made shorter for a second at most: coverage
# of what goes over sockets is never twice the same, and Go would go on for a
# minute each time.
.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZTIME (30s)
	@set -e; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	list=$$($(GO) test -list '^Fuzz' ./...); \
	targets=$$(echo "$$list" | awk '/^Fuzz/ { names[++n] = $$1 } \
		$$1 == "ok" { for (i = 1; i <= n; i++) print $$2 ":" names[i]; n = 0 }'); \
	if [ -z "$$targets" ]; then echo "make fuzz: no fuzz target found"; exit 1; fi; \
	once() { \
		if $(GO) test -run '^$$' -fuzz "^$$2\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1s "$$1" >"$$log" 2>&1; \
		then code=0; else code=1; fi; \
		cat "$$log"; return $$code; \
	}; \
	for t in $$targets; do \
		pkg=$${t%:*}; name=$${t##*:}; \
		echo "== $$name ($$pkg), $(FUZZTIME)"; \
		if once "$$pkg" "$$name"; then continue; fi; \
		if ! grep -q 'context deadline exceeded' "$$log" || \
			grep -q -e 'Failing input written' -e 'panic:' "$$log"; then exit 1; fi; \
		echo "== $$name once more: its time ran out with no failing input"; \
		once "$$pkg" "$$name"; \
	done

.PHONY: bench
bench: ## compare with a plain reverse proxy, and Go's benchmarks
	$(GO) run ./internal/bench
	$(GO) test -bench . -benchmem -run '^$$' ./sse ./proxy ./metrics

.PHONY: bench-short
bench-short: ## the same, short: shows that it works, not a measurement
	$(GO) run ./internal/bench --short
	$(GO) test -bench . -benchmem -benchtime 100x -run '^$$' ./sse ./proxy ./metrics

.PHONY: bench-peers
bench-peers: ## the comparison with nginx, llama-swap and LiteLLM too, and with each source, for docs/performance.md
	litellm=$$(bash internal/bench/litellm-env.sh) && LITELLM=$$litellm $(GO) run ./internal/bench --peers

.PHONY: bench-peers-short
bench-peers-short: ## the same without LiteLLM, short: shows that it works
	$(GO) run ./internal/bench --peers --short

.PHONY: soak
soak: ## half an hour of load with clients that leave and a vLLM that dies, for docs/soak.md
	$(GO) run ./internal/soak

.PHONY: soak-short
soak-short: ## the same for a minute
	$(GO) run ./internal/soak --for 1m --restart-every 15s

.PHONY: e2e-env
e2e-env:
	bash internal/e2e/vllm-env.sh

# TestPatchedImage patches an older one.
.PHONY: e2e-older
e2e-older:
	bash internal/e2e/vllm-env.sh 0.19.1

.PHONY: e2e-clients
e2e-clients:
	bash internal/e2e/clients-env.sh

.PHONY: llama-swap
llama-swap: ## build a llama-swap for the tests, if there is none yet
	bash internal/e2e/llama-swap.sh

.PHONY: e2e
e2e: llama-swap e2e-env e2e-older e2e-clients ## tests with real vLLM (on the CPU), real llama-swap and real clients
	$(GO) test -tags e2e -count=1 -timeout 60m -v ./internal/e2e/...

.PHONY: bench-serve
bench-serve: e2e-env ## compare with real vLLM's own load generator, for docs/performance.md
	$(GO) test -tags e2e -count=1 -timeout 60m -v -run '^TestBenchServe$$' ./internal/e2e -args -bench-rounds 5 -bench-at-once 16,64 -bench-prompts 160

.PHONY: accuracy
accuracy: e2e-env ## measure the figures against vLLM's own, for docs/accuracy.md
	$(GO) run ./internal/e2e/accuracy

.PHONY: accuracy-short
accuracy-short: e2e-env ## the same, short
	$(GO) run ./internal/e2e/accuracy --short

.PHONY: patch-matrix
patch-matrix: ## patch and unpatch every release of vLLM, for docs/patch-support.md
	$(GO) run ./internal/patchmatrix > docs/patch-support.md.new
	mv docs/patch-support.md.new docs/patch-support.md

.PHONY: patch-matrix-short
patch-matrix-short: ## the same with a few releases, printed only
	$(GO) run ./internal/patchmatrix --short

# For both platforms at once, which needs a buildx builder that can push:
#   make docker DOCKER_FLAGS="--platform linux/amd64,linux/arm64 --push" IMAGE=registry/name
.PHONY: docker
docker: ## build the container image IMAGE (vllm-timings); DOCKER_FLAGS for several platforms
	docker build $(DOCKER_FLAGS) -t $(IMAGE) \
		--build-arg VERSION="$$(git describe --tags --always --dirty 2>/dev/null)" \
		--build-arg COMMIT="$$(git rev-parse HEAD 2>/dev/null)" \
		--build-arg DATE="$$(TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null)" \
		.

# VERSION: another than git describe says. DIRTY=1: with changes that are not committed.
.PHONY: release
release: ## archives for each platform, with SBOMs and checksums, into dist/
	$(GO) run ./internal/release --go "$(GO)" --version "$(VERSION)" $(if $(DIRTY),--dirty)

.PHONY: release-check
release-check: ## build the same release again, elsewhere, and compare with dist/
	bash internal/release/check.sh "$(GO)" "$(VERSION)"

.PHONY: clean
clean: ## remove what was built
	rm -rf artifacts bin dist

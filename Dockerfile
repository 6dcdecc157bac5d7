# syntax=docker/dockerfile:1

# Built on the machine's own platform, compiled for the target's: no emulation.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src

# The modules first: this layer stays cached until go.mod or go.sum change.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod \
    go mod download

COPY . .

# .git is not in the build context, so what "vllm-timings version" prints is
# given from outside ("make docker" does it).
ARG VERSION=""
ARG COMMIT=""
ARG DATE=""
ARG TARGETOS
ARG TARGETARCH
RUN --mount=type=cache,target=/go/pkg/mod \
    --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS="$TARGETOS" GOARCH="$TARGETARCH" \
    go build -trimpath -buildvcs=false \
      -ldflags "-s -w -X 'main.version=$VERSION' -X 'main.commit=$COMMIT' -X 'main.date=$DATE'" \
      -o /out/vllm-timings ./cmd/vllm-timings

FROM scratch
ARG VERSION=""
ARG COMMIT=""
ARG DATE=""
LABEL org.opencontainers.image.title="vllm-timings" \
      org.opencontainers.image.description="Adds llama.cpp's timings to the answers of vLLM" \
      org.opencontainers.image.source="https://github.com/vllm-timings/vllm-timings" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$COMMIT" \
      org.opencontainers.image.created="$DATE"

COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /src/LICENSE /src/NOTICE /licenses/
COPY --from=build /out/vllm-timings /vllm-timings

USER 65532:65532
ENV VLLM_TIMINGS_LISTEN=:8010
EXPOSE 8010
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 \
    CMD ["/vllm-timings", "healthcheck"]
ENTRYPOINT ["/vllm-timings"]
CMD ["serve"]

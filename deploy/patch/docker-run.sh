#!/bin/sh
# The same as compose.yaml, with docker run. Arguments are those of `vllm serve`:
#
#   vllm-timings patch export --format python --output deploy/patch/vllm-timings-patch.py
#   deploy/patch/docker-run.sh Qwen/Qwen3-8B --served-model-name qwen3-8b
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 \
  -v "$here/vllm-timings-patch.py:/vllm-timings-patch.py:ro" \
  -v huggingface:/root/.cache/huggingface \
  --entrypoint /bin/sh "${VLLM_IMAGE:-vllm/vllm-openai:v0.19.1}" \
  -c 'python3 /vllm-timings-patch.py && exec vllm serve "$@"' vllm "$@"

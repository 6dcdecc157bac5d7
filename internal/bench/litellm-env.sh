#!/usr/bin/env bash
# Installs the LiteLLM proxy that make bench-peers compares with, in the versions that litellm/requirements.txt pins, and
# prints the path of its program. It is below ${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-~/.cache}/vllm-timings}/litellm.
# Only the path goes to stdout; progress goes to stderr. A finished install returns at once, an interrupted one is redone.
# VLLM_TIMINGS_PYTHON names the Python to build with (default: python3).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-timings}/litellm
python=${VLLM_TIMINGS_PYTHON:-python3}

say() { printf 'litellm-env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  die "needs Python 3.10 or newer with venv and pip; '$python' is not that (set VLLM_TIMINGS_PYTHON, or on Debian install python3-venv)"

# The stamp holds what the install was made from, so that a changed script, pin or Python makes a new one.
stamp=$(cat "$here/litellm-env.sh" "$here/litellm/requirements.txt" <("$python" -VV) | sha256sum | cut -d' ' -f1)
done_already() { [[ -x $dir/venv/bin/litellm && -f $dir/stamp && $(<"$dir/stamp") == "$stamp" ]]; }

if ! done_already; then
  mkdir -p "$(dirname "$dir")"
  # One installer at a time; whoever waited finds the work done. The children must not inherit the lock: a daemon
  # that some tool leaves behind would hold it.
  exec 9>"$dir.lock"
  flock 9
  if ! done_already; then
    say "installing the LiteLLM proxy into $dir"
    rm -rf "$dir"
    mkdir -p "$dir"
    # Not `( ... ) || die`: inside a tested command `set -e` has no effect.
    set +e
    (
      set -e
      exec 9>&- >&2
      # A venv has its own path in its scripts, so it is built where it stays; the stamp, written last, makes it count.
      "$python" -m venv "$dir/uv"
      "$dir/uv/bin/pip" install --quiet --disable-pip-version-check uv
      "$dir/uv/bin/uv" venv --quiet --python "$python" "$dir/venv"
      # uv's cache lies beside the venv, so that files are hard links and not copies, and goes at the end.
      UV_CACHE_DIR=$dir/uv-cache VIRTUAL_ENV=$dir/venv "$dir/uv/bin/uv" pip install --quiet --no-deps --compile-bytecode -r "$here/litellm/requirements.txt"
      rm -rf "$dir/uv-cache"
      printf '%s\n' "$stamp" >"$dir/stamp"
    )
    failed=$?
    set -e
    ((failed == 0)) || die "could not install the LiteLLM proxy; run this again to start over"
    say "done: $(du -sh "$dir" | cut -f1)"
  fi
fi
printf '%s\n' "$dir/venv/bin/litellm"

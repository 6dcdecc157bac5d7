#!/usr/bin/env bash
# Installs the client libraries that the end-to-end tests drive, in the versions that clients/ pins, and prints the
# path of the folder that they are in:
#
#   venv/bin/python   with openai, anthropic and litellm        node/   has node_modules with openai
#
# It is ${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-~/.cache}/vllm-timings}/clients. Only the path goes to stdout; progress
# goes to stderr. A finished install returns at once, an interrupted one is redone. VLLM_TIMINGS_PYTHON names the Python
# to build with (default: python3). Node is not installed: it must be there.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-timings}/clients
python=${VLLM_TIMINGS_PYTHON:-python3}

say() { printf 'clients-env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  die "needs Python 3.10 or newer with venv and pip; '$python' is not that (set VLLM_TIMINGS_PYTHON, or on Debian install python3-venv)"
# The version that runs, as `node` may also be something else (an amateur radio program on old Debians).
node=$(node -p 'process.versions.node' 2>/dev/null) && [[ ${node%%.*} =~ ^[0-9]+$ && ${node%%.*} -ge 18 ]] ||
  die "needs Node.js 18 or newer as 'node' in PATH, found: ${node:-none}; install it (on Debian: apt-get install nodejs npm)"
npm --version >/dev/null 2>&1 ||
  die "needs npm in PATH, and there is none; install it (on Debian: apt-get install npm)"

# The stamp holds what the install was made from, so that a changed script, pin or Python makes a new one.
made_from=("$here/clients-env.sh" "$here/clients/requirements.txt" "$here/clients/package.json" "$here/clients/package-lock.json")
stamp=$(cat "${made_from[@]}" <("$python" -VV) | sha256sum | cut -d' ' -f1)
done_already() { [[ -x $dir/venv/bin/python && -d $dir/node/node_modules/openai && -f $dir/stamp && $(<"$dir/stamp") == "$stamp" ]]; }

if ! done_already; then
  mkdir -p "$(dirname "$dir")"
  # One installer at a time; whoever waited finds the work done. The children must not inherit the lock: a daemon
  # that some tool leaves behind would hold it.
  exec 9>"$dir.lock"
  flock 9
  if ! done_already; then
    say "installing the client libraries into $dir"
    rm -rf "$dir"
    mkdir -p "$dir/node"
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
      UV_CACHE_DIR=$dir/uv-cache VIRTUAL_ENV=$dir/venv "$dir/uv/bin/uv" pip install --quiet --no-deps -r "$here/clients/requirements.txt"
      rm -rf "$dir/uv-cache"
      cp "$here/clients/package.json" "$here/clients/package-lock.json" "$dir/node/"
      npm ci --prefix "$dir/node" --omit=peer --ignore-scripts --no-audit --no-fund --loglevel=error
      printf '%s\n' "$stamp" >"$dir/stamp"
    )
    failed=$?
    set -e
    ((failed == 0)) || die "could not install the client libraries; run this again to start over"
    say "done: $(du -sh "$dir" | cut -f1)"
  fi
fi
printf '%s\n' "$dir"

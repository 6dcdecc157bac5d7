#!/usr/bin/env bash
# Prints the path of a llama-swap for the tests: the one that there is ($LLAMA_SWAP, or shared/bin/llama-swap beside the
# repository), else one built from the source of the commit below, with Go, git and npm (Node.js 20 or newer), into
#
#   ${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-~/.cache}/vllm-timings}/llama-swap/COMMIT/llama-swap
#
# where the tests look too. Only the path goes to stdout. LLAMA_SWAP_SOURCE names another place to take that commit from.
set -euo pipefail

commit=0bdb3720199f530b622a1934c0db89f32c94819c # 5 commits after v250; the tests read the same name
source=${LLAMA_SWAP_SOURCE:-https://github.com/mostlygeek/llama-swap}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${VLLM_TIMINGS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-timings}
dir=$cache/llama-swap/$commit
bin=$dir/llama-swap

say() { printf 'llama-swap: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

for there in "${LLAMA_SWAP:-}" "$(dirname "$root")/shared/bin/llama-swap" "$bin"; do
  if [[ -n $there ]] && command -v "$there" >/dev/null; then
    command -v "$there"
    exit
  fi
  [[ -z $there || $there != "${LLAMA_SWAP:-}" ]] || die "LLAMA_SWAP is $there, which cannot be run"
done

mkdir -p "$dir"
work=$(mktemp -d "$dir/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "building commit ${commit:0:12} of $source into $dir"
# By its hash, which git checks: whatever the place says, this is that commit.
git init --quiet "$work/source" >&2
git -C "$work/source" fetch --quiet --depth 1 "$source" "$commit" >&2 || die "cannot get commit $commit of $source"
git -C "$work/source" -c advice.detachedHead=false checkout --quiet FETCH_HEAD >&2
# The pages, which TestBrowser looks at, go into the program.
(cd "$work/source/ui" && npm ci --no-audit --no-fund && npm run build) >&2 || die "cannot build llama-swap's pages: they need Node.js 20 or newer"
(cd "$work/source" && CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off go build -tags embed_ui -trimpath -buildvcs=false \
  -ldflags "-X main.version=${commit:0:12} -X main.commit=$commit" -o "$work/llama-swap" .) >&2 ||
  die "cannot build llama-swap"
# Whole or not at all, also where two build at once.
mv "$work/llama-swap" "$bin"
printf '%s\n' "$bin"

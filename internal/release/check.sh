#!/usr/bin/env bash
# Builds the release of the commit that is checked out again, from a clone in another folder, with nothing in Go's build
# cache and in another environment, and compares it with dist/.
#
#   internal/release/check.sh [GO [VERSION]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
go=${1:-go} version=${2:-}

[[ -f dist/SHA256SUMS ]] || { echo "release-check: there is no release in dist/: make release" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The tags too, as the version comes from them.
git clone --quiet --no-local . "$work/a clone"
git -C "$work/a clone" checkout --quiet --detach "$(git rev-parse HEAD)"
mkdir "$work/home"
(
  cd "$work/a clone"
  umask 077
  modules=$("$go" env GOMODCACHE)
  env HOME="$work/home" GOCACHE="$work/cache" GOMODCACHE="$modules" TZ=Pacific/Chatham LC_ALL=C \
    "$go" run ./internal/release --go "$go" --version "$version" --out "$work/dist"
)
diff -r dist "$work/dist"
echo "release-check: the same bytes"

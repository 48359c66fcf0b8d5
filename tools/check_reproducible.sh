#!/bin/bash
# Builds the libraries and the wheel in a second, empty output base and compares them with the first.
# usage: tools/check_reproducible.sh [bazel option]...
set -eu -o pipefail
cd "$(dirname "$0")/.."

second=$(mktemp -d)
cleanup() {
  ./bazelw --output_base="$second/base" shutdown >/dev/null 2>&1 || true
  chmod -R u+w "$second" && rm -rf "$second"
}
trap cleanup EXIT

# digests OUTPUT_BASE [bazel option]...: sha256 of each library, the manifest and the wheel.
digests() {
  local startup=()
  if [ -n "$1" ]; then startup=("--output_base=$1"); fi
  shift
  ./bazelw "${startup[@]}" build --symlink_prefix=/ "$@" //kernels:libraries //python:wheel 1>&2
  local out
  out=$(./bazelw "${startup[@]}" info "$@" bazel-bin 2>/dev/null)
  # Other targets leave libraries and wheels in the same folder: the manifest says which are meant.
  (
    cd "$out"
    sha256sum kernels/manifest.json python/*.whl
    cd kernels
    grep -o '"libdeepep_[a-z0-9_]*\.so"' manifest.json | tr -d '"' | sort | xargs sha256sum
  )
}

digests "" "$@" >"$second/first.txt"
digests "$second/base" "$@" >"$second/second.txt"
diff "$second/first.txt" "$second/second.txt"
echo "reproducible: $(wc -l <"$second/first.txt") files are the same in two output bases"

#!/usr/bin/env bash
# Runs the native fuzzers of this module, one after the other:
#   test/fuzz.sh RUNS [REGEXP]     RUNS as in -fuzztime: 50000x, or a time; REGEXP selects by name
# One instrumented binary a package runs all its fuzzers. `go test -fuzz` would link it again for each, and
# `go test -list` would link the tests of all packages to find the names.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly runs=$1 select=${2:-.}
module=$(go list -m)
cache=$(go env GOCACHE)/fuzz/$module
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for dir in $(git grep -lE '^func Fuzz' -- '*_test.go' | xargs -n1 dirname | sort -u); do
  declared=$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' "$dir"/*_test.go | sort)
  if ! grep -qE "$select" <<< "$declared"; then
    continue
  fi
  go test -c -fuzz . -o "$out/fuzz.test" "./$dir"
  # What the sources declare must be what the binary has: a fuzzer behind a build tag would not run.
  compiled=$("$out/fuzz.test" -test.list '^Fuzz' | sort)
  if [[ "$declared" != "$compiled" ]]; then
    printf '%s declares\n%s\nand its test binary has\n%s\n' "$dir" "$declared" "$compiled" >&2
    exit 1
  fi
  for target in $(grep -E "$select" <<< "$declared"); do
    echo "== $dir $target"
    # The working directory is the package's, as under go test, because what fails is written to its testdata.
    (cd "$dir" && "$out/fuzz.test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$runs" \
      -test.fuzzminimizetime 5x -test.fuzzcachedir "$cache/$dir" 2>&1) | tee "$out/log"
    # A binary that finds no such fuzzer only warns.
    grep -q 'now fuzzing' "$out/log" || { echo "$dir $target has not run" >&2; exit 1; }
  done
done

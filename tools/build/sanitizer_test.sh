#!/bin/bash
# Run a program that was built with a sanitizer.
#
# usage: sanitizer_test.sh PROGRAM EXPECT [argument]...
#
# EXPECT empty: the program must exit 0, and a report of the sanitizer makes it exit otherwise.
# Else the program must fail, and its output must match EXPECT, an extended regular expression.
set -u -o pipefail

program=$1
expect=$2
shift 2
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 exitcode=66"
export ASAN_OPTIONS="detect_leaks=1 detect_stack_use_after_return=1 exitcode=66"
export UBSAN_OPTIONS="print_stacktrace=1"

# ThreadSanitizer needs its shadow's addresses free; some kernels scatter mappings too widely for
# it. Without address randomisation they are free, where a sandbox allows to turn that off.
run=()
if setarch -R true 2>/dev/null; then run=(setarch -R); fi

if [ -z "$expect" ]; then
  exec "${run[@]}" "$program" "$@"
fi

output=$("${run[@]}" "$program" "$@" 2>&1)
code=$?
printf '%s\n' "$output"
if [ "$code" -eq 0 ]; then
  echo "FAILED: the program passed, but should have been caught ($expect)" >&2
  exit 1
fi
if ! grep -qE -- "$expect" <<<"$output"; then
  echo "FAILED: the program exited $code, but its output holds no match of: $expect" >&2
  exit 1
fi
echo "caught, as it should be: exit $code, output matches: $expect"

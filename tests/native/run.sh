#!/usr/bin/env bash
# Builds the tests of the core and runs them: plain, then with ThreadSanitizer, then with AddressSanitizer and
# UndefinedBehaviorSanitizer. `run.sh [none|thread|address]...` runs some of these; JOBS=… compiles so many files at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if (($# == 0)); then set -- none thread address; fi
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}"
for sanitizer in "$@"; do
  printf '\n=== sanitizer: %s\n' "$sanitizer"
  make -j "${JOBS:-2}" SANITIZER="$sanitizer" all
  make SANITIZER="$sanitizer" run
done

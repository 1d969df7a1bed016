#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most 8 minutes: scripts/gpu_check.sh [LAYERS]
# Needs a Python (PYTHON=...) with torch for CUDA and this project's dependencies; nothing is downloaded. LAYERS: of the
# 70B-shaped model, all 80 by default (36 GB of disk or memory under EESD_HOME, and as much memory again).
# Prints a table; the last line is one JSON object. Exit code 1 if a test or a comparison of ids fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
layers=${1:-80}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: error: $python has no torch that sees a CUDA device; name another with PYTHON=..." >&2
  exit 2
fi

if [ -z "${EESD_HOME:-}" ]; then
  # Memory is the fastest place for files that are only wanted once; a disk will do.
  free=$(df --output=avail -B1G /dev/shm 2>/dev/null | tail -1 || echo 0)
  if [ "${free:-0}" -gt $((layers / 2 + 8)) ]; then where=/dev/shm; else where=${TMPDIR:-/tmp}; fi
  EESD_HOME=$(mktemp -d "$where/eesd-gpu-check.XXXXXX")
  export EESD_HOME
  trap 'rm -rf "$EESD_HOME"' EXIT
fi

tests=0
if "$python" -c 'import pytest' 2>/dev/null; then
  timeout 180 "$python" -m pytest -q -m gpu -p no:cacheprovider || tests=$?
else
  echo "pytest is not installed: the gpu tests did not run" >&2
  tests=1
fi
timeout 270 "$python" scripts/gpu_check.py --layers "$layers" --tests-exit-code "$tests" || exit $?
[ "$tests" -eq 0 ]

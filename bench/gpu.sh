#!/usr/bin/env bash
# Attention over shared segments on a GPU, beside SDPA over copies and FlashInfer; under 10 minutes.
# Needs this repository and a Python with a CUDA build of torch, and triton: PYTHON=... bench/gpu.sh
# Rows: build/bench/gpu-kernels.json. `--interpret` runs the programs on a CPU, without times.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "bench/gpu.sh: $python has no torch; name one that has: PYTHON=.venv/bin/python bench/gpu.sh" >&2
  exit 2
fi
PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" \
  exec "$python" -m tests.benchmarks.bench_gpu_kernels "$@"

#!/usr/bin/env bash
# Attention over shared segments on a GPU, beside SDPA over copies and FlashInfer; under 10 minutes.
# Needs this repository and a Python with a CUDA build of torch, and triton: PYTHON=... bench/gpu.sh
# Rows: build/bench/gpu-kernels.json. `--interpret` runs the programs on a CPU, without times.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" \
  exec "${PYTHON:-python3}" -m tests.benchmarks.bench_gpu_kernels "$@"

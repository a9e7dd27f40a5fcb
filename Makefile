# Two commands do everything: `make demo` and `make test`. Both set up first.
#
# PyTorch's CPU build lies on PyTorch's own index. Where pip does not know that index (or a folder
# with the wheel), set TORCH_INDEX to its address: make demo TORCH_INDEX=...
TORCH_INDEX ?=
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-all check lint types imports bench-codecs bench-copies bench-engine bench-gateway bench-kernels bench-packed bench-placement bench-prediction bench-quality bench-selection loadtest screenshot generate lock

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything; quick when nothing changed
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" .ci/setup $(VENV)

demo: setup ## Show the whole chain on this machine with real vLLM engines
	@$(BIN)/cartridge-router demo

up: setup ## Start the same and stay, with a curl line to try
	@$(BIN)/cartridge-router demo --stay

test: setup check ## Everything CI runs: checks, unit and integration tests
	@.ci/services
	@PYTHON="$(PYTHON)" .ci/clients
	@$(BIN)/python -m pytest tests

test-all: test ## The same, and slow suites (the demo with its own engines)
	@$(BIN)/python -m pytest tests -m slow

check: setup lint types imports ## Format, lint, types, import contracts, generated files
	@$(BIN)/python -m pytest -q tests/architecture/test_generated.py

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports --no-logo

bench-codecs: setup ## What a codec saves and costs on real keys and values
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_codecs

bench-copies: setup ## What copies ahead of demand are worth, in simulated fleets
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_copies $(ARGS)

bench-engine: setup ## What a Cartridge costs on a real engine, beside a plain prompt
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_engine

bench-gateway: setup ## What a request costs in the gateway, beside its peers
	@PYTHON="$(PYTHON)" .ci/peers
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_gateway $(ARGS)

bench-kernels: setup ## What attention over shared documents costs on a CPU, beside vLLM's
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_kernels $(ARGS)

bench-packed: setup ## What packed Cartridges take and cost on a real engine, beside plain slots
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_packed $(ARGS)

bench-placement: setup ## What placement wins, in simulated fleets, and what a decision costs
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_placement $(ARGS)

bench-prediction: setup ## How well first tokens are predicted, on three real engines
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_prediction $(ARGS)

bench-quality: setup ## What fewer bits of keys and values cost in answers, on the demo's model
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_quality $(ARGS)

bench-selection: setup ## Whether the right documents are found, on public sets, and the cost
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_selection $(ARGS)

loadtest: setup ## Load 8 simulated replicas for 60 s, open loop; report, pass or fail
	@OMP_NUM_THREADS=1 $(BIN)/cartridge-router loadtest $(ARGS)

screenshot: setup ## Make docs/images/ui.png anew, from a staged fleet
	@.ci/services
	@$(BIN)/python -m tests.router.screenshot

generate: setup ## Regenerate protobuf code and JSON schemas
	@.ci/generate

lock: ## Resolve dependencies anew into .ci/requirements.lock, and those of client programs
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" .ci/lock
	@PYTHON="$(PYTHON)" .ci/lock-clients

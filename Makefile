# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Every target sets up what it needs; nothing is set up twice.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
SETUP := $(PYTHON) tools/setup_env.py --venv $(VENV)
DEV := dev,ray,train

# Some images forbid Python to keep bytecode. Set-up installs none, so each of the dozens of processes
# that tests and the demo start would compile PyTorch, Transformers and vLLM from their source again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo test lint types clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    generate text with AR, DFlash chain, DDTree and Weaver, and compare'
	@echo '             (ARGS="--prompts 2 --json out.json" and others: vllm-weaver demo --help)'
	@echo 'make test    lint, types and all tests (ARGS="tests/tree -k accept" for some)'
	@echo 'make lint    ruff: rules and format'
	@echo 'make types   mypy'
	@echo 'make setup   only the environment, with the tools for development'
	@echo 'make clean   remove caches and build leftovers; the environment stays'
	@echo
	@echo 'VENV=DIR     use another environment than .venv'
	@echo 'PYTHON=PATH  make the environment with this Python (3.11 or later)'
	@echo 'WORKERS=N    test processes side by side (2)'

setup:
	@$(SETUP) --extras $(DEV)

demo:
	@$(SETUP)
	@$(BIN)/vllm-weaver demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

test: lint types
	# Files in their order: closing the demo's engines in a process ends those that engine tests share.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=15 \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find vllm_weaver tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

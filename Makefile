# Every target makes its own environment in .venv; nothing has to be installed by hand but Python 3.10 – 3.12.

SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
    $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_WORK ?= .bench
# Arguments for pytest, for example: make test ARGS="-k sampling"
ARGS ?=
# Processes that run tests; 0 runs them all in one (for --pdb).
JOBS ?= 2

.PHONY: help demo test lint bench soak kills launches docs golden clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(READY) ## a real model from import to a measured answer, on a real Triton server
	PATH="$(abspath $(BIN)):$$PATH" TRTSERVE_HOME="$(abspath .demo)" bash examples/demo.sh

test: $(READY) ## all tests; those marked `oracle` need PyTorch in .venv
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in preprocessing postprocessing tensorrt_llm tensorrt_llm_bls llmapi llmapi_bls; do \
	    folder=trtserve/triton/models; \
	    MYPYPATH=$$folder/shared:$$folder/$$model/1 \
	        $(BIN)/mypy --exclude '^$$' $$folder/$$model/1/*.py $$folder/shared/*.py || exit 1; \
	done

bench: $(READY) $(VENV)/.bench ## the figures of docs/performance.md, as ratios of pairs in one run
	$(BIN)/python -m tests.benchmarks --work $(BENCH_WORK) $(ARGS)

kills: $(READY) ## 20 conversions of 2.2 GB killed at random moments and run again: the same files, nothing left
	$(BIN)/python -m tests.benchmarks.kills --work $(BENCH_WORK) $(ARGS)

soak: $(READY) ## random mixes of requests, then 64 streams for ten minutes with random cancels: nothing may grow
	TRTSERVE_MIXES=300 $(BIN)/python -m pytest -q tests/integration/test_request_mix.py
	$(BIN)/python -m tests.benchmarks.soak --work $(BENCH_WORK) $(ARGS)

launches: $(READY) ## 100 launches of four ranks, of which one is killed at a random moment: nothing may be left
	TRTSERVE_KILLS=100 $(BIN)/python -m pytest -q tests/integration/test_launches.py -k random_moments $(ARGS)

docs: $(READY) ## the generated parts of docs/
	$(BIN)/python docs/generate.py

golden: $(READY) ## reference tokens and logits from transformers; needs PyTorch in .venv
	$(BIN)/python -m tests.golden.make_goldens

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "trtserve needs Python 3.10, 3.11 or 3.12 with venv; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev]'
	touch $@

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	touch $@

clean: ## remove what the targets above made
	rm -rf $(VENV) .demo $(BENCH_WORK)

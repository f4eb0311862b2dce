# Every target makes its own environment in .venv; nothing has to be installed by hand but Python 3.10 – 3.12.

SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
    $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles what a command imports; compiling all of what is installed takes longer than the installation.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
SUPPLY := $(VENV)/supply/bin
READY := $(VENV)/.ready
# The locked packages, where they fit this Python; `make LOCK= ...` takes the newest that pyproject.toml allows.
LOCKED := import sys, platform as p; sys.exit((p.python_implementation(), p.system(), p.machine()) != ("CPython", "Linux", "x86_64"))
LOCK ?= $(shell test -z "$(PYTHON)" || ! $(PYTHON) -c '$(LOCKED)' || echo .ci/lock.txt)
BENCH_WORK ?= .bench
# Arguments for pytest, for example: make test ARGS="-k sampling"
ARGS ?=
# Processes that run tests, four for two cores because many tests wait for servers; 0 runs all in one (for --pdb).
JOBS ?= 4

# Containers often set it. The tests start hundreds of processes, each of which would compile all of trtserve again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-oracle families variants test-vllm clients lint bench cycles interruptions soak soak-all fuzz doubling kills launches ranks faults newest gpu-test gpu-bench gpu-bundle docs site lock sbom audit dist release recording golden clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

demo: $(READY) ## a real model from import to a measured answer, on a real Triton server
	PATH="$(abspath $(BIN)):$$PATH" TRTSERVE_HOME="$(abspath .demo)" bash examples/demo.sh
	@printf '\nTo use trtserve in this shell: source $(BIN)/activate\n'
	@printf "For the plots of bench --html, then also: pip install 'vl-convert-python>=1.6,<2'\n"

PYTEST = $(BIN)/python -m tests.support.run_again --numprocesses $(JOBS) --no-loadscope-reorder --durations=25

test: $(READY) ## all tests that this machine can run; needs nothing but Python
	$(PYTEST) $(ARGS)

test-fast: JOBS := 2# nothing here waits for a server
test-fast: $(READY) ## unit tests: no server, no subprocess
	$(PYTEST) tests/unit $(ARGS)

test-oracle: $(VENV)/.oracle ## installs PyTorch and more, then runs the tests that need them, sshd, Chromium or promtool
	$(PYTEST) -m needs $(ARGS)

families: $(VENV)/.oracle ## every variant of every model family in every precision against transformers; test-oracle takes a part in turn
	TRTSERVE_ALL=1 $(PYTEST) tests/unit/test_goldens.py $(addprefix tests/integration/test_, $(addsuffix _oracle.py, families int4 check)) $(ARGS)

variants: $(VENV)/.oracle ## random odd models of every family against transformers (ARGS="--count 600"); a second run goes on
	$(BIN)/python -m tests.benchmarks.variants $(ARGS)

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) $(VENV)/.bench ## the figures of docs/performance.md, as ratios of pairs in one run
	$(BIN)/python -m tests.benchmarks --work $(BENCH_WORK) $(ARGS)

kills: $(READY) ## 20 conversions of 2.2 GB killed at random moments and run again: the same files, nothing left
	$(BIN)/python -m tests.benchmarks.kills --work $(BENCH_WORK) $(ARGS)

interruptions: $(READY) ## ten runs of `up` interrupted at random moments and run again: the same end, nothing half, nothing left
	$(BIN)/python -m tests.benchmarks.interruptions --work $(BENCH_WORK) $(ARGS)

cycles: $(READY) ## 200 servers, imports and runs of `up` of which a random process is killed or stopped: nothing left, nothing lost
	$(BIN)/python -m tests.benchmarks.cycles --work $(BENCH_WORK) $(ARGS)

soak: $(READY) ## random mixes of requests, then 64 streams for ten minutes with random cancels: nothing may grow
	TRTSERVE_MIXES=300 $(BIN)/python -m pytest -q tests/integration/test_request_mix.py
	$(BIN)/python -m tests.benchmarks.soak --work $(BENCH_WORK) $(ARGS)

soak-all: $(READY) ## 80 % of the capacity through every entry for 30 minutes: no error, and nothing may grow
	$(BIN)/python -m tests.benchmarks.soak_all --work $(BENCH_WORK) $(ARGS)

fuzz: $(READY) ## 200,000 random bodies to the gateway's parsers, 16,000 files with lies, then 20,000 wrong requests to a real Triton
	TRTSERVE_FUZZ=50000 $(BIN)/python -m pytest -q tests/unit/test_gateway_guard.py -k any_
	TRTSERVE_FUZZ=100000 $(BIN)/python -m pytest -q tests/unit/test_generated_bodies.py
	TRTSERVE_FILE_LIES=2000 $(BIN)/python -m pytest -q tests/integration/test_file_lies.py
	TRTSERVE_HUB_LIES=400 $(BIN)/python -m pytest -q tests/integration/test_hub_lies.py -k generated
	$(BIN)/python -m tests.benchmarks.fuzz $(ARGS)
	$(BIN)/python -m tests.benchmarks.fuzz_models --work $(BENCH_WORK) $(ARGS)

doubling: $(READY) ## four times the input takes at most nine times the time: every large field of every API
	TRTSERVE_DOUBLING=1 $(BIN)/python -m pytest -q tests/unit/test_doubling.py $(ARGS)

launches: $(READY) ## 100 launches of four ranks, of which one is killed at a random moment: nothing may be left
	TRTSERVE_KILLS=100 $(BIN)/python -m pytest -q tests/integration/test_launches.py -k random_moments $(ARGS)

ranks: $(VENV)/.oracle ## engines of four and eight ranks under the real mpirun: the tokens of one rank, and what a killed and a stopped rank do
	TRTSERVE_RANKS=all $(BIN)/python -m pytest -q tests/e2e/test_torch_ranks.py $(ARGS)

newest: ## the tests and `make lint` with the newest of every package, in .newest; first what differs from the lock files
	rm -rf .newest
	$(MAKE) VENV=.newest LOCK= .newest/.oracle
	.newest/bin/python -m tests.support.locked_packages
	$(MAKE) --keep-going VENV=.newest LOCK= test lint

test-vllm: $(VENV)/.oracle .cache/vllm/.ready ## vLLM itself on this CPU behind a real Triton (2.3 GB are installed into .cache)
	TRTSERVE_VLLM_PYTHON="$(abspath .cache/vllm)" $(BIN)/python -m pytest -s -q tests/real_vllm/served.py tests/real_vllm/nvidia_models.py \
	    tests/real_vllm/nodes.py $(ARGS)

clients: .cache/clients/.ready ## twelve clients of Python in an environment of their own, and the AI SDK where there is npm, against the demo
	$(BIN)/python -m tests.support.run_again -q tests/clients/clients.py $(ARGS)

gpu-test: ## the torch runtime on NVIDIA GPUs, with a report; needs no network where .gpu has the bundle
	bash tests/gpu/run.sh test $(ARGS)

gpu-bench: ## its speed and memory, with a report
	bash tests/gpu/run.sh bench $(ARGS)

gpu-bundle: $(READY) ## what a GPU machine without network lacks, in .gpu
	$(BIN)/python -m tests.gpu.bundle .gpu

faults: $(READY) ## every fault of docs/reliability.md, injected for real; the figures go to .faults.jsonl
	rm -f .faults.jsonl
	TRTSERVE_FAULTS=all TRTSERVE_FAULTS_OUT="$(abspath .faults.jsonl)" \
	    $(BIN)/python -m pytest -q tests/faults $(ARGS)

docs: $(READY) ## the generated parts of docs/
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs ## the documentation as a website in .site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file - < docs/mkdocs.yml

# First everything together, so that the tests with PyTorch run with the same versions as the others.
COMPILE = $(SUPPLY)/uv pip compile pyproject.toml --extra cpu --extra dev --universal --python-version 3.10 --upgrade --quiet \
    --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock"
WITH_ORACLE := --extra oracle --extra docs --override .ci/unlocked.txt

# What the clients have in common with the tests comes from there, but for what does not go together; the last are never imported.
APART := openai|jiter|rich|click|typer|numpy|huggingface-hub
UNUSED := aiofiles joblib nltk rouge-score sanic scikit-learn scipy threadpoolctl word2number
COMPILE_CLIENTS = $(SUPPLY)/uv pip compile .ci/clients.txt --override .ci/unlocked.txt --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --quiet --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock" \
    $(addprefix --no-emit-package=, $(UNUSED))

lock: $(VENV)/.supply ## the newest versions of all packages, with their hashes: .ci/lock.txt, .ci/lock-oracle.txt for the rest of CI, .ci/lock-clients.txt
	$(COMPILE) $(WITH_ORACLE) -o $(VENV)/all.txt
	$(COMPILE) -c $(VENV)/all.txt -o .ci/lock.txt
	$(COMPILE) $(WITH_ORACLE) -c $(VENV)/all.txt -o .ci/lock-oracle.txt \
	    $$(sed -nE 's/^([a-z0-9._-]+)==.*/--no-emit-package=\1/p' .ci/lock.txt | sort -u)
	sed -nE 's/^([a-z0-9._-]+==[^\\]*[^ \\]).*/\1/p' .ci/lock.txt .ci/lock-oracle.txt > $(VENV)/ours.txt
	sed 's/ *;.*//' $(VENV)/ours.txt > $(VENV)/ours-alone.txt
	grep -vE '^($(APART))==' $(VENV)/ours.txt > $(VENV)/together.txt
	$(COMPILE_CLIENTS) -c $(VENV)/together.txt -o $(VENV)/clients.txt
	$(COMPILE_CLIENTS) -c $(VENV)/clients.txt -o .ci/lock-clients.txt $$(grep -oE '^[a-z0-9._-]+==[^ ]+' $(VENV)/clients.txt \
	    | grep -xFf - $(VENV)/ours-alone.txt | sed 's/==.*//; s/^/--no-emit-package=/')

sbom: $(READY) $(VENV)/.supply ## a list of what is installed here, in .sbom.json (CycloneDX)
	$(SUPPLY)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o .sbom.json $(BIN)/python

audit: $(VENV)/.supply ## known vulnerabilities of the locked packages; needs the network, and fails without an answer
	$(SUPPLY)/pip-audit --strict --require-hashes --disable-pip -r .ci/lock.txt $(ARGS)

dist: $(VENV)/.supply ## the wheel and the source distribution, in dist; the same bytes for the same commit
	rm -rf dist build
	$(BIN)/python .ci/published.py build/published
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(SUPPLY)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist build/published
	rm -rf dist/.gitignore build
	$(SUPPLY)/twine check --strict dist/*.whl dist/*.tar.gz

release: $(READY) ## check, build the wheel, sdist, SBOM and documentation into dist, and tag; publishes nothing
	bash .ci/release

recording: $(VENV)/.oracle ## the pictures of the terminal, the page and a report, from real runs of the demo; needs Chromium
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/record_demo.py docs/assets/demo.svg
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/record_pages.py docs/assets

golden: $(VENV)/.oracle ## reference tokens and logits from transformers; installs PyTorch
	$(BIN)/python -m tests.golden.make_goldens

$(READY): pyproject.toml $(wildcard $(LOCK))
	@test -n "$(PYTHON)" || { echo "trtserve needs Python 3.10, 3.11 or 3.12 with venv; set PYTHON=..." >&2; exit 1; }
	@echo "Installing trtserve and what it needs into $(VENV), which takes about a minute" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(LOCK),)
	$(INSTALL) --require-hashes -r $(LOCK)
	$(INSTALL) --no-deps --no-build-isolation --editable .
else
	@echo "Not from .ci/lock.txt, which is for CPython on Linux on x86-64: the newest packages that pyproject.toml allows." >&2
	$(INSTALL) --upgrade --editable '.[cpu,dev]'
endif
	touch $@

# PyTorch first: the packages of the lock file need one, and exactly this one is a CPU build on the machines of CI. Newer
# versions of the Triton language report leaks at the end of every process.
$(VENV)/.oracle: $(READY) $(wildcard $(LOCK))
	$(INSTALL) --no-deps torch==2.13.0 triton==3.6.0
ifneq ($(LOCK),)
	$(INSTALL) --require-hashes -r .ci/lock.txt -r .ci/lock-oracle.txt
else
	$(INSTALL) --upgrade --upgrade-strategy eager --editable '.[cpu,dev,oracle]' torch==2.13.0 triton==3.6.0
endif
	touch $@

.cache/vllm/.ready: .ci/lock-vllm.txt
	test "$$($(BIN)/python -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" || { echo "$< is for Python 3.11." >&2; exit 1; }
	$(BIN)/python -m venv --clear .cache/vllm
	.cache/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torch==2.13.0
	.cache/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	touch $@

# Its packages come before those of the tests, which it sees behind its own.
.cache/clients/.ready: .ci/lock-clients.txt $(VENV)/.oracle
	test "$$($(BIN)/python -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" || { echo "$< is for Python 3.11." >&2; exit 1; }
	$(BIN)/python -m venv --clear --without-pip .cache/clients
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .cache/clients/lib/python3.11/site-packages/behind.pth
	$(PIP) --python .cache/clients/bin/python install --no-compile --no-build-isolation --no-deps --require-hashes -r $<
	touch $@

$(VENV)/.bench: $(READY)
	$(INSTALL) --editable '.[bench]'
	touch $@

$(VENV)/.docs: $(READY)
ifneq ($(LOCK),)
	$(INSTALL) --no-deps --require-hashes -r .ci/lock-oracle.txt
else
	$(INSTALL) --editable '.[docs]'
endif
	touch $@

$(VENV)/.supply: $(READY)
	$(BIN)/python -m venv $(VENV)/supply
	$(SUPPLY)/python -m pip install --quiet --upgrade pip
	$(SUPPLY)/python -m pip install --quiet --group supply
	touch $@

clean: ## remove what the targets above made
	rm -rf $(VENV) .newest .demo .site .sbom.json dist build $(BENCH_WORK)

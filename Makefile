# Every target sets up what it needs: a virtual environment in .venv, the package in it and the default model.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKED := eventlm kernels policies replay tests benchmarks docs examples setup.py

# Tests start processes by the hundred, each of which would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test collect nightly check docs install browser prometheus checkpoints soak simulate mutants kernel-table

run: install
	$(BIN)/eventlm serve

test: checkpoints check
	$(BIN)/python -m pytest -q -n 2

# Imports all tests, which compiles them and what they need.
collect: $(STAMP)
	$(BIN)/python -m pytest -q --collect-only > /dev/null

# Everything: the soak tests too, and every GPU kernel compiled. It takes hours.
nightly: checkpoints check
	EVENTLM_COMPILE_ALL_KERNELS=1 $(BIN)/python -m pytest -q -n 2 -m ''

check: $(STAMP)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.h kernels/cpu/*.cpp
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages as a site in build/site, after their generated parts have been brought up to date.
docs: $(STAMP)
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: checkpoints
	$(BIN)/python -m pytest -q -m soak

# The whole server in simulated time, under the faults that seeds draw: stops at the first seed that fails.
SEEDS ?= 0-999
simulate: $(STAMP)
	$(BIN)/python -m tests.world.simulate $(SEEDS) $(ARGS)

# How many small mistakes in the code the tests find: takes hours, goes on where it was stopped.
mutants: checkpoints
	$(BIN)/python -m tests.mutants $(ARGS)

# The GPU kernels that tests need not compile again; with ARGS=--all, all of them are.
kernel-table: $(STAMP)
	$(BIN)/python -m tests.kernels.gpu.renew_table $(ARGS)

install: $(STAMP)
	$(BIN)/eventlm pull smollm2

# For the tests of pages, which are skipped without one; on Debian and its kin, as root.
browser:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name && exit; done; \
	apt-get update -qq && { apt-get install -qq --yes --no-install-recommends chromium-headless-shell || \
	apt-get install -qq --yes --no-install-recommends chromium; }

# For the tests of alerts and dashboards, which are skipped without it; likewise.
prometheus:
	@{ command -v prometheus && command -v promtool; } || \
	{ apt-get update -qq && apt-get install -qq --yes --no-install-recommends prometheus; }

# The default model in the form that transformers reads, which tests compare it with.
checkpoints: install
	$(BIN)/eventlm pull smollm2:bf16

$(STAMP): pyproject.toml constraints.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV); the first time this takes some minutes.'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

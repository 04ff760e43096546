# `make demo` and `make test` are all a newcomer needs; both set up .venv by themselves.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test lint types unit fast fix gpu stress docs clean

help:                   ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

demo: $(READY)          ## two small networks, three methods, a table and a page (5 to 7 minutes on 2 cores, after the install)
	$(BIN)/codistill study demo --out runs/demo
	$(BIN)/codistill report runs/demo -o runs/demo/report.html

test: lint types unit   ## everything that CI runs

lint: $(READY)          ## ruff, as CI runs it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)         ## mypy --strict, tests included
	$(BIN)/mypy

unit: $(READY)          ## the tests alone
	$(BIN)/pytest -n 2 --dist worksteal

fast: $(READY)          ## the tests that start no other processes, while you work
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --ignore tests/distributed --ignore tests/faults --ignore tests/docs

stress: $(READY)        ## the faults and attacks of docs/reliability.md as often as published (about an hour on 2 cores)
	CODISTILL_STRESS=1 $(BIN)/pytest -n 2 --dist worksteal tests/faults tests/data/test_streaming.py \
	  tests/distributed/test_two_hosts.py tests/networks/test_zoo.py tests/gpu

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "codistill needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# Beside the environment: torch for CPUs has no Triton, and tests of its interpreter should not change that.
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton --upgrade triton==3.9.0 \
	  || echo "Triton could not be installed; the tests in its interpreter will skip"
	touch $@

fix: $(READY)           ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(READY)           ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

docs: $(READY)          ## the documentation's site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:                  ## remove .venv, caches and built files
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# `make demo` and `make test` are all a newcomer needs; both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint types unit stress docs clean

demo: $(READY)          ## two small networks, three methods, a table and a page (5 to 7 minutes on 2 cores, after the install)
	$(BIN)/codistill study demo --out runs/demo
	$(BIN)/codistill report runs/demo -o runs/demo/report.html

test: lint types unit   ## everything that CI runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal

stress: $(READY)        ## the faults and attacks of docs/reliability.md as often as published (about an hour on 2 cores)
	CODISTILL_STRESS=1 $(BIN)/pytest -n 2 --dist worksteal tests/faults tests/data/test_streaming.py \
	  tests/distributed/test_two_hosts.py tests/gpu

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "codistill needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

docs: $(READY)          ## the documentation's site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist

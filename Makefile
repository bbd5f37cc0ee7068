# Two commands do everything on a machine with Python (3.11 or newer) and make:
#   make look    install into .venv and show what each head of the bundled model attends to in a real text
#   make test    style, types and the whole test suite
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FILE   ?= examples/library_desk.py

.PHONY: look test check bench clean help

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

look: $(VENV)/.installed ## what each head attends to in FILE=...
	$(BIN)/regard look $(FILE) --terminal

test: $(VENV)/.installed-dev check ## style, types, tests
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench ## the benchmarks, beside every peer, into benchmarks/results and docs/performance.md
	$(BIN)/python benchmarks/small_calls.py
	$(BIN)/python benchmarks/observation.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/masks.py
	$(BIN)/python benchmarks/masks.py --report

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cli]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two commands do everything on a machine with Python (3.11 or newer) and make:
#   make look    install into .venv and show what each head of the bundled model attends to in a real text
#                (make look TORCH=cpu: with torch for the CPU, a fraction of the download on Linux)
#   make test    style, types and the whole test suite
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# most of what is installed is never imported, and what is, Python compiles then, once
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
FILE   ?= examples/library_desk.py

# TORCH=cpu takes torch from its own index of builds without CUDA. That index alone is asked, for torch alone: it has
# torch's dependencies too, and what follows comes from where pip is used to look.
TORCH ?=
ifeq ($(TORCH),cpu)
TORCH_FROM := --index-url https://download.pytorch.org/whl/cpu
TORCH_SAYS := torch for the CPU: about 200 MB to download, 1 GB on disk
else ifeq ($(TORCH),)
TORCH_FROM :=
TORCH_SAYS := torch: on Linux the build for NVIDIA GPUs, about 4.7 GB and some minutes; without a GPU, stop and say: make $(or $(MAKECMDGOALS),look) TORCH=cpu
else
$(error TORCH=$(TORCH): expected cpu, or nothing for the build that pip takes by itself)
endif

.PHONY: look test check tests docs bench gpu clients clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

look: $(VENV)/.installed ## what each head attends to in FILE=...
	$(BIN)/regard look $(FILE)

WORKERS ?= 2

unexport PYTHONDONTWRITEBYTECODE  # what one process compiled is read by the next

test: $(VENV)/.installed-dev ## style, types, tests, in WORKERS=2 processes
	$(MAKE) --no-print-directory --jobs 2 check tests

tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed-dev ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev ## the documentation as a site, into build/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --conf-dir docs . build/site
	@echo "build/site/README.html"

bench: $(VENV)/.installed-bench ## the benchmarks, beside every peer, into benchmarks/results and docs
	$(BIN)/python benchmarks/small_calls.py
	$(BIN)/python benchmarks/observation.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/cost.py --memory
	$(BIN)/python benchmarks/first_run.py
	$(BIN)/python benchmarks/sections.py
	$(BIN)/python benchmarks/viewer.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/decoder.py --output benchmarks/results/decoder.json
	$(BIN)/python benchmarks/parallel.py
	$(BIN)/python benchmarks/parallel.py --alone
	$(BIN)/python benchmarks/masks.py
	$(BIN)/python benchmarks/masks.py --report
	$(BIN)/python benchmarks/parallel.py --report
	$(BIN)/python benchmarks/features.py --report
	$(BIN)/python benchmarks/models.py --report
	$(BIN)/python benchmarks/page.py --report
	$(BIN)/python benchmarks/decoder.py --report

gpu: $(VENV)/.installed-bench ## tests and benchmarks that need an NVIDIA GPU, into benchmarks/results and docs/performance-gpu.md
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/features.py --device cuda
	$(BIN)/python benchmarks/features.py --report

clients: $(VENV)/.installed-clients ## programs of other people under regard and eager, compared, into docs/transformers.md
	$(BIN)/python -m pytest tests/clients --write-table

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)

# torch by itself and with its progress shown: it is nearly all of what is downloaded
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "$(TORCH_SAYS)"
	$(PIP) --constraint constraints.txt $(TORCH_FROM) torch
	touch $@

# compiled when regard is installed
COMPILED := hatch_build.py $(wildcard src/regard/kernels/strips/c/*.[ch])

$(VENV)/.installed: pyproject.toml constraints.txt $(COMPILED) $(VENV)/.torch
	@echo "regard, its command line and what training needs: about 30 MB more"
	$(PIP) --quiet --constraint constraints.txt --editable '.[cli,train,view]'
	touch $@

# A browser for the tests of the page: Debian's, where this is a Debian and whoever runs it may install something.
CHROMIUM := command -v chromium >/dev/null || test -n "$$REGARD_CHROMIUM" || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get install --yes --quiet=2 chromium; }

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(COMPILED) $(VENV)/.torch
	@echo "regard and what its tests need: about 150 MB more"
	$(PIP) --quiet --constraint constraints.txt --editable '.[dev]'
	@$(CHROMIUM) || echo "no Chromium: the tests of the page in a browser will be skipped (install one, or set REGARD_CHROMIUM)"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

$(VENV)/.installed-clients: $(VENV)/.installed-dev
	@echo "the programs of other people that tests/clients runs: about 800 MB more on disk"
	$(PIP) --quiet --constraint constraints.txt --editable '.[dev,clients]'
	touch $@

clean: ## remove the environment and caches
	rm -rf $(VENV) .clean .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target does its own set-up: a virtual environment in .venv with the package and its tools.
PYTHON ?= python3
VENV ?= .venv
OVERRIDES ?=

# Named after what was installed: another pyproject.toml or constraints.txt makes the environment stale, a fresh clone does not.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# Tests write many small files: into memory, where there is room for 4 GB.
MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 {print "/dev/shm"}')

# Otherwise each process compiles the package and the tests again, if the environment says to keep no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv constraints quickstart quickstart-texts test nightly test-quickstart lint docs bench gpu faults

help: ## Say what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(STAMP) ## Do the main job on embedded data: two models, one old gallery, a report and a verdict.
	$(VENV)/bin/python -m xcompat quickstart $(OVERRIDES)

quickstart-texts: $(STAMP) ## Search an index of scientific abstracts with a better text encoder: a table in 5 minutes.
	$(VENV)/bin/python -m xcompat quickstart texts $(OVERRIDES)

test: lint ## Lint, types, layers, every test and documented example, and a shortened quickstart.
	$(if $(MEMORY),TMPDIR=$(MEMORY)) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal

nightly: $(STAMP) ## Run the long forms and all of each kind: every recipe, every store under kills, every benchmark at toy size.
	$(if $(MEMORY),TMPDIR=$(MEMORY)) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal -m nightly

test-quickstart: $(STAMP) ## Run the shortened quickstart alone: every stage works, the numbers mean nothing.
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/test_quickstart.py::test_shortened_quickstart

lint: $(STAMP) ## Check style (ruff), types (mypy), layers (import-linter) and English (docs/prose.py).
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python docs/prose.py

docs: $(STAMP) ## Build the site from docs/ into site/: no broken link, no public name without a page.
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: $(STAMP) ## Measure speed and memory beside other software, and write it into docs/results/speed.md.
	$(VENV)/bin/python benchmarks/speed/run.py

gpu: $(STAMP) ## Measure what one GPU reaches, and write it into docs/results/gpu.md.
	$(VENV)/bin/python benchmarks/gpu/throughput.py

faults: $(STAMP) ## Kill, cut the power, fill disks and damage files, many thousand times, and write docs/faults.md.
	OMP_NUM_THREADS=1 $(VENV)/bin/python faults/long_run.py

venv: $(STAMP) ## Make the virtual environment and install into it.

constraints: $(STAMP) ## Choose the newest versions of everything that is installed, for every system, and write constraints.txt.
	$(VENV)/bin/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade --quiet \
		--no-annotate --custom-compile-command "make constraints" --output-file constraints.txt

$(STAMP): | pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xcompat needs Python 3.11 or newer; name one with make PYTHON=python3.x")'
	@$(VENV)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@rm -f $(VENV)/installed-* && touch $@

# Every target makes what it needs. PYTHON is the interpreter the environment is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help env check format test conformance demo bench clean

help:
	@echo 'make env          the environment in $(VENV), with everything the targets below need'
	@echo 'make check        formatting, lint, types'
	@echo 'make test         all tests (and the conformance corpus, where it lies beside this folder)'
	@echo 'make conformance  the conformance corpus alone, with a table'
	@echo 'make demo         write an example repository, serve it, send it images'
	@echo 'make bench        compare with Triton; BENCH="--quick" for a short run'

env: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: env
	$(BIN)/python -m pytest $(TEST)

conformance: env
	$(BIN)/python -m pytest tests/conformance -rA $(TEST)

demo: env
	$(BIN)/python tools/demo.py $(DEMO)

bench: env
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

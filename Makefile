# Every target makes what it needs. PYTHON is the interpreter the environment is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
SOAK_MINUTES ?= 10
INSTALLED := $(VENV)/.installed
# The demo alone needs less, and takes the whole environment if that is there.
DEMO_INSTALLED := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)

.PHONY: help env check format test conformance demo soak bench clean

help:
	@echo 'make env          the environment in $(VENV), with everything the targets below need'
	@echo 'make check        formatting, lint, types'
	@echo 'make test         all tests (and the conformance corpus, where it lies beside this folder)'
	@echo 'make conformance  the conformance corpus alone, with a table'
	@echo 'make demo         write an example repository, serve it, send it images'
	@echo 'make soak         mixed traffic, crashes and reloads for SOAK_MINUTES=10: answers right, nothing grows'
	@echo 'make bench        compare with Triton; BENCH="--quick" for a short run'

env: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
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

demo: $(DEMO_INSTALLED)
	$(BIN)/python tools/demo.py $(DEMO)

soak: $(DEMO_INSTALLED)
	$(BIN)/python tools/soak.py --minutes=$(SOAK_MINUTES) $(SOAK)

bench: env
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

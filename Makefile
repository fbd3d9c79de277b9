# Every target makes what it needs. PYTHON is the interpreter the environment is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
SOAK_MINUTES ?= 10
FUZZ_MINUTES ?= 10
INSTALLED := $(VENV)/.installed
# TensorFlow, PyTorch and OpenVINO, some GB of them, in an environment of their own.
FRAMEWORKS := $(VENV)-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS)/.installed
FRAMEWORK_TESTS := tests/backends tests/unit/backends tests/unit/convert tests/component/convert \
	tests/api/test_served_tensorflow.py tests/api/test_served_pytorch.py tests/api/test_frameworks_together.py \
	tests/api/test_real_models.py
# Installed as users install it, with the hot path compiled: what is edited is not what runs there.
COMPILED := $(VENV)-compiled
COMPILED_INSTALLED := $(COMPILED)/.installed
COMPILED_TESTS := tests/conformance tests/api/test_edge.py tests/api/test_isolation.py tests/api/test_sequences.py \
	tests/unit/backends/python tests/unit/frontends/grpc/test_grpc_head.py tests/unit/test_packed.py \
	tests/unit/protocol/test_json_codec.py tests/unit/protocol/test_json_numbers.py
# The demo alone needs less, and takes the whole environment if that is there.
DEMO_INSTALLED := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)

.PHONY: help env check format test test-compiled test-frameworks conformance demo soak fuzz bench instructions clean

help:
	@echo 'make env          the environment in $(VENV), with everything the targets below need'
	@echo 'make check        formatting, lint, types'
	@echo 'make test         all tests (and the conformance corpus, where it lies beside this folder)'
	@echo 'make test-compiled  tests of whole servers whose hot path is compiled'
	@echo 'make test-frameworks  the tests of TensorFlow, PyTorch, OpenVINO and of conversion, with all of them installed'
	@echo 'make conformance  the conformance corpus alone, with a table'
	@echo 'make demo         write an example repository, serve it, send it images'
	@echo 'make soak         mixed traffic, crashes and reloads for SOAK_MINUTES=10: answers right, nothing grows'
	@echo 'make fuzz         arbitrary bytes for all that reads what clients send, FUZZ_MINUTES=10 for each'
	@echo 'make instructions  count the instructions of the hot paths; INSTRUCTIONS=--renew to keep these counts for the tests'
	@echo 'make bench        compare with Triton and others; BENCH="--quick" for a short run, BENCH=--list for what there is'

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

$(COMPILED_INSTALLED): pyproject.toml constraints.txt setup.py $(shell find src -name '*.py')
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	NAIAD_COMPILE=1 $(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[bench,dev]'
	@touch $@

test-compiled: $(COMPILED_INSTALLED)
	$(COMPILED)/bin/naiad --version | grep compiled
	$(COMPILED)/bin/python -m pytest $(COMPILED_TESTS) $(TEST)

$(FRAMEWORKS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,convert,openvino,tensorflow,test-models,torch]'
	@touch $@

test-frameworks: $(FRAMEWORKS_INSTALLED)
	$(FRAMEWORKS)/bin/python -m pytest $(FRAMEWORK_TESTS) $(TEST)

conformance: env
	$(BIN)/python -m pytest tests/conformance -rA $(TEST)

demo: $(DEMO_INSTALLED)
	$(BIN)/python tools/demo.py $(DEMO)

soak: $(DEMO_INSTALLED)
	$(BIN)/python tools/soak.py --minutes=$(SOAK_MINUTES) $(SOAK)

fuzz: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	for target in json generate proto http http2; do $(BIN)/python tools/fuzz.py $$target --minutes=$(FUZZ_MINUTES) $(FUZZ) || exit 1; done

bench: $(COMPILED_INSTALLED)
	$(COMPILED)/bin/python -m benchmarks $(BENCH)

instructions: env
	$(BIN)/python tests/instructions/instruction_counts.py $(INSTRUCTIONS)

clean:
	rm -rf $(VENV) $(COMPILED) $(FRAMEWORKS) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

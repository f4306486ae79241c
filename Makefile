# The commands of daily work; each makes .venv first when it is needed. `make` alone lists them.

VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := (3, 11) <= sys.version_info[:2] <= (3, 13)
# An existing .venv keeps its Python, unless another one is named: make setup PYTHON=python3.12
ifndef PYTHON
PYTHON := $(shell for python in $(BIN)/python python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not $(SUPPORTED))' 2>/dev/null && echo $$python && exit; done; echo python3)
endif
TESTS ?= tests
FAST := $(wildcard tests/unit tests/property tests/parity)
WHOLE := $(wildcard tests/contract tests/distributed tests/e2e)

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup check format-check lint types imports boundaries format test test-fast test-gpu demo docs lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## make .venv with all that check, test and demo need; nothing when it has it
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) here; skirl needs Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if $(SUPPORTED) else "setup: skirl needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d; name another one: make setup PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) tools/setup_env.py

check: format-check lint types imports boundaries  ## all checks of style; make -k check shows every failure

format-check: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/pyright

imports: setup
	$(BIN)/lint-imports --no-logo

boundaries: setup
	@set -e; for tool in tools/check_*.py; do echo "$$tool"; $(BIN)/python $$tool src/skirl; done

format: setup  ## write the format, fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup  ## all tests that need no GPU; some: make test TESTS="tests/unit -k wer"
ifeq ($(TESTS),tests)
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile $(FAST)
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadgroup --no-loadscope-reorder $(WHOLE)
else
	$(BIN)/python -m pytest -m "not gpu" $(TESTS)
endif

test-fast: setup  ## unit, property and parity tests, without the slow ones
	$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist loadfile $(FAST)

test-gpu: setup  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(TESTS)

demo: setup  ## fine-tune a tiny speech model, then improve it with GRPO
	$(BIN)/python demo/run.py

docs: setup  ## write docs/config.md and docs/metrics.md anew from the code
	$(BIN)/python tools/generate_docs.py

lock: setup  ## pin the versions that .venv holds, for CPU machines
	@{ echo "# Versions of a CPU environment in which make test passed. Written by make lock; torch: tools/setup_env.py."; \
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(torch|skirl)[= @]'; } > tools/constraints-cpu.txt

clean:  ## remove caches and build output; runs/ and .venv stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests tools demo -name __pycache__ -type d -prune -exec rm -rf {} +

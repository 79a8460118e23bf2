# Every target does its own set-up: `make train` on a fresh machine needs python3.11 and pip, nothing else.
#   make venv                      create .venv, install the locked set and zeroexp (editable, with its C++ extension)
#   make train ARGS="zero=stage3"  one run          make train ARGS="-m zero=stage0,stage3"  a sweep
#   make test  [ARGS="-k layout"]  the test suite   make test ARGS=--full  with the long tests
#                                  JOBS=0: in one process, e.g. for a debugger
#   make lint  make format         ruff, mypy, clang-format
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2
CPP := $(sort $(shell find csrc tests/native benchmarks -name '*.[chi]pp' -o -name '*.inl' 2>/dev/null))
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: venv train test lint types format clean

# Two stamps: a change of the lock refills the environment, a change of C++ only rebuilds the extension.
venv: $(VENV)/.installed

$(VENV)/.locked: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# torch by its exact version and first: pip then takes the build meant for this machine, and nothing
	@# that depends on torch can choose another one.
	$(BIN)/pip install -q -c constraints.txt "torch==2.13.0" setuptools scikit-build-core pybind11 cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml CMakeLists.txt $(sort $(shell find csrc -type f))
	$(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[dev]"
	@touch $@

train: venv
	$(BIN)/python train.py $(ARGS)

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: venv types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

# mypy finds modules by their path only: lay the source folders out as they are installed.
types: venv
	rm -rf build/types && mkdir -p build/types/zeroexp
	ln -s $(CURDIR)/zeroexp/* build/types/zeroexp/
	ln -s $(CURDIR)/strategies $(CURDIR)/conf $(CURDIR)/experiments build/types/zeroexp/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p zeroexp

format: venv
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist

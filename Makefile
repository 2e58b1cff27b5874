# Everything runs in .venv; a target that needs it makes it first. Needs python3 (3.11-3.13), make and g++ only.
#   make venv | demo | test | lint | fmt | clean        PYTHON=python3.12 picks the interpreter of a new .venv

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint fmt links clean

supported := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(supported)' >/dev/null 2>&1 && echo $$p && break; done)
endif

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUBPACKAGES := dsl codegen templates runtime ops

help:
	@echo "make venv   create .venv with kgen (editable), the CUDA backend and the development tools"
	@echo "make demo   run the demonstration"
	@echo "make test   lint, type check and tests"
	@echo "make lint   ruff and pyright only"
	@echo "make fmt    format and apply safe fixes"
	@echo "make clean  remove .venv, caches and build output"

venv: $(STAMP)

# Built in place, stamped last: an interrupted install is simply done again. In the mode `compat` the checkout is on the
# path as it is; other editable modes lose to a folder called kgen in the current one, which a clone may well lie in.
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11-3.13 found; install one or name it: make venv PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c '$(supported)' || { echo "error: PYTHON=$(PYTHON) is not Python 3.11-3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[dev,cuda13,plot]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m kgen.demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(STAMP) links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The package in its installed shape, for pyright and editors (see [tool.pyright] in pyproject.toml). It also serves
# as a PYTHONPATH entry where kgen is not installed. Links are replaced in place: a running pyright is not disturbed.
links:
	@mkdir -p build/links/kgen
	@ln -sfn $(addprefix ../../../,$(filter-out %/__pycache__,$(wildcard kgen/*)) $(SUBPACKAGES)) build/links/kgen/
	@find build/links -xtype l -delete

clean:
	rm -rf $(VENV) .out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

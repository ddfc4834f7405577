# `make` alone lists the targets. Each one that needs it sets up .venv first.

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Handed through: `make test PYTEST_ARGS="-n 4 tests/ir"`, `make setup PIP_ARGS="--no-index …"`.
# Two processes of about 1 GB; the tests of a file stay together, because they share what is slow.
PYTEST_ARGS ?= -n 2 --dist loadfile
PIP_ARGS ?=

# The tests start many small processes: one thread each, and nothing from a hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint check format stress bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(INSTALLED)  ## make .venv: pinned dependencies, and autopar in editable form

demo: setup  ## plan Llama-3-8B for 64 A100s, then train a small Llama on 4 local ranks
	$(PY) examples/demo.py

test: setup  ## run the tests
	$(TEST_ENV) $(PY) -m pytest $(PYTEST_ARGS)

lint: setup  ## ruff, mypy, pyright and the layer contract
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

check: lint test  ## lint and test

format: setup  ## format the sources, and mend what ruff can mend
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

stress: setup  ## search the properties at random, for long
	$(TEST_ENV) HYPOTHESIS_PROFILE=stress $(PY) -m pytest --timeout=3600 $(PYTEST_ARGS)

bench: setup  ## run every benchmark
	set -e; for file in benchmarks/[a-z]*.py; do $(PY) "$$file"; done

clean:  ## remove .venv and all caches
	rm -rf $(VENV) build dist *.egg-info .hypothesis .coverage htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The build backend is installed first and pinned like the rest: no build isolation.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	@[ -x $(PY) ] || { $(find_python); "$$python" -m venv $(VENV); }
	$(PY) -m pip install -q $(PIP_ARGS) -c constraints.txt setuptools
	$(PY) -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# Sets the shell variable `python`. A candidate must run: a version manager's shim may not.
define find_python
python=; for name in python3.11 python3 python3.12 python3.13; do \
  if "$$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
  then python=$$name; break; fi; done; \
[ -n "$$python" ] || { echo "autopar needs Python 3.11 or newer, with venv" >&2; exit 1; }
endef

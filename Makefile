# make demo    train the mesh-tangling net on 2 ranks, every sample split in space, and compare with one process
# make test    the tests
# make lint    style and types
# All use .venv, which is made when it is missing or when what it installs has changed.

PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test lint
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/halocline train mesh-tangling-2k --ranks 2 --plan spatial --size 128 --width 0.1 --batch 4 \
		--steps 300 --lr 1e-2 --dtype fp64 --check

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest  # most tests run several ranks, as threads or processes

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		(echo "halocline needs Python 3.11 or later. Say which: make PYTHON=python3.11 ..." >&2; exit 1)
	$(PYTHON) -m venv .venv

# The pinned torch first: then nothing that is installed later can bring another.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -r constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,data]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,data,dev]'
	touch $@

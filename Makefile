# Everything runs from .venv, made here: `make demo`, `make test`.
# Another torch than the CPU build: `make install TORCH="torch==2.13.0 --index-url ..."`
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow check install clean

demo: install
	$(BIN)/launch local --preset sort

test: install
	$(BIN)/pytest

test-slow: install
	$(BIN)/pytest -m slow

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs

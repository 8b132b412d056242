# `make demo` and `make test` set up all they need: Python 3.11 or newer and make are enough.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test quick-tests test-all lint docs docs-build clean
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

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@

# every extra, and the tools of others that the library is tested beside
$(VENV)/.all: $(VENV)/.dev
	$(PIP) -e '.[experiments,sequences,sweep,ray,dev,docs,tools]'
	@touch $@ $(VENV)/.docs

demo: $(VENV)/.demo ## Train a ReLU RNN on real digits by three rules, on the weights and made invariant (two to six minutes)
	$(BIN)/pathspace compare --output runs/demo

test: $(VENV)/.dev ## Check style and types beside the tests (five minutes on two cores, more while they are busy)
	$(MAKE) --no-print-directory -j 2 lint quick-tests

quick-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/.all ## Run every test: the slow ones, those of every extra, the site, the demo under two instruction sets
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''

lint: $(VENV)/.dev ## Style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(VENV)/.docs ## Serve the documentation at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-build: $(VENV)/.docs ## Build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist site

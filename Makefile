# make train   the whole way: set-up, embedded model, training, evaluation (laptop, no GPU, no hub account)
# make test    set-up, lint, types, tests

PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
MODEL := data/models/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help setup model train test lint evaluate tensorboard clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/installed ## .venv with the pinned requirements

$(VENV)/installed: requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or call make PYTHON=python3"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -q -r requirements.txt
	@touch $@

model: $(MODEL)/config.json ## the embedded model, SmolLM2-135M-Instruct (270 MB)

$(MODEL)/config.json: | $(VENV)/installed
	$(RUN) data/fetch_smollm2.py

train: setup model ## train on the canonical slippery lake and judge; a second call goes on or shows the result
	$(RUN) train_script.py --config configs/laptop.yaml --resume_from_checkpoint auto $(ARGS)

evaluate: setup model ## judge the trained policy again: make evaluate ARGS="--samples_per_state 32"
	$(RUN) evaluate_policy.py --policies runs/laptop $(ARGS)

tensorboard: setup ## reward curves of all runs
	$(VENV)/bin/tensorboard --logdir runs

lint: setup ## ruff, mypy, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck train_script.sh .ci/run

test: lint ## lint, types, tests (offline, CPU)
	$(RUN) -m pytest $(ARGS)

clean: ## remove the environment and the caches, keep runs and models
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache

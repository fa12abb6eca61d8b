# Everything a developer types. Each target sets up .venv by itself, and only when something changed.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# An empty environment has no PATH at all, and Python cannot find itself then.
export PATH := $(or $(PATH),/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
PYTHON ?= python3.11
ifeq ($(shell command -v $(PYTHON)),)
PYTHON := python3
endif

# Scratch files of the tests: not in /tmp, which is memory on many machines.
export PYTEST_DEBUG_TEMPROOT ?= /var/tmp

BIN := .venv/bin
# The strict editable install links single files, so a new or removed module needs it again: its stamp names them all.
MODULES := $(sort $(wildcard checkpoint/*.py trainer/*.py trainer/*/*.py daemon/*.py daemon/*/*.py))
STAMP := .venv/.installed-$(firstword $(shell echo $(MODULES) | cksum))

.PHONY: help demo test check fix bench campaign clean install

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv

.venv/.dependencies: pyproject.toml constraints.txt
	@echo "setting up .venv (once; a few hundred megabytes, most of them torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0 setuptools wheel
	@$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation --editable '.[dev]' --config-settings editable_mode=strict
	@rm -f .venv/.installed-*; touch $@

$(STAMP): .venv/.dependencies
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . --config-settings editable_mode=strict
	@rm -f .venv/.installed-*; touch $@

demo: $(STAMP) ## train a small GPT while it is killed again and again, and compare it with an undisturbed run
	@$(BIN)/python examples/char_gpt/demo.py

test: $(STAMP) ## run the tests
	@$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

check: $(STAMP) ## lint, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest --quiet tests/test_imports.py

fix: $(STAMP) ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure, side by side with the floor and the peers (BENCH="loop" for one)
	@$(BIN)/python benchmarks/bench.py $(BENCH)

campaign: $(STAMP) ## kill a training 500 times, every fault of every storage call, every combination of parts (an hour)
	@TRAINERD_EXACTNESS=all $(BIN)/pytest tests/trainer/test_exactness.py
	@TRAINERD_FAULTS=all $(BIN)/pytest -s tests/checkpoint/test_fault_campaign.py
	@TRAINERD_KILLS=500 $(BIN)/pytest -s tests/daemon/test_kills.py

clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

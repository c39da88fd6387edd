# The front door of the kit. `make help` lists the targets.
#
# ARGS passes flags on: make reproduce ARGS="--profiles=inline,split --repeats=3"

SHELL := /bin/bash
PYTHON ?=
VENV := .venv
KIT := $(VENV)/bin/python -m repro
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup image reproduce report flush-lib flush-race nsight-command doctor test lint lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `python -m venv` leaves a broken folder behind where the venv module is missing, hence the check first.
$(VENV)/kit.stamp: requirements/kit.txt scripts/find-python
	@{ [ -x $(VENV)/bin/pip ] || { python=$$(scripts/find-python $(PYTHON)) && $$python -m venv --clear $(VENV); }; } && \
	echo "installing the kit's pinned dependencies into $(VENV) (about 200 MB to download)" && \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/kit.txt && touch $@

$(VENV)/test.stamp: $(VENV)/kit.stamp requirements/test.txt
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/test.txt && touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp requirements/lint.txt
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/lint.txt && touch $@

setup: $(VENV)/kit.stamp ## make the environment in .venv (the other targets do it when needed)

image: setup ## build the container image
	@$(KIT) host build $(ARGS)

# In a container where one gets a GPU; else here, after saying why.
reproduce: setup ## capture the seven profiles, analyse them, write the report
	@if $(KIT) host check; then \
	    $(KIT) host build && $(KIT) host reproduce $(if $(ARGS),--args='$(ARGS)'); \
	else \
	    $(KIT) reproduce $(ARGS); \
	fi

report: setup ## render the report again from what is on disk (RUN=results/NAME, default: the newest)
	@$(KIT) report $(if $(RUN),'$(RUN)') $(ARGS)

flush-race: setup ## run only the teardown-flush race
	@$(KIT) flush-race $(ARGS)

flush-lib: ## compile the flush window for a stock Ray wheel (build/profiler_flush; needs g++, no environment)
	@$(MAKE) -s -C patches/profiler_flush all && ls build/profiler_flush/libprofiler_flush.so

nsight-command: setup ## run only the nsight command bug
	@$(KIT) nsight-command $(ARGS)

doctor: setup ## say what this machine can and cannot run, and why
	@$(KIT) doctor $(ARGS)

test: $(VENV)/test.stamp ## install what the tests need and run them
	@$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/lint.stamp ## ruff, mypy, shellcheck, hadolint
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	@$(VENV)/bin/shellcheck $$(git ls-files | xargs grep -lE '^#!/(usr/bin/env (ba)?sh|bin/(ba)?sh)')
	@if [ -f Dockerfile ]; then $(VENV)/bin/hadolint Dockerfile; fi

lock: ## write requirements/*.txt again from pyproject.toml
	@scripts/lock-requirements

clean: ## remove the environment and build outputs (results/ stays)
	@rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

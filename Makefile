# SPDX-License-Identifier: Apache-2.0
# `make install` creates .venv once and reinstalls the overlay whenever one of its files changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.PHONY: install dev test lint format verify clean

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13 3,$(shell python$(v) -c "import sys; print(sys.executable)" 2>/dev/null)))
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)
ENGINE := $(VENV)/.engine-installed
OVERLAY := $(VENV)/.overlay-installed
# Folders are listed too: their times change when a file is removed.
SOURCES := pyproject.toml setup.py README.md LICENSE \
	$(shell find vllm -name __pycache__ -prune -o -print 2>/dev/null)

install: $(OVERLAY)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The small environment violates vLLM's own torch pin on purpose: hence --no-deps, and hence the
# constraint file, without which a later call would replace the CPU build of torch by a CUDA one.
# triton likewise: the CUDA build of torch, all that some package indexes have, asks for an older one.
$(ENGINE): requirements/cpu.txt requirements/b12x.txt requirements/dev.txt | $(VENV)/bin/python
	$(PIP) install -r requirements/dev.txt
ifeq ($(HAS_GPU),1)
	$(PIP) install 'vllm[b12x]==0.33.0'
else
	$(PIP) install torch==2.13.0+cpu 2>/dev/null || $(PIP) install torch==2.13.0
	$(PIP) freeze | grep '^torch==' > $(VENV)/torch-pin.txt
	$(PIP) install -c $(VENV)/torch-pin.txt -r requirements/cpu.txt
	$(PIP) install --no-deps triton==3.8.0 vllm==0.33.0 compressed-tensors==0.17.0 b12x==1.5.1
	$(PIP) install --no-deps -r requirements/b12x.txt
endif
	touch $@

# No build isolation: the build guard in setup.py compares with the installed vLLM's file list.
$(OVERLAY): $(ENGINE) $(SOURCES)
	rm -rf build *.egg-info
	$(PIP) install --no-deps --no-build-isolation --force-reinstall .
	rm -rf build *.egg-info
	touch $@

# For work on the sources: edits are seen at once, without a reinstall.
dev: install
	$(VENV)/bin/python tools/dev_hook.py

# One thread each: tests and engines share the cores already. On GPUs an engine takes the memory, so
# there its tests run after the others, one by one.
PARALLEL := -n logical --maxprocesses 8 --dist loadscope
test: export OMP_NUM_THREADS := 1
test: install
ifeq ($(HAS_GPU),1)
	$(VENV)/bin/python -m pytest tests --ignore=tests/v1/e2e $(PARALLEL)
	$(VENV)/bin/python -m pytest tests/v1/e2e
else
	$(VENV)/bin/python -m pytest tests $(PARALLEL)
endif

lint: install
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	@files=$$(find vllm -name '*.py' 2>/dev/null); \
	if [ -n "$$files" ]; then echo mypy; $(VENV)/bin/python -m mypy $$files; fi

format: install
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

verify: install
	$(VENV)/bin/vllm-ckv verify

clean:
	rm -rf $(VENV) build dist *.egg-info

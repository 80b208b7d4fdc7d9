# Everything builds what it needs in .venv from a clean checkout: `make test`, `make demo`.

SHELL := bash
PYTHON ?= python3
CXX ?= g++
VENV := .venv
# `make test-matrix` installs others, each beside its own environment
TORCH ?= 2.13.0
# the last release of each minor version that pyproject.toml allows
MATRIX ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
# constraints.txt is for Python 3.11 or newer: many of its versions do not install on 3.10, where pip chooses
OLD_PYTHON = $(shell $(PYTHON) -c 'import sys; print("old" * (sys.version_info < (3, 11)))')
# torch 2.11 and 2.12 do not take the setuptools of today, and each has a Triton of its own
CONSTRAINTS = sed $(if $(OLD_PYTHON),-n) -e 's/^torch==.*/torch==$(TORCH)/$(if $(OLD_PYTHON),p)' $(if $(filter 2.11.% 2.12.%,$(TORCH)),-e '/^setuptools==/d') \
	$(if $(filter-out 2.13.%,$(TORCH)),-e '/^triton==/d') constraints.txt
# of `make gpu`
MINUTES ?= 9
CAMPAIGN ?= out/campaign
BIN := $(VENV)/bin
# CI machines differ in cores; two workers with one thread each is what the time limits are measured with.
WORKERS ?= 2
PYTEST_ARGS ?=

# Several processes share the cores: one thread each. Inductor compiles in the process itself, into build/,
# so that a run neither reads what an older version compiled nor leaves anything outside the tree. It need not try the
# compiler's vector instructions in each new cache, which takes seconds.
TEST_ENV = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 \
	TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor \
	TRITON_CACHE_DIR=$(CURDIR)/build/triton XDG_CACHE_HOME=$(CURDIR)/build/cache
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

CODE = $(wildcard amp_fx passes viz tests examples benchmarks)

.PHONY: help gpu venv lint format typecheck docs test test-fast test-slow test-matrix test-suite dist demo clean compiler

help:
	@echo "make test       lint, type check, documentation and all tests but the slow ones"
	@echo "make test-slow  DDP and FSDP2 on two processes, whole trainings, a large page in the browser"
	@echo "make test-fast  the tests that need fake tensors only"
	@echo "make test-matrix  the tests on each supported torch, in environments of their own (large downloads)"
	@echo "make gpu        on a machine with a GPU: its tests and all benchmarks, nine minutes a call, until none is left"
	@echo "make dist       wheel and sdist in dist/, checked and tried in a clean environment"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make demo       what amp_fx is for, in three acts: accuracy, inference, a GPU that is not in the machine"
	@echo "make lint | format | typecheck | venv | clean"

venv: $(VENV)/.installed

# torch alone first: as a dependency range among others the resolver may choose another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c <($(CONSTRAINTS)) torch==$(TORCH) 'setuptools>=77'
	$(BIN)/python -m pip install -q -c <($(CONSTRAINTS)) --no-build-isolation -e ".[dev]"
	@touch $@

compiler:
	@command -v $(CXX) >/dev/null || { \
		echo "error: no C++ compiler '$(CXX)'. Inductor compiles its CPU kernels with one:" >&2; \
		echo "       install g++ (Debian, Ubuntu: apt install g++) or set CXX." >&2; exit 1; }

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: typecheck-3.10 typecheck-3.14

typecheck-%: venv
	$(BIN)/pyright -p pyproject.toml --pythonversion $*

# A link that leads nowhere and an anchor that is not there are errors; tests/fake/test_docs.py looks at the menu.
docs: venv
	@rm -rf build/site
	@$(BIN)/zensical build --strict
	@echo "the documentation: build/site/index.html"

# What takes long by itself (two processes, whole trainings) is in test-slow.
test: compiler venv
	@$(MAKE) -j2 --output-sync lint typecheck docs
	@rm -rf build/inductor
	$(PYTEST) -m "not slow"

test-slow: venv compiler
	$(PYTEST) -m slow

test-fast: venv
	$(PYTEST) tests/fake

# Not in CI: each environment downloads a torch of its own, which from PyPI brings its CUDA packages along.
# One version: make test-matrix MATRIX=2.12.1
test-matrix: compiler
	@set -e; for torch in $(MATRIX); do \
		echo "== torch $$torch"; \
		$(MAKE) --no-print-directory VENV=.venv-$$torch TORCH=$$torch test-suite; done

test-suite: venv
	@rm -rf build/inductor
	$(PYTEST)

# The demo needs little: where the development environment is not there, it gets a small one of its own.
DEMO_VENV := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-demo)

.venv-demo/.installed: pyproject.toml constraints.txt
	@echo "Installing torch, Triton and three small packages into .venv-demo; the demo itself takes about 80 seconds."
	@$(PYTHON) -m venv .venv-demo
	@.venv-demo/bin/python -m pip install -q -c <($(CONSTRAINTS)) torch==$(TORCH) 'setuptools>=77'
	@.venv-demo/bin/python -m pip install -q -c <($(CONSTRAINTS)) --no-build-isolation -e ".[demo]"
	@touch $@

demo: compiler $(DEMO_VENV)/.installed
	@$(DEMO_VENV)/bin/python examples/demo.py

# What a release would upload: built, checked, installed into a clean environment, and the demo's first act run from there.
dist: venv compiler
	@rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install -q -c <($(CONSTRAINTS)) torch==$(TORCH) 'setuptools>=77'
	build/dist/bin/python -m pip install -q -c <($(CONSTRAINTS)) "$$(ls dist/*.whl)"
	cd build/dist && bin/python $(CURDIR)/examples/demo.py --acts 1

# The Python that is there has torch, triton, networkx and graphviz; amp_fx is put beside the tree, as torch looks for backends
# among what is installed. Each call takes less than ten minutes and goes on where the one before stopped.
gpu:
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation --upgrade --target build/gpu .
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu $(PYTHON) -m benchmarks.campaign --minutes $(MINUTES) --out $(CAMPAIGN)

clean:
	rm -rf $(VENV) .venv-* build dist out *.egg-info .cache .pytest_cache .ruff_cache .hypothesis torch_compile_debug
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

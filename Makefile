# `make help` lists the targets. Everything is installed into .venv and built in place;
# stamps there and in build/ keep a second call short.

PYTHON    ?= python3
PIP_EXTRA ?=
ARGS      ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install -q
TEST := $(BIN)/python -m pytest

# A torch chosen once (make … TORCH=…) is kept for later calls.
TORCH ?= $(shell cat $(VENV)/.torch 2>/dev/null)
TORCH_REQUIREMENT := $(or $(TORCH),$(shell grep '^torch==' requirements.txt))

CXX_FILES = $(shell find csrc tests -name build -prune -o \
              \( -name '*.h' -o -name '*.inl' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print 2>/dev/null)

.PHONY: help demo build test test-quick test-full soak native-test cuda-check gpu-check triton-3.6 lint format bench bench-check clean distclean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12           the Python that makes .venv (3.10 or later)"
	@echo "  TORCH=… PIP_EXTRA=…         another build of torch, and pip options to find it (docs/building.md)"
	@echo "  ARGS=…                      arguments for pytest, the demo or the benchmarks"
	@echo "  PYCOLL_CUDA=0/1             without or with CUDA kernels (docs/building.md)"
	@echo "  MAX_JOBS=… CXX=… CXXFLAGS=… for the compiler"

demo: build ## build if needed and run the demo
	$(BIN)/python -m pycoll.examples.demo $(ARGS)

build: build/.installed ## .venv with pinned requirements and pycoll built in place

test: build $(VENV)/.dev ## the suite (without the full matrix), under 25 minutes
	$(TEST) -m "not full and not soak" $(ARGS)

test-quick: build $(VENV)/.dev ## tests that are not slow, under 3 minutes
	$(TEST) -m "not slow and not full and not soak" $(ARGS)

test-full: build $(VENV)/.dev ## the suite with the full matrix
	PYCOLL_TEST_FULL=1 $(TEST) -m "not soak" -o faulthandler_timeout=3600 $(ARGS)

soak: build $(VENV)/.dev ## random jobs with deaths for 20 minutes (PYCOLL_SOAK_MINUTES=…)
	$(TEST) -m soak -s -o faulthandler_timeout=0 $(ARGS)

native-test: $(VENV)/.dev ## C++ tests of the core, without torch
	@if [ -x tests/native/run.sh ]; then PATH="$(CURDIR)/$(BIN):$$PATH" tests/native/run.sh $(ARGS); \
	else echo "tests/native/run.sh is not there: nothing to run"; fi

cuda-check: $(VENV)/.dev ## compile the CUDA kernels (ARCHS=sm_90a,…) and check registers, spills and accesses
	$(BIN)/python tools/cuda_check.py $(if $(ARCHS),--archs $(ARCHS)) $(ARGS)

triton-3.6: $(VENV)/.triton-3.6 ## an older Triton beside the installed one, for tests of the PTX that it emits

# A machine with a GPU has its own torch, and perhaps no network: .venv is used where it is, and never made.
gpu-check: ## check and measure on a machine with a GPU, in 8 minutes (ARGS="--only streams_2"); skips without one
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu_check.py $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy and clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

format: $(VENV)/.dev ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

bench: build ## collectives beside gloo and the hardware's limit (ARGS for pycoll bench), then training steps
	$(BIN)/pycoll bench $(ARGS)
	$(BIN)/python benchmarks/train_step.py

bench-check: build ## ratios to gloo, held against the stored ones (ARGS="--margin 1" to be laxer)
	$(BIN)/pycoll bench --verify benchmarks/results/bench_check.json --rounds 5 $(ARGS)

clean: ## remove what was built, keep .venv
	rm -rf build dist *.egg-info pycoll/_C*.so pycoll/_build.py .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)

# --- stamps ---------------------------------------------------------------------------------------

$(VENV)/.created:
	@need() { message=$$1; shift; "$$@" >/dev/null 2>&1 || { echo "pycoll: $$message" >&2; exit 1; }; }; \
	need "no $(PYTHON) here: apt-get install python3, or PYTHON=..." command -v $(PYTHON); \
	need "$(PYTHON) is older than 3.10: PYTHON=..." \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; \
	need "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" \
	  $(PYTHON) -c 'import ensurepip'; \
	need "$(PYTHON) has no Python.h: apt-get install python3-dev" \
	  $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'; \
	need "no C++ compiler here: apt-get install g++, or CXX=..." command -v $${CXX:-g++}
	$(PYTHON) -m venv $(VENV)
	@touch $@

.PHONY: always
$(VENV)/.torch: $(VENV)/.created always
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.runtime: $(VENV)/.torch requirements.txt
	$(PIP) $(PIP_EXTRA) '$(TORCH_REQUIREMENT)'
	@grep -v '^torch==' requirements.txt > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.triton-3.6: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENV)/triton-3.6 triton==3.6.0
	@touch $@

# A change of the variables that setup.py reads builds anew.
build/.cuda: always
	@mkdir -p build
	@echo '$(PYCOLL_CUDA) $(PYCOLL_CUDA_ARCHS)' | cmp -s - $@ || echo '$(PYCOLL_CUDA) $(PYCOLL_CUDA_ARCHS)' > $@

# Two steps, because pip hides the compiler's messages: here they are seen.
build/.built: $(VENV)/.runtime build/.cuda setup.py $(shell find csrc 2>/dev/null)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

build/.installed: $(VENV)/.runtime setup.py pyproject.toml pycoll/_version.py | build/.built
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

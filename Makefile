# `make help` lists the targets. Each target sets up all that it needs: system packages by apt if it
# has the permission, a virtual environment in .venv, torch and the tools from PyPI (installed once per
# machine, scripts/environment.sh), and the build.
#   TORCH=2.11.0   with `make test`: the Python tests with this version of torch, in an environment of
#                  its own
#   LANE=          with `make py-test`: the tests to run, by marker. Default: all but those of `make torture`
#   SEED=17        with `make torture`: the number that an earlier run printed, to replay it
#   PYTHON=python3 the interpreter for the virtual environment, or for the wheel
#   PYTHONS=, PARTS=  with `make release-check`: the interpreters, one for each wheel, and what is
#                  checked (scripts/release_check.sh lists the parts). Default: all
#   SECONDS=60     with `make fuzz`: how long each fuzzer runs
#   LINT_SINCE=    with `make tidy` and `make test-full`: clang-tidy checks the files that changed since this
#                  commit, or `all`. Default: since this branch left main; on main, the last ten commits
#   ARGS=          with `make cpp-test`, `cpp-asan`, `cpp-tsan`: for GoogleTest, as --gtest_filter='Save*';
#                  with `make py-test`: for pytest; with `make bench`: for benchmarks.run

# Each test process imports thousands of files: let the first one keep them compiled, whatever the
# environment says.
export PYTHONDONTWRITEBYTECODE :=

TORCH ?=
SECONDS ?= 60
PYTHON ?= python3
VENV ?= .venv
TORCH_VENV := build/torch-$(TORCH)
BIN := $(VENV)/bin
# pyproject.toml lists the versions.
PYTHONS ?= $(shell sed -n 's/.*Python :: \(3\.[0-9]*\)".*/python\1/p' pyproject.toml)
PARTS ?=
TIMED := scripts/timed.sh
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.c')

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint stubs tidy format build wheel docs cpp-test cpp-asan cpp-tsan cpp-fork py-test py-tsan durations torture fuzz bench gpu-kit release-check clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: build ## train, kill, resume on other ranks, compare with stock torch
	$(BIN)/python examples/demo.py

# Lint mostly uses one core, so it runs while the C++ tests are built and run.
ifeq ($(TORCH),)
test: ## the first lane: all that CI runs on a push, and how long each part took
	@rm -f build/times
	@status=0; $(MAKE) -j 2 --output-sync=target lint cpp-asan && $(MAKE) py-test LANE="not full" || status=$$?; \
	  echo 'Where the time went:'; cat build/times; exit $$status
else
# One build works with each torch, so only the environment is another one.
test: build $(TORCH_VENV)/.ready
	$(MAKE) py-test TORCH= LANE="not full" TEST_PYTHON=$(TORCH_VENV)/bin/python
endif

# pyproject.toml names the oldest version of torch.
OLDEST_TORCH := $(shell sed -n 's/^dependencies = \["torch>=\(.*\)"\]/\1.0/p' pyproject.toml)
test-full: test ## the second lane: `make test` and all that takes longer, nightly and before a release
	@status=0; $(MAKE) tidy cpp-tsan cpp-fork docs && $(MAKE) py-test LANE=full && \
	  $(MAKE) test TORCH=$(OLDEST_TORCH) || status=$$?; \
	  echo 'Where the time went:'; cat build/times; exit $$status

docs: $(VENV)/.ready ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

gpu-kit: $(VENV)/.ready ## fill build/gpu-kit for scripts/gpu_run.sh on a GPU machine without network
	scripts/gpu_kit.sh $(BIN)/python build/gpu-kit

bench: build ## measure against stock torch and the machine's limits
	$(BIN)/python -m benchmarks.run $(ARGS)

build: $(VENV)/.ready ## the extension, in place
	cmake --preset python -DPython_EXECUTABLE=$(abspath $(BIN))/python
	$(TIMED) "build: extension" cmake --build build/python --target _C
	cmake --install build/python

wheel: ## the source distribution, and a wheel for PYTHON, in dist/
	scripts/packages.sh "$(PYTHON)" wheel
	scripts/wheel.sh "$(PYTHON)" dist

release-check: ## check HEAD for a release in a clean clone: tests, docs, wheels, torture
	scripts/release_check.sh build/release "$(PYTHONS)" "$(PARTS)"

build/packages: scripts/packages.sh
	$(TIMED) "system packages" scripts/packages.sh "$(PYTHON)"
	touch $@

# environment.sh writes the path of the shared environment to .ready. If the shared environment has been
# deleted, the prerequisite `deleted` makes .ready out of date.
deleted = $(shell test -d "$$(cat $(1) 2> /dev/null)" || echo deleted)
.PHONY: deleted
$(VENV)/.ready: scripts/environment.sh pyproject.toml $(call deleted,$(VENV)/.ready) | build/packages
	$(TIMED) environment scripts/environment.sh "$(PYTHON)" "$(VENV)"

$(TORCH_VENV)/.ready: scripts/environment.sh pyproject.toml $(call deleted,$(TORCH_VENV)/.ready) | build/packages
	$(TIMED) "environment with torch $(TORCH)" scripts/environment.sh "$(PYTHON)" $(TORCH_VENV) $(TORCH)

lint: build ## formatting, ruff, mypy --strict, stubs
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TIMED) mypy $(BIN)/mypy
	$(BIN)/python -m scripts.stubs --check

stubs: build ## write _C.pyi and _core.pyi from the bindings
	$(BIN)/python -m scripts.stubs

tidy: build/packages ## clang-tidy on changed files
	$(TIMED) clang-tidy scripts/tidy.sh "$(LINT_SINCE)"

format: $(VENV)/.ready ## write the formatting that lint asks for
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# For development. `make test` runs the same tests under sanitizers instead.
cpp-test: build/packages ## GoogleTest over the core, which needs no torch
	cmake --preset test
	cmake --build build/test
	timeout 1200 build/test/torch_ckpt_tests --gtest_brief=1 $(ARGS)

cpp-asan: build/packages ## GoogleTest under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake --preset asan
	$(TIMED) "build: C++ tests, ASan" cmake --build build/asan
	$(TIMED) "C++ tests, ASan" scripts/gtest.sh build/asan/torch_ckpt_tests $(ARGS)

cpp-tsan: build/packages ## GoogleTest for the code with threads, under ThreadSanitizer
	cmake --preset tsan
	$(TIMED) "build: C++ tests, TSan" cmake --build build/tsan
	$(TIMED) "C++ tests, TSan" scripts/gtest.sh build/tsan/torch_ckpt_tests $(ARGS)

# Links the extension's objects, because some forks cannot run under sanitizers.
cpp-fork: build ## GoogleTest for forks, without a sanitizer
	$(TIMED) "build: C++ tests, forks" cmake --build build/python --target torch_ckpt_fork_tests
	$(TIMED) "C++ tests, forks" timeout 1200 build/python/torch_ckpt_fork_tests --gtest_brief=1

fuzz: build ## fuzz what reads bytes from outside; SECONDS=60 for each of three fuzzers
	scripts/fuzz.sh $(BIN)/python $(SECONDS)

# Runs two files at a time, the longest first (tests/durations.json), and then, one file at a time, the
# tests that measure or need the whole machine, of which lane 1 has none. pytest exits with 5 if a run
# selects no test.
TEST_PYTHON := $(BIN)/python
LANE ?= full or not full
PYTEST = $(TEST_PYTHON) -m pytest --durations=20
py-test: build ## pytest, torchrun tests included
	@beside=0; alone=0; \
	$(TIMED) "pytest ($(LANE)), two files at a time" $(PYTEST) -m "($(LANE)) and not alone" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || beside=$$?; \
	[ "$(LANE)" = "not full" ] || \
	  $(TIMED) "pytest ($(LANE)), one file at a time" $(PYTEST) -m "($(LANE)) and alone" $(ARGS) || alone=$$?; \
	case $$beside$$alone in 00 | 05 | 50) ;; *) exit 1 ;; esac

durations: ## run pytest and record how long each file takes in tests/durations.json
	$(MAKE) py-test ARGS=--record-durations

# Only the extension is built with ThreadSanitizer, not Python and torch, so races within torch's
# libraries are not reported.
TSAN := build/py-tsan
py-tsan: $(VENV)/.ready ## a part of pytest with the extension under ThreadSanitizer
	cmake -S . -B $(TSAN) -G Ninja -DTORCH_CKPT_BUILD_PYTHON=ON -DTORCH_CKPT_SANITIZE=thread \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DCMAKE_INSTALL_PREFIX=$(abspath $(TSAN))/package
	cmake --build $(TSAN)
	rm -rf $(TSAN)/package && cp -r torch_ckpt $(TSAN)/tree && mkdir $(TSAN)/package && mv $(TSAN)/tree $(TSAN)/package/torch_ckpt && rm -f $(TSAN)/package/torch_ckpt/*.so
	cmake --install $(TSAN)
	LD_PRELOAD=$$(g++ -print-file-name=libtsan.so) \
	  TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 report_signal_unsafe=0 die_after_fork=0" \
	  timeout 1200 $(BIN)/pytest -o pythonpath="$(TSAN)/package ." -p no:cacheprovider \
	  tests/python/api/test_api.py tests/python/saving/test_kept_agreements.py tests/python/loading/test_load_engine.py \
	  tests/python/api/test_one_directory.py $(ARGS)

# `make test` runs samples of these, or checks only changed files. This target runs all.
SEED := $(or $(SEED),$(shell date +%s))
torture: build ## a failure and a kill at every call of a save, power cuts, attacks, fuzzing, all of clang-tidy
	@echo "SEED=$(SEED)"
	TORCH_CKPT_TORTURE=1 TORCH_CKPT_SEED=$(SEED) \
	  $(BIN)/python -m pytest $(wildcard tests/faults tests/crash tests/cluster tests/distributed tests/attacks tests/python/project/test_benchmark_runs.py) $(ARGS) \
	  || { echo "make torture SEED=$(SEED) replays it"; exit 1; }
	TORCH_CKPT_PROGRAMS=60000 TORCH_CKPT_SEED=$(SEED) $(MAKE) cpp-test ARGS="--gtest_filter='MetadataPrograms.*'"
	$(MAKE) fuzz py-tsan
	scripts/tidy.sh all

clean: ## remove all build products, but keep the environment
	rm -rf build torch_ckpt/*.so *.egg-info

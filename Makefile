# The commands of this project; CONTRIBUTING.md says when to use which. Each does all set-up that it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CPP = $(shell find runtime_ext tests/emulated tests/store -name '*.cpp' -o -name '*.h')

# The venv's ninja, clang-format and accelerate are the pinned ones.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export MAX_JOBS ?= $(shell nproc)
DEVICE ?= cuda

.PHONY: help setup test breadth sanitize safety fuzz lint format demo demo-full emulated emulated-mutants gpu gpu-peers \
  browser browser-test screenshots outside quantised deepspeed-op quanto-op wheel-check matrix versions site clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 11

setup: $(INSTALLED)  ## .venv with pinned packages, system packages for the C++ tests, the compiled engine
	@.ci/system-packages
	@$(PY) -m disco_accel.native.extension

$(INSTALLED): pyproject.toml constraints.txt .ci/venv
	@.ci/venv $(VENV)
	@touch $@

lint: $(INSTALLED)  ## ruff, mypy --strict, clang-format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@clang-format --dry-run --Werror $(CPP)

format: $(INSTALLED)  ## rewrite sources the way lint wants them
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@clang-format -i $(CPP)

# One intra-op thread: sums split over threads differ in their last bits, and test processes share the cores.
# By file, in the order of tests/conftest.py: the tests of one file share a compiled fixture.
# Three test processes: one of them often waits for a process that it has started.
test breadth: export OMP_NUM_THREADS := 1
# Dozens of processes import the same modules.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup  ## set-up, lint and all tests; the last line is pytest's
	@$(MAKE) --no-print-directory -j 2 lint deepspeed-op quanto-op
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --instafail --durations 60 -m "not long"

# Most of lint is one process: the other core compiles meanwhile.
deepspeed-op: $(INSTALLED)
	@$(PY) -m tests.support.deepspeed_op >/dev/null

quanto-op: $(INSTALLED)
	@PYTHONPATH=$(CURDIR)/$(VENV)/quantised $(PY) -m tests.support.quanto_op >/dev/null

breadth: setup  ## what `make test` leaves out: the other cases of tests/sampled.txt and long tests
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --instafail -m "long"

# The long runs of what `make test` samples; nearly an hour on two cores.
sanitize: export OMP_NUM_THREADS := 1
sanitize: export DISCO_RANDOM_PROGRAMS := 10000
sanitize: export DISCO_SOAK_STEPS := 1000
sanitize: export DISCO_DEVICE_PROGRAMS := 300
sanitize: setup  ## 10^4 random programs plain and under sanitizers, 10^3 steps under random schedules
	@$(PY) -m pytest -s tests/runtime_ext/test_core.py tests/execute/test_soak.py tests/execute/test_devices.py

fuzz: setup  ## 10^5 damaged files against the command line; half an hour on one core
	@$(PY) -m tests.cli.fuzz --count 100000 --keep out/fuzz

# One process; about half an hour for 10^5 graphs, and three quarters for as many with duplicates.
safety: export OMP_NUM_THREADS := 1
safety: export PYTHONPATH := $(CURDIR)
safety: $(INSTALLED)  ## random graphs, budgets and policies against an adversary, and planted faults; SAFETY_GRAPHS=100000
	@$(PY) -m tests.verify.safety --graphs $(or $(SAFETY_GRAPHS),100000)
	@$(PY) -m tests.graph.duplicates --graphs $(or $(SAFETY_GRAPHS),100000)

# A Chromium without a desktop, of the system's packages: 65 MB.
browser:
	@$(PY) -m tests.support.browser >/dev/null || \
	  { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core; } >/dev/null

browser-test: $(INSTALLED) browser  ## the page of a step in a headless Chromium, which it installs
	@$(PY) -m pytest tests/observe/test_page_in_browser.py

screenshots: $(INSTALLED) browser  ## the pictures of docs/report.md; DIR=folder shows another step
	@$(PY) -m tests.observe.screenshots $(DIR)

demo: setup  ## LoRA under half the memory, with and without us, compared bit for bit; three minutes
	@$(PY) -m benchmarks.demo

demo-full: setup  ## the same with more steps and budgets, and every figure; seven minutes or more
	@$(PY) -m benchmarks.demo --full

# Needs the package index once, for the CUDA build of torch: 6 GB below out/. TORCH names its version; ONLY some modes.
emulated: $(INSTALLED)  ## the CUDA path on an emulated GPU, in several modes; TORCH=version, ONLY=mode
	@.ci/emulated tests.emulated.modes $(if $(ONLY),--only "$(ONLY)")

emulated-mutants: $(INSTALLED)  ## faults planted in the CUDA path, each of which those tests must catch; ONLY=fault
	@.ci/emulated tests.emulated.mutants $(if $(ONLY),--only "$(ONLY)")

# The machine's own python3 and packages; WHEELS names a folder with the wheels of what it lacks, OUT one for results.
gpu: export PYTHONPATH := $(CURDIR)
gpu:  ## measurements on a GPU, 8 minutes; ONLY=check checks it in 150 s; DEVICE=cpu tries the script on the host device
	@python3 -m benchmarks.gpu --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--small) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(WHEELS),--wheels $(WHEELS))

# WHEELS names a folder with the wheels of what the machine lacks; ENGINES=in-memory,disco,zero3 measures some.
gpu-peers: export PYTHONPATH := $(CURDIR)
gpu-peers:  ## a 7B LoRA step beside DeepSpeed, accelerate and others on a GPU; WHEELS=folder
	@python3 -m benchmarks.gpu.peers --device $(DEVICE) --wheels $(WHEELS) $(if $(ENGINES),--engines $(ENGINES))

# A long run; FORMS="'hqq 4 bits'" runs some.
quantised: export OMP_NUM_THREADS := 1
quantised: export PYTHONPATH := $(CURDIR)
quantised: setup  ## every form of quantised weights against its library's eager step, one table; changes and lives of each
	@$(PY) -m tests.quantised.matrix $(FORMS)

# Needs the package index; about a quarter of an hour, so not for CI.
outside: export PYTHONPATH := $(CURDIR)
outside: setup  ## the tests of accelerate, peft and transformers, and TRL's trainers, without us and with us, one table
	@$(PY) -m benchmarks.outside --out benchmarks/results/outside-host-device.txt

# Needs the package index and about 10 GB of disk for the newest torch with CUDA; a quarter of an hour.
wheel-check: setup  ## the wheel in a fresh environment, as pip installs it: doctor, launch, a recipe
	@.ci/wheel-check out/wheel-check

# Needs the package index; downloads about 1 GB for each version of PyTorch and compiles for some minutes.
matrix: export PYTHONPATH := $(CURDIR)
matrix: setup  ## the engine compiled with every PyTorch from 2.11 to the newest, one table
	@rm -rf out/matrix
	@$(PY) -m benchmarks.versions.matrix out/matrix

# A long run. Needs the package index, and 6 GB at a time where a row has a PyTorch of its own.
versions: export PYTHONPATH := $(CURDIR)
versions: setup  ## the Hugging Face tests on the oldest versions, some between and the newest, one table; ONLY=row
	@$(PY) -m benchmarks.versions out/versions $(if $(ONLY),"$(ONLY)")

# Needs the package index once, for the generator: 30 MB below out/.
site:  ## the pages of docs/ as a site in out/site; a dead link fails it
	@.ci/site out/site

clean:  ## remove what the targets above made, except .venv
	@rm -rf build out .pytest_cache .mypy_cache .ruff_cache .hypothesis

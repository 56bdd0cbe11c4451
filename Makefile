# Needs Linux, make and Python 3.11 or newer; everything else goes into .venv.
#   make quickstart [ARGS=…]    install, sweep a small real space, show the trade-off
#   make test       [ARGS=…]    the tests but heavy and slow ones, e.g. ARGS="tests/dse -k canonical"
#   make test-heavy [ARGS=…]    those of some ten seconds of a core: whole trainings, sweeps, simulations
#   make test-slow  [ARGS=…]    those that take longer: long trainings, SLURM, Ray, chaos
#   make test-gpu   [ARGS=…]    those that need a CUDA device
#   make bench-gpu              all that is measured on a GPU: first that kernels are right, then how fast they are
#   make zoo                    train every shipped recipe on three smallest tasks, and the spaces for reinforcement
#                               learning and fine-tuning on theirs: two to four minutes
#   make services               Debian's SLURM, PostgreSQL and Chromium, for the tests that start them (asks for root)
#   make lint                   ruff and mypy
#   make install                the package alone, editable
#   make clean                  delete .venv and caches; results under runs/ stay

PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-heavy test-slow test-gpu bench-gpu zoo services lint install clean

quickstart: install
	$(BIN)/fp4dse quickstart $(ARGS)

# One thread a worker: two workers that each take every core are slower than one, and threads that wait would spin.
# Processes that tests start find the package compiled to bytecode, whatever the environment says.
# Three at a time on two cores, since some wait.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --dist worksteal

test: .venv/dev.stamp
	$(TESTS) -n 3 -m "not heavy and not slow" $(ARGS)

test-heavy: .venv/dev.stamp
	$(TESTS) -n 3 -m "heavy and not slow and not gpu" $(ARGS)

test-slow: .venv/dev.stamp
	$(TESTS) -n 2 -m "slow and not gpu" $(ARGS)

test-gpu: .venv/dev.stamp
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Nothing is timed that is not right: each step ends the run where it fails. Experts are exchanged between two GPUs; where
# there is one, that is left out and said.
bench-gpu: .venv/dev.stamp
	$(BIN)/fp4dse selftest --device cuda
	$(BIN)/python -m pytest -m gpu tests/kernels
	$(BIN)/fp4dse bench kernels --device cuda
	$(BIN)/fp4dse bench experts --device cuda
	$(BIN)/fp4dse bench kept --device cuda
	@if [ "$$(nvidia-smi -L | wc -l)" -gt 1 ]; then $(BIN)/fp4dse bench exchange --device cuda --ranks 2; \
	    else echo "bench exchange: left out, it needs two GPUs"; fi
	$(BIN)/fp4dse bench train --device cuda

# Nothing is looked up from an earlier run: the stores are new ones. A lane that fails ends the run.
zoo: install
	rm -rf runs/zoo-smoke
	$(BIN)/fp4dse sweep zoo --task regression:smoke --task vision:smoke --task language:smoke --seeds 1 --store runs/zoo-smoke/store
	$(BIN)/fp4dse sweep rl --task rl:smoke --seeds 1 --record --store runs/zoo-smoke/rl/store
	$(BIN)/fp4dse sweep rl-fixes --task rl:smoke --seeds 1 --record --store runs/zoo-smoke/rl-fixes/store
	$(BIN)/fp4dse sweep finetune --task finetune:smoke --seeds 1 --store runs/zoo-smoke/finetune/store

services:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    slurmctld slurmd slurm-client munge postgresql chromium chromium-driver

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

install: .venv/install.stamp

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so an installation that was interrupted is taken up again.
.venv/install.stamp: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/dev.stamp: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ .venv/install.stamp

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old, fp4dse needs 3.11 or newer; name another: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# make test        lint, types and the default tests: some minutes on 2 cores
# make test-all    lint, types and all tests
# make perf        the core suite; make perf ARGS=--full runs all of it
# make perf-smoke  every experiment once, with as little work as possible, on the CPU
# make calibrate   measure how often verdicts are wrong, for an hour; docs/trust.md
# make baseline    make the newest run the baseline of this machine; NAME names it
# make clean       delete what the others made
# Each sets up a virtual environment in .venv first. PYTHON must be 3.11 or newer with its venv module.

PYTHON ?= python3
ARGS ?=
NAME ?= baseline
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest tests -n 2 --dist loadfile --durations=10

.PHONY: lint types style test test-all perf perf-smoke calibrate baseline clean

lint: .venv/ready
	$(MAKE) --no-print-directory --output-sync -j 2 types style

types:
	$(BIN)/mypy

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test: lint
	$(PYTEST) -m "not slow and not figures"

test-all: lint
	$(PYTEST) -m "not figures"
	$(BIN)/python -m pytest tests -m figures

perf: .venv/ready
	$(BIN)/python -m pytest perf/ $(ARGS)

perf-smoke: .venv/ready
	$(BIN)/python -m pytest perf/ --full --device cpu --world-sizes 2 --model resnet10_cifar --rounds 1 \
		--batch-sizes 8 --global-batch-sizes 16 --epoch-images 16 --buffer-sizes 4KiB,64KiB,256KiB,1MiB

calibrate: .venv/ready
	$(BIN)/python -m tools.calibrate $(ARGS)

baseline: .venv/ready
	$(BIN)/python -m ddpperf.results.promote --name $(NAME)

.venv/ready: pyproject.toml
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo "ddpperf needs Python 3.11 or newer, '$(PYTHON)' was not found;" \
		"install it (Debian: apt-get install python3 python3-venv) or name another: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
		echo "ddpperf needs Python 3.11 or newer, '$(PYTHON)' is $$("$(PYTHON)" -V 2>/dev/null || echo no Python);" \
		"install a newer one (Debian 12 and later: apt-get install python3 python3-venv)" \
		"or name another: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "ddpperf needs Python's venv module, '$(PYTHON)' has none;" \
		"install it (Debian: apt-get install python3-venv) or name another Python: make PYTHON=python3.12"; exit 1; }
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable .[dev]
	@touch $@

clean:
	rm -rf .venv .ddpperf .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# make test    lint, types and tests          make perf        the whole suite, e.g. make perf ARGS="--world-sizes 1,2"
# make clean   what these made                make perf-smoke  all of it with small batches, on the CPU
# All of them set up a virtual environment in .venv first, for which PYTHON must be 3.11 or newer with its venv module.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: test perf perf-smoke clean

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -n 2 -m "not figures"
	$(BIN)/python -m pytest tests -m figures

perf: .venv/ready
	$(BIN)/python -m pytest perf/ $(ARGS)

perf-smoke: .venv/ready
	$(BIN)/python -m pytest perf/ --device cpu --world-sizes 1,2 --batch-sizes 8 --global-batch-sizes 16 --epoch-images 16 --rounds 3

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .[dev]
	@touch $@

clean:
	rm -rf .venv .ddpperf .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
# By `python -m`: scripts in a venv begin with its path, which no system reads that has a space in it or 128 letters.
BIN := .venv/bin

.PHONY: demo test test-all test-gpu test-processors lint bench docs docs-serve dist bump clean
.DEFAULT_GOAL := test

# Compiled files are kept, whatever the shell says (images of Python often forbid it): without them every worker and every
# process that a test starts compiles the package and the tests again, a minute in all.
export PYTHONDONTWRITEBYTECODE :=

.venv/installed: pyproject.toml constraints.txt
	@echo "installing into .venv: some minutes and 2 GB, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m tangency demo --out demo

lint: .venv/installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-all: lint
	TANGENCY_CHECK_TYPES=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

# What depends on the processor's last digits, under the settings of two other processors: under two minutes on two cores.
test-processors: .venv/installed
	$(BIN)/python -m benchmarks.robustness.processors tests --tender

# Without a GPU all are skipped; TANGENCY_GPU_ON_CPU=1 runs them on the CPU. Without a network: benchmarks/robustness/gpu_tests.py.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

bench: .venv/installed
	$(BIN)/python -m benchmarks.speed.cpu

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# The variable silences an advertisement of mkdocs-material's.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-serve: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# Without tangency and torch: a release needs neither.
.venv/tools: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'pre-commit>=4' 'twine>=6.1'
	touch $@

dist: .venv/tools
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# make bump VERSION=0.2.0: in the places that say it, and as the changelog's heading.
bump:
	$(PYTHON) scripts/release.py bump "$(VERSION)"

clean:
	rm -rf .venv .venv-peers .venv-projection .venv-adversary .venv-cleanlab demo build dist site .gallery

# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-gpu lint bench clean
.DEFAULT_GOAL := test

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: .venv/installed
	$(BIN)/tangency demo --out demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest -n 2 -m "not gpu"

# Without a GPU all are skipped; TANGENCY_GPU_ON_CPU=1 runs them on the CPU. Without a network: benchmarks/robustness/gpu_tests.py.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

bench: .venv/installed
	$(BIN)/python -m benchmarks.speed.cpu

clean:
	rm -rf .venv .venv-peers .venv-projection .venv-adversary demo build dist

# Two commands do everything on a fresh machine: `make demo` and `make test`. Both are quick when repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := .demo/models/SmolLM2-135M-Instruct

.PHONY: demo test lint format bench clean

demo: $(MODEL)/model.safetensors
	$(BIN)/python cookbook/demo.py --model $(MODEL)

test: $(MODEL)/model.safetensors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu" tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(MODEL)/model.safetensors
	$(BIN)/python engine/bench/latency.py --model $(MODEL) --out .demo/latency.json
	$(BIN)/python engine/bench/fidelity.py --model $(MODEL) --out .demo/fidelity.json

# torch first and by itself: pinned, so that the CPU build of the tested version is taken.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all]"
	touch $@

$(MODEL)/model.safetensors: cookbook/fetch_model.py | $(INSTALLED)
	$(BIN)/python cookbook/fetch_model.py $(MODEL)

clean:
	rm -rf .demo .mypy_cache .ruff_cache .pytest_cache

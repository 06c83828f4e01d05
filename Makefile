# Each target does its own set-up: a virtual environment in .venv with the versions of constraints.txt.
.PHONY: train test lint set-up clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

train: set-up
	$(BIN)/dsv4c train --preset tiny --out runs/tiny-$$(date +%Y%m%d-%H%M%S)

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 10

lint: set-up
	$(BIN)/ruff check .
	$(BIN)/mypy

set-up: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info

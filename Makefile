PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# torch and torchvision are pinned together here; the package itself accepts torch >= 2.4.
TORCH := torch==2.14.1 torchvision==0.29.1

# The oldest torch that is accepted (Python 3.10 to 3.12).
OLDEST := torch==2.4.1 torchvision==0.19.1

.PHONY: demo test test-oldest lint screenshots clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/ampscope demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

test-oldest:
	$(MAKE) test VENV=.venv-oldest TORCH='$(OLDEST)'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

screenshots: $(VENV)/.installed
	$(BIN)/python benchmarks/screenshots.py

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info

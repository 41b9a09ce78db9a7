# make train   installs everything into .venv and trains
# make test    installs everything into .venv and runs the tests
# make notebooks   executes all notebooks
# PYTHON is the interpreter that makes .venv: Python 3.11 or newer. EXTRAS=[tensorboard] installs that too.

PYTHON ?= python3

train: .venv/installed
	.venv/bin/python step01_single_gpu/train.py

test: .venv/installed
	.venv/bin/python -m pytest

notebooks: .venv/installed
	.venv/bin/python -m pytest tests/test_notebooks.py --notebooks -k from_top_to_bottom

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable ".$(EXTRAS)"
	touch $@

.PHONY: train test notebooks

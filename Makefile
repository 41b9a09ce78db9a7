# make train   installs everything into .venv and trains
# make test    installs everything into .venv and runs the tests
# PYTHON is the interpreter that makes .venv: Python 3.11 or newer. EXTRAS=[tensorboard] installs that too.

PYTHON ?= python3

train: .venv/installed
	.venv/bin/python step01_single_gpu/train.py

test: .venv/installed
	.venv/bin/python -m pytest

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable ".$(EXTRAS)"
	touch $@

.PHONY: train test

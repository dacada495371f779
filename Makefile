# make demo     real weights: plan, convert, verify; the same quantised to FP8, carried and dequantised
# make fp8      every FP8 conversion of the demo's weights, and its error against the bfloat16 weights
# make test     lint, then the whole test suite
# make bench    convert against cp (and MaxText); GB=8 for a larger checkpoint, WRITE=--write to keep the figures
# make lock     refresh requirements/lock.txt

PYTHON ?= python3
GB ?= 2
WRITE ?=
# Tests wait for processes and servers as much as they compute: three at a time on two cores, each file in one place.
PYTEST_ARGS ?= -n 3 --dist loadfile
LOCK_PYTHONS ?= python3.11 python3.12 python3.13

BIN := .venv/bin
LOCKED := .venv/.locked
STAMP := .venv/.ready
PLAIN := .bench/plain/.ready
TYPING := build/typing
WEIGHTS := .demo/SmolLM2-135M-Instruct
CONVERTED := .demo/SmolLM2-135M-Instruct-maxtext
FP8 := .demo/SmolLM2-135M-Instruct-fp8

.PHONY: venv demo fp8 test lint format bench lock clean

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
	$(BIN)/python -m demo.quantise $(WEIGHTS) $(FP8)-block --scheme block
	$(call fp8,block,source)
	@$(BIN)/python -m demo.fp8_error $(CONVERTED) 'FP8 in blocks of 128x128, carried=$(FP8)-block-source'
	@echo
	@echo "Hugging Face checkpoint: $(abspath $(WEIGHTS))"
	@echo "MaxText checkpoint:      $(abspath $(CONVERTED))/0/items"

# One FP8 conversion: quantised with scheme $(1), written with --dtype $(2).
define fp8
	$(BIN)/tensorferry convert --source $(FP8)-$(1) --output $(FP8)-$(1)-$(2) --dtype $(2) --overwrite
	$(BIN)/tensorferry verify --source $(FP8)-$(1) --output $(FP8)-$(1)-$(2)
endef

fp8: $(STAMP)
	$(BIN)/python -m demo.smollm2
	$(BIN)/tensorferry convert --source $(WEIGHTS) --output $(CONVERTED) --overwrite
	$(BIN)/python -m demo.quantise $(WEIGHTS) $(FP8)-tensor --scheme tensor
	$(BIN)/python -m demo.quantise $(WEIGHTS) $(FP8)-block --scheme block
	$(call fp8,tensor,bfloat16)
	$(call fp8,tensor,source)
	$(call fp8,block,bfloat16)
	$(call fp8,block,source)
	@echo
	@$(BIN)/python -m demo.fp8_error $(CONVERTED) \
	  'one scale per tensor, dequantised to bfloat16=$(FP8)-tensor-bfloat16' \
	  'one scale per tensor, carried=$(FP8)-tensor-source' \
	  'blocks of 128x128, dequantised to bfloat16=$(FP8)-block-bfloat16' \
	  'blocks of 128x128, carried=$(FP8)-block-source'

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# pyright runs no import hook, so it sees the folders under the names that an installation gives them.
	@rm -rf $(TYPING) && mkdir -p $(TYPING) && cp -rs $(CURDIR)/tensorferry $(TYPING)
	@for name in mappings pipelines transforms; do cp -rs $(CURDIR)/$$name $(TYPING)/tensorferry/$$name; done
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

# What `pip install .` gives, without the extras of tests and clouds: Beam alone starts half a second faster then.
$(PLAIN): $(STAMP)
	rm -rf .bench/plain
	$(PYTHON) -m venv .bench/plain
	.bench/plain/bin/pip install --quiet --disable-pip-version-check --constraint requirements/lock.txt --editable .
	touch $(PLAIN)

bench: $(PLAIN)
	$(BIN)/python -m benchmarks.convert --gigabytes $(GB) $(WRITE) \
	  --command '$(abspath .bench/plain/bin/tensorferry) convert --source {source} --output {output}'

lock:
	$(PYTHON) requirements/lock.py $(LOCK_PYTHONS)

clean:
	rm -rf .venv .demo .bench

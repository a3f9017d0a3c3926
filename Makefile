# Set-up and the two things a newcomer does: `make demo`, `make test`. Nothing need be installed
# but Python 3.11 or newer; everything goes into $(VENV) and the user's cache.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test lint setup model reproduce-pasta reproduce-tip reproduce-planned clean

demo: model
	$(BIN)/stretto run "What are the benefits of regular exercise?" --compare

test: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

model: setup
	$(BIN)/stretto model pull

# DATA: a folder with instruct/*.jsonl, and in eval/ vicuna_80_prompts, alpaca_eval_400 and
# alpaca_eval_400_gpt4_1106_preview (JSONL). Stages that are kept in benchmarks/results/pasta are
# not run again. QUICK=1: in miniature; FULL=1: the whole grid.
reproduce-pasta: model
	$(BIN)/python benchmarks/pasta/reproduce.py --data "$(DATA)" --work build/pasta $(if $(QUICK),--quick) $(if $(FULL),--full)

# Needs no data. Stages that are kept in benchmarks/results/tip are not run again.
reproduce-tip: model
	$(BIN)/python benchmarks/tip/reproduce.py --work build/tip $(if $(QUICK),--quick) $(if $(FULL),--full)

# Needs no data and no model. Stages that are kept in benchmarks/results/planned are not run again.
reproduce-planned: setup
	$(BIN)/python benchmarks/planned/reproduce.py --work build/planned $(if $(QUICK),--quick) $(if $(FULL),--full)

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): PyTorch and more, some minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build src/stretto/kernels/_*.so

# Every target works on a fresh clone: it makes .venv and installs what it needs. PYTHON chooses the interpreter.
PYTHON ?= python3
# Test files that run beside one another; more than cores, since tests wait for processes to start.
TEST_WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test install lint bench clean

quickstart: export DS_ACCELERATOR = cpu  # two ranks and the same losses on every machine
quickstart: $(INSTALLED)  ## real text to a Hugging Face checkpoint, through every component
	$(BIN)/data-pipeline build configs/corpora/quickstart.yaml
	$(BIN)/data-pipeline verify corpora/quickstart
	$(BIN)/data-pipeline show corpora/quickstart -n 1
	$(BIN)/launch local configs/runs/quickstart.yaml --ranks 2 --stop-at-step 500 || test $$? -eq 75
	$(BIN)/launch local configs/runs/quickstart.yaml --ranks 2
	$(BIN)/pretrain generate runs/quickstart --corpus corpora/quickstart -n 3
	test -e exports/quickstart || $(BIN)/pretrain export runs/quickstart exports/quickstart
	$(BIN)/pretrain dashboard runs/quickstart --print

test: $(INSTALLED)  ## the test suite: the real pipeline and real ranks on the shipped text
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

install: $(INSTALLED)  ## .venv with everything, at the tested versions

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## speed against peers, in less than 20 minutes on two quiet cores; writes docs/performance.md
	$(BIN)/python benchmarks/performance.py

clean:  ## everything that was made here
	rm -rf $(VENV) corpora runs exports build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

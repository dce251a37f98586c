# Every target works on a fresh clone: it makes .venv and installs what it needs. PYTHON chooses the interpreter.
PYTHON ?= python3
# Test files that run beside one another. Many tests wait for processes, so two cores have work for three.
TEST_WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test test-all timing results prove faults soak fuzz kills mutation install lint docs bench gpu gpu-wheels clean

# two ranks, also beside a GPU. CPUs with the same vector instructions give the same losses; others differ in the last
# digits (docs/explanation/determinism.md)
quickstart: export DS_ACCELERATOR = cpu
quickstart: $(INSTALLED)  ## real text to a Hugging Face checkpoint, through every component
	$(BIN)/data-pipeline build configs/corpora/quickstart.yaml
	$(BIN)/data-pipeline verify corpora/quickstart
	$(BIN)/data-pipeline show corpora/quickstart -n 1
	$(BIN)/launch local configs/runs/quickstart.yaml --ranks 2 --stop-at-step 200 || test $$? -eq 75
	$(BIN)/launch local configs/runs/quickstart.yaml --ranks 2
	test -e exports/quickstart || $(BIN)/pretrain export runs/quickstart exports/quickstart
	$(BIN)/data-pipeline build configs/corpora/reversal.yaml
	$(BIN)/launch local configs/runs/reversal.yaml --ranks 2
	$(BIN)/pretrain generate runs/quickstart --corpus corpora/quickstart -n 8 --likeliest 5
	$(BIN)/pretrain generate runs/reversal "reverse: a b c d" "reverse: p a g e n o" "reverse: k i n d l e d"
	$(BIN)/pretrain picture runs/quickstart
	@echo "Curves, samples and pictures: $(BIN)/pretrain dashboard runs/quickstart"

unexport PYTHONDONTWRITEBYTECODE # else pytest compiles every test again in each worker
WORKERS := --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5
test: $(INSTALLED)  ## every part, with the real pipeline and real ranks on the shipped text
	$(BIN)/python .ci/pytest test $(if $(SLOW),90,40) $(WORKERS) -m "$(if $(SLOW),,not slow and )not timing and not soak"

test-all: SLOW = 1
test-all: test  ## and what takes longer: families trained and compiled, lost nodes, builds and runs under kills

timing: $(INSTALLED)  ## what asks how fast the machine is, and how full: for a quiet one, never in CI
	$(BIN)/python -m pytest -m timing

results: $(INSTALLED)  ## are the tables of docs/results what the data beside them say? seconds
	$(BIN)/python -m checks.results

# SEED, AT and TEXT choose the seed, the step after which runs are killed, and a text of your own.
prove: $(INSTALLED)  ## twelve claims, tried here with a seed and kills drawn anew: two and a half minutes on two quiet cores
	$(BIN)/python -m checks.prove $(if $(SEED),--seed $(SEED)) $(if $(AT),--at $(AT)) $(if $(TEXT),--text "$(TEXT)")

# The rest of checks/ gates no change: it takes hours, or draws what happens.
CELLS ?= 200
faults: $(INSTALLED)  ## CELLS faults of runs, drawn, against the undisturbed run, then 30 of builds: hours
	$(BIN)/python -m checks.faults --cells $(CELLS)
	$(BIN)/python -m checks.faults --builds --cells 30

MINUTES ?= 20
soak: $(INSTALLED)  ## the longest tests; training and builds, killed at random for MINUTES each of three
	$(BIN)/python -m pytest --numprocesses 1 -m soak
	$(BIN)/python -m checks.soak.training same --minutes $(MINUTES)
	$(BIN)/python -m checks.soak.training change --minutes $(MINUTES)
	$(BIN)/python -m checks.soak.build --minutes $(MINUTES)

CASES ?= 100000
fuzz: $(INSTALLED)  ## CASES damaged files for the readers and the cleaner: half an hour on two cores
	$(BIN)/python -m checks.fuzz --cases $(CASES)

KILLS ?= 20
kills: $(INSTALLED)  ## this project and others, each killed KILLS times with each of three seeds: hours; writes docs/results
	PYTHONPATH=benchmarks $(BIN)/python -m kills.driver --kills $(KILLS) --write docs/results/kills
	$(BIN)/python -m docs.pictures.kills
	$(BIN)/python -m checks.results --write

EACH ?= 46
MUTATION := build/mutation/installed
mutation: $(INSTALLED)  ## EACH changes in each of 11 subjects: does a test see them? an hour; writes docs/results/mutation
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(MUTATION) --requirement checks/mutation/requirements.txt
	PYTHONPATH="$(CURDIR)/$(MUTATION)" $(BIN)/python -m checks.mutation run --each $(EACH)
	PYTHONPATH="$(CURDIR)/$(MUTATION)" $(BIN)/python -m checks.mutation report
	$(BIN)/python -m checks.results --write

# A fifth of what would be compiled. Python compiles by itself what is imported after all.
NOT_IMPORTED := punkt/data|databricks|mypyc?|ray/(llm|rllib|train|tune)|torch/testing|debugpy/_vendored|sympy/physics
install: $(INSTALLED)  ## .venv with everything, at the tested versions

$(INSTALLED): pyproject.toml constraints.txt \
		examples/double_decoder/pyproject.toml \
		examples/diagnostics/pyproject.toml \
		examples/alerts/pyproject.toml \
		examples/fault_hunting/pyproject.toml \
		examples/distillation/pyproject.toml \
		examples/pii/pyproject.toml \
		examples/lion/pyproject.toml \
		examples/molecules/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13)' 2> /dev/null || \
		{ echo "PYTHON=$(PYTHON): expected Python 3.11 or 3.12, as in: make install PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement constraints.txt # all at once: pip need not search
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation --constraint constraints.txt \
		--editable ".[dev]" \
		--editable examples/double_decoder \
		--editable examples/diagnostics \
		--editable examples/alerts \
		--editable examples/fault_hunting \
		--editable examples/distillation \
		--editable examples/pii \
		--editable examples/lion \
		--editable examples/molecules
	# on all cores, pip takes one; without what nobody imports; some files are for other Pythons
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|transformers/models|$(NOT_IMPORTED))/' $(VENV)/lib || true
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)  ## the documentation as a site in build/docs, without a broken link
	$(BIN)/mkdocs build --strict
	@echo "Read it: $(BIN)/mkdocs serve, or any web server on build/docs"

bench: $(INSTALLED)  ## speed against peers, in less than 20 minutes on two quiet cores; writes docs/results/performance.md
	$(BIN)/python benchmarks/performance.py

# `make gpu` installs nothing: it runs with PYTHON as it is, which needs torch, triton and transformers, and with the
# wheels of `make gpu-wheels`, if they were carried here. Nothing is fetched and nothing of DeepSpeed is compiled.
CALL ?= 1
OUT ?= build/gpu-$(if $(ONLY),some,$(CALL))$(DEVICE:%=-%).jsonl
WHEELS := build/gpu-wheels
gpu:  ## on a GPU, speed and faults; CALL=2 a run, CALL=3 results; DEVICE=cpu runs them small, ONLY="…" some of them
	test ! -d $(WHEELS) || $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl
	PYTHONPATH="$(CURDIR)/build/gpu:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m checks.gpu --out $(OUT) \
		$(if $(ONLY),,--call $(CALL)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(DEVICE),--device $(DEVICE)) $(if $(ONLY),--only $(ONLY))

# For a machine without network, of x86-64 and with Python GPU_PYTHON. HAVE: names that it has already.
GPU_PYTHON ?= 3.12
gpu-wheels:  ## wheels to carry to such a machine, in build/gpu-wheels
	mkdir -p $(WHEELS)
	grep --invert-match --line-regexp --fixed-strings --regexp=deepspeed --regexp=hjson $(HAVE:%=--regexp=%) \
		checks/gpu/requirements.txt > $(WHEELS)/requirements.txt
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
		--dest $(WHEELS) --constraint constraints.txt --requirement $(WHEELS)/requirements.txt
	DS_BUILD_OPS=0 $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) --constraint constraints.txt deepspeed hjson

clean:  ## what make made, but for corpora, runs and exports, which may be your own
	rm -rf $(VENV) build dist *.egg-info examples/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

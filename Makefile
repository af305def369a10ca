# Two commands do everything on a fresh machine: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: on a busy two-core machine two threads can be fifteen times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test promises test-torch test-cuda test-slurm check format slow soak integrations environments docs clean

demo: .venv/installed        ## train four ways on the embedded digits: a table and a picture, a few minutes
	$(BIN)/python examples/demo.py

test: check                  ## format, lint, types, then the tests: a few cases of each promise, and nothing slow
	$(BIN)/$(PYTEST)

# The options of every run of the whole suite.
PYTEST := pytest -n 2 --dist worksteal
promises: .venv/installed    ## every case of every promise: each method stopped at each step, in each layout (half an hour)
	$(BIN)/$(PYTEST) -m 'not slow' tests/contracts tests/ranks tests/study/test_committed.py

# Another release of PyTorch, in an environment of its own (PyPI's wheels bring CUDA libraries of several GB).
TORCH ?= 2.15.0
test-torch: .venv-torch-$(TORCH)/installed   ## the tests of make test, with another PyTorch: make test-torch TORCH=2.15.0
	.venv-torch-$(TORCH)/bin/$(PYTEST)

test-cuda: .venv/installed   ## on a node with GPUs: NCCL, hidden waits, determinism, layouts
	$(BIN)/pytest tests/cuda -rs

test-slurm: .venv/installed  ## with slurm-wlm and munge: examples/slurm.sbatch on two nodes, preempted and requeued
	$(BIN)/pytest -m slow tests/trainer/test_slurm.py -rs

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slow: .venv/installed .venv-integrations/installed   ## the tests that take minutes
	$(BIN)/pytest -m slow
	.venv-integrations/bin/pytest -m slow tests/integrations

integrations: .venv-integrations/installed   ## the method within Lightning, Accelerate, timm and others
	.venv-integrations/bin/pytest -n 2 --dist loadfile tests/integrations

environments: .venv/installed .venv-integrations/installed   ## both, at the same time with make -j 2

docs: .venv-docs/installed    ## the documentation site, in site/; look at it with: python -m http.server -d site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# `make soak HOURS=3` for a night.
HOURS ?= 1/6
soak: .venv/installed        ## disturb runs for ten minutes (kills, signals, disks, messages): all must end as if undisturbed
	$(BIN)/python tools/faults/soak.py --minutes $$(awk "BEGIN {print 60 * $(HOURS)}")

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv-torch-$(TORCH)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check -c .venv-torch-$(TORCH)/constraints.txt -e '.[dev]'
	touch $@

.venv-integrations/installed: pyproject.toml constraints-integrations.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/pip install --quiet --disable-pip-version-check -c constraints-integrations.txt -e '.[dev,integrations]'
	touch $@

.venv-docs/installed: constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-integrations .venv-docs site

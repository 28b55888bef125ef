# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# `make test TORCH=2.11.0`: with another version of torch than constraints.txt, in an environment of its own;
# `TORCH=newest`: the newest that mezzo was tested with. `PYTHON=/usr/bin/python3.13`: with another Python, in one, too.
TORCH ?=
NEWEST := $(shell sed -n 's/^NEWEST_TESTED.*"\(.*\)"/\1/p' src/mezzo/releases.py)
RELEASE := $(TORCH:newest=$(NEWEST))
VENV := .venv$(RELEASE:%=-torch-%)$(patsubst %,-%,$(filter python3.%,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
VERSIONS := $(VENV)/constraints.txt
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint $(VERSIONS) --editable
# pip would compile these files one by one; as with pip, one that does not compile is left as it is.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# The processes that tests start read compiled files, in a shell that keeps Python from writing them too.
TESTING := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
# One environment, filled in steps: what the demo needs, what the site needs, and the rest, which tests and checks need.
DEMO := $(VENV)/.demo
DOCS := $(VENV)/.docs
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all faults check lint format docs dist suite bench gpu clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(VERSIONS): constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(RELEASE),s/^torch==.*/torch==$(RELEASE)/; /^triton==/d)' constraints.txt > $(VERSIONS)

$(DEMO): pyproject.toml $(VERSIONS)
	$(INSTALL) '.[demo]'
	$(COMPILE)
	touch $(DEMO)

$(DOCS): pyproject.toml $(VERSIONS)
	$(INSTALL) '.[docs]'
	$(COMPILE)
	touch $(DOCS)

$(READY): pyproject.toml $(VERSIONS)
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $(DEMO) $(DOCS) $(READY)

demo: $(DEMO)  ## train a real model in FP32 and in mixed precision, side by side
	OMP_NUM_THREADS=1 $(BIN)/mezzo compare --seeds 5 --margin 1.0 --policies O2,bf16 --out runs/demo --overwrite \
		examples/families/digits_cnn.py --steps 150

test: $(READY)  ## run every test that needs neither GPU nor minutes
	$(TESTING) $(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-all: $(READY)  ## run every test that needs no GPU, those that take minutes too
	$(TESTING) $(BIN)/pytest -n 2 --dist worksteal

faults: $(READY)  ## plant each fault of tests/faults in a copy of the source; tests are to catch all
	$(TESTING) $(BIN)/python -m tests.faults.plant $(FAULTS)

lint: $(READY)  ## format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py

check: lint test  ## what CI runs on the pinned torch: lint, types, import contract, tests, docs snippets

format: $(READY)  ## rewrite the code as ruff wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS)  ## build the documentation as a site, in docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "open docs/_build/html/index.html"

dist: $(READY)  ## build the wheel and the source distribution, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

bench: $(DEMO)  ## print ratios against torch.amp on this machine
	$(BIN)/python benchmarks/session.py
	$(BIN)/python benchmarks/small.py
	$(BIN)/python benchmarks/scaler.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/recorder.py
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/torchrun --nproc-per-node 2 benchmarks/distributed.py

suite: $(READY)  ## the six families under every policy, three seeds each; an hour, and again until nothing is missing
	PYTHONPATH=benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m suite $(SUITE)

# With this environment's Python, or where there is none, as on a machine where nothing can be installed, with any.
gpu:  ## measure what only a GPU can tell, and hold it against the goals; again after an interruption it goes on
	PYTHONPATH=src:benchmarks $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m gpu $(if $(OUT),--out $(OUT)) $(GPU)

clean:  ## remove the environment and results
	rm -rf .venv .venv-* runs dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis

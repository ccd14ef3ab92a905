# Needs python3 (3.10 or newer) with venv, and make. Everything else is installed into .venv.
PYTHON ?= python3
# The newest torch that is supported; without a pin, pip may take one with gigabytes of CUDA.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Containers often set it; then each interpreter that a test starts compiles Lockstep again.
export PYTHONDONTWRITEBYTECODE :=
# Of what is installed, most is never imported. What most processes import is compiled afterwards,
# on all cores, with Lockstep itself; else each of the first processes would compile it.
COMPILED := torch numpy pydantic rich typer hypothesis _pytest
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: venv train test test-docs test-fuzz test-campaigns test-slow test-slurm test-slurm-slow lint types docs docs-tables docs-pictures docs-run docs-screens bench clean

venv: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable ".[recipes,tensorboard,dev]"
	$(BIN)/python -m compileall -q -j 0 -x '/(tests|testing|_inductor)/' src \
		$(COMPILED:%=.venv/lib/python3.*/site-packages/%) >/dev/null || true
	touch $@

train: venv
	$(BIN)/lockstep train digits -n 2

# Three at once on two cores, for tests of ranks often wait; at most two that start ranks.
test: venv
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow and not slurm and not docs" \
		--durations=25

# What pages and examples show, as a reader would type it.
test-docs: venv
	$(BIN)/python -m pytest -n 2 -m "docs and not slow" --durations=5 tests

# Bad inputs for everything that reads; SEED=123 does a run again.
test-fuzz: venv
	$(BIN)/python -m tests.fuzz $(if $(SEED),--seed $(SEED))

# Random kills, bad surroundings and faults on hosts; SEED=123 does the same again.
test-campaigns: venv
	$(BIN)/python -m tests.campaigns.kills $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.campaigns.surroundings $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.campaigns.hosts $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.campaigns.clusters slurm --etcd $(if $(SEED),--seed $(SEED))

test-slow: venv
	$(BIN)/python -m pytest -m "slow and not slurm"

test-slurm: venv
	$(BIN)/python -m pytest -m "slurm and not slow" tests/slurm

test-slurm-slow: venv
	$(BIN)/python -m pytest -m "slurm and slow" tests/slurm tests/campaigns

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src docs examples benchmarks README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m tests.house

# Of Lockstep, and of what callers write: examples, pages of the documentation, the public API.
types: venv
	$(BIN)/mypy
	$(BIN)/python -m tests.typing

# The documentation site: open site/index.html. A broken link or reference is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Tables of keys and the page of commands, from the code; figures, from docs/benchmarks/*.json.
docs-tables: venv
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/commands.py

# The pictures of docs/architecture.md, from the import graph and the page's own listings.
docs-pictures: venv
	$(BIN)/python docs/pictures.py

# The picture of README.md: a run that loses a rank, trained for it.
docs-run: venv
	$(BIN)/python docs/run_picture.py

# Pictures of the monitor's page, by the system's Chromium.
docs-screens: venv
	$(BIN)/python docs/monitor_pictures.py

bench: venv
	$(INSTALL) --editable ".[recipes,ufs,bench]"
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/ufs.py

clean:
	rm -rf .venv build dist site src/*.egg-info

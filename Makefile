# Environments, made on demand: .venv has the torch that Composer needs, .venv-latest the newest of everything,
# .venv-oldest the oldest that is supported, and .venv-trackers the trackers: where one is installed, frameworks report to
# it. A small one is for the demo.
PYTHON ?= python3
FIND_LINKS := $(foreach place,$(PIP_FIND_LINKS),--find-links $(place))
UV_FLAGS := $(FIND_LINKS)
# Where Python may write no bytecode, each rank of each test compiles all that it imports: a fifth of their time.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_FLAGS ?=
# Processes that run the integration tests beside one another: one for each of two cores. With 3, they end a little sooner,
# and now and then a rank waits so long for a core that what it should hear comes after its end.
WORKERS ?= 2
COVERAGE_FLOOR := 93
# Those of the classifiers. uv fetches what the machine has not; pyenv's need PYENV_VERSION=3.11.7:3.10.13:… around make.
PYTHONS ?= $(shell sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
BENCH_FLAGS ?=
EXTRAS_FLAGS ?=
FAULTS_FLAGS ?=
KILLED_FLAGS ?=
REPORTS_FLAGS ?=
RESUMES_FLAGS ?=
SHIPPED_FLAGS ?=
SOAK_FLAGS ?=
LOAD_FLAGS ?=
PROMISES_FLAGS ?=
ZOO_FLAGS ?=

EXTRAS_.venv := cli,composer,lightning,accelerate,transformers,perfetto,notify,demo
EXTRAS_.venv-latest := all,demo
# Without Composer, of which only the newest is tried: for torch 2.4, it refuses torch's SGD.
EXTRAS_.venv-oldest := all,demo
EXTRAS_.venv-trackers := torch
GROUP_.venv := dev
GROUP_.venv-latest := dev
GROUP_.venv-oldest := tests
GROUP_.venv-trackers := trackers
CONSTRAINTS_.venv := constraints/torch-2.7.txt
CONSTRAINTS_.venv-latest := constraints/latest.txt
CONSTRAINTS_.venv-oldest := constraints/oldest.txt
CONSTRAINTS_.venv-trackers := constraints/trackers.txt
RESOLUTION_.venv-oldest := --resolution lowest-direct

comma := ,
extras = $(patsubst %,--extra %,$(subst $(comma), ,$(EXTRAS_$(1))))

.DEFAULT_GOAL := help
.PHONY: help demo unit unit-latest test test-gpu test-gpu-latest test-latest test-oldest test-all integration integration-latest nightly nightly-latest coverage \
	test-under-load test-composer-classic test-torchtitan test-trackers wheels wheels-extras sbom test-newest bench faults hosts killed reports resumes zoo shipped soak promises docs lint lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv-demo/.installed ## a job with uneven ranks: without countoff, then with it, then fixed, then with uneven_train="stop"
	@.venv-demo/bin/countoff demo

unit: .venv/.installed ## tests of one process, with the examples in docstrings; no ranks, a few minutes
	$(call unit,.venv)

unit-latest: .venv-latest/.installed ## the same on the newest torch
	$(call unit,.venv-latest)

test: unit integration ## what guards a merge: unit, then the integration tests with real ranks, on torch 2.7

test-latest: unit-latest integration-latest ## the same on the newest torch and frameworks

test-oldest: .venv-oldest/.installed ## unit tests, and healthy and uneven jobs of each framework, on the oldest versions that pyproject.toml allows
	$(call unit,.venv-oldest)
	$(call real,.venv-oldest,$(OLDEST))

test-newest: lock ## `make test-latest nightly-latest` on what is newest today, which constraints/ then has
	$(MAKE) test-latest nightly-latest

test-under-load: .venv/.installed ## `make test` ten times while every core is busy; LOAD_FLAGS="--runs 3 -- make unit"
	.venv/bin/python -m integration_tests.under_load $(LOAD_FLAGS)

test-all: coverage ## test and nightly, with branch coverage and its floor

integration: .venv/.installed .venv-trackers/.installed ## real ranks and frameworks, trackers, and unit tests that must run alone
	$(call alone,.venv)
	$(call real,.venv,integration_tests)
	$(call trackers)

integration-latest: .venv-latest/.installed ## the same on the newest torch and frameworks
	$(call alone,.venv-latest)
	$(call real,.venv-latest,integration_tests)

nightly: .venv/.installed ## the slow rest (marker `nightly`): all frameworks, more ranks, twenty times as many examples
	$(call nightly,.venv)

nightly-latest: .venv-latest/.installed ## the same on the newest torch and frameworks
	$(call nightly,.venv-latest)

# One test at a time: each takes GPUs from the first on, and how soon its ranks end must not depend on another test's.
test-gpu: .venv/.installed ## the tests that need GPUs, with 2, 4 and 8 ranks, which share one where there are fewer; prints a table to report
	$(call gpu,.venv)

test-gpu-latest: .venv-latest/.installed ## the same on the newest torch, for GPUs that are newer than torch 2.7
	$(call gpu,.venv-latest)

# Branch coverage takes three times the CPU time, so only this target measures it. The floor stands here, not in
# pyproject.toml: there it would fail a run with --cov of a part of the tests.
coverage: .venv/.installed ## all tests under branch coverage, in every rank too
	rm -f .coverage .coverage.*
	$(call unit,.venv,--cov --cov-report=)
	$(call alone,.venv,--cov --cov-append --cov-report=)
	$(call real,.venv,integration_tests,--cov --cov-append --cov-report=)
	$(call nightly,.venv,--cov --cov-append --cov-report=)
	.venv/bin/coverage report --fail-under=$(COVERAGE_FLOOR)

test-composer-classic: .venv/.installed ## Composer 0.23.3, whose loop hangs where ranks are uneven
	.venv/bin/uv pip install --quiet --target .venv-composer-classic --no-deps mosaicml==0.23.3
	PYTHONPATH=.venv-composer-classic .venv/bin/python -m pytest integration_tests/test_composer_classic.py $(PYTEST_FLAGS)

test-torchtitan: ## TorchTitan's own trainer on two CPU ranks, in an environment of its own
	test -x .venv-torchtitan/bin/uv || \
		{ $(PYTHON) -m venv .venv-torchtitan && .venv-torchtitan/bin/python -m pip install --quiet uv; }
	.venv-torchtitan/bin/uv pip install --quiet --python .venv-torchtitan/bin/python $(UV_FLAGS) \
		torchtitan==0.3.0 torch==2.13.0 triton pytest --editable '.[cli]'
	.venv-torchtitan/bin/python -m pytest integration_tests/test_torchtitan.py $(PYTEST_FLAGS)

test-trackers: .venv/.installed .venv-trackers/.installed ## W&B, MLflow and TensorBoard, offline: the recipes of docs/alerts.md, and the totals in their files
	$(call trackers)

bench: .venv/.installed ## what countoff costs, how soon it knows, how both grow; BENCH_FLAGS="--only scale --quick"
	.venv/bin/python -m benchmarks $(BENCH_FLAGS)

faults: .venv/.installed ## every fault in every framework, as a table; FAULTS_FLAGS="--only F1 --ranks 2 4 8"
	.venv/bin/python -m integration_tests.faults $(FAULTS_FLAGS)

hosts: .venv/.installed ## what survivors say where ranks, hosts and links are lost, as a table; HOSTS_FLAGS="--only power"
	.venv/bin/python -m integration_tests.hosts_table $(HOSTS_FLAGS)

killed: .venv/.installed ## who is named where a rank of a real torchrun job is killed, as a table; KILLED_FLAGS="--ranks 2 4 8 --repeat 20"
	.venv/bin/python -m integration_tests.killed_table $(KILLED_FLAGS)

reports: .venv/.installed ## public reports of data that is read wrongly, as programs, wrong and right, as a table; REPORTS_FLAGS="--only verl_7401"
	.venv/bin/python -m integration_tests.reports $(REPORTS_FLAGS)

resumes: .venv/.installed ## seeded runs that stop anywhere and resume, half of them wrongly, as a table; RESUMES_FLAGS="--runs 20 --kinds torch"
	.venv/bin/python -m integration_tests.once_resumes $(RESUMES_FLAGS)

zoo: .venv/.installed ## odd, legal, healthy programs, in which countoff must not say a word; ZOO_FLAGS="--only threads"
	.venv/bin/python -m integration_tests.zoo $(ZOO_FLAGS)

shipped: .venv-shipped ## programs of other projects, unchanged, as a table; SHIPPED_FLAGS="--lightning CHECKOUT"
	PYTHONPATH=.venv-shipped .venv/bin/python -m integration_tests.shipped $(SHIPPED_FLAGS)

soak: .venv/.installed ## an hour of random healthy jobs, in which countoff must not say a word; SOAK_FLAGS="--runs 20"
	.venv/bin/python -m integration_tests.soak $(SOAK_FLAGS)

promises: .venv-shipped ## what is promised, with its figures: runs these tables and writes docs/promises.md; hours; PROMISES_FLAGS="--only pairs killed"
	PYTHONPATH=.venv-shipped .venv/bin/python -m integration_tests.promises $(PROMISES_FLAGS)

# transformers' examples import a package that nothing else needs. What it needs, .venv has.
.venv-shipped: .venv/.installed
	.venv/bin/uv pip install --quiet --target .venv-shipped --no-deps evaluate==0.4.6

docs: .venv-docs/.installed ## the documentation as a site, in docs/_build/html; warnings are errors
	.venv-docs/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html

wheels: .venv-wheels/.installed ## what a release uploads, in dist/: built twice to the same bytes, checked, and installed on each Python without a framework
	rm -rf dist build/wheels
	.venv-wheels/bin/uv build --quiet --out-dir dist
	.venv-wheels/bin/uv build --quiet --out-dir build/wheels/again
	cd dist && for file in *; do cmp $$file ../build/wheels/again/$$file || exit; done && sha256sum *
	.venv-wheels/bin/twine check --strict dist/*
	@for python in $(PYTHONS); do $(call install_in,build/wheels/$$python) || exit; done

wheels-extras: wheels ## that wheel with each of its extras alone, as a table; EXTRAS_FLAGS="--pythons 3.10 3.13 --only torch cli"
	.venv-wheels/bin/python -m tests.wheel_extras $(EXTRAS_FLAGS)

sbom: wheels ## what the wheel needs and is tried with, as CycloneDX: build/countoff.cdx.json
	rm build/wheels/$(lastword $(PYTHONS))/lib/python*/site-packages/countoff-*.dist-info/direct_url.json # a path here
	.venv-wheels/bin/cyclonedx-py environment --output-reproducible --output-file build/countoff.cdx.json \
		build/wheels/$(lastword $(PYTHONS))/bin/python

lint: .venv/.installed ## ruff, its formatter, pyright
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

lock: .venv/.installed ## compile constraints/*.in again
	$(call compile,.venv,constraints/torch-2.7.in)
	$(call compile,.venv-latest,constraints/latest.in)
	$(call compile,.venv-oldest,constraints/oldest.in)
	$(call compile,.venv-trackers,constraints/trackers.in)

clean: ## remove the environments, caches and build products
	rm -rf .venv .venv-demo .venv-latest .venv-oldest .venv-composer-classic .venv-docs .venv-shipped .venv-torchtitan .venv-tracked .venv-trackers .venv-wheels build docs/_build dist .coverage .coverage.* .hypothesis .pytest_cache .ruff_cache lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

pytest = $(1)/bin/python -m pytest
unit = $(call pytest,$(1)) core tests -m "not nightly and not alone" -n 2 --dist worksteal $(2) $(PYTEST_FLAGS)
gpu = $(call pytest,$(1)) integration_tests -m gpu -p integration_tests.gpu_report $(PYTEST_FLAGS)
# Unit tests that wait for torch's own time-outs. They wait more than they compute, so they wait beside one another.
alone = $(call pytest,$(1)) tests/core/session/threads -m "alone and not nightly" -n 6 --dist worksteal $(2) $(PYTEST_FLAGS) || [ $$? = 5 ]
# Where all is well, and where a rank is short.
OLDEST := $(foreach name,torch lightning_healthy lightning_uneven lightning_fabric accelerate_healthy accelerate_uneven \
	transformers,integration_tests/test_$(name).py)
# Without the tests that need GPUs, also where there are some: the workers would share them. `make test-gpu` runs those.
# Tests whose times a busy machine changes come last, one by one. 5: pytest was asked for tests of which none is alone.
define real
$(call pytest,$(1)) $(2) -m "not nightly and not gpu and not alone" -n $(WORKERS) --dist worksteal $(3) $(PYTEST_FLAGS)
$(call pytest,$(1)) $(2) -m "alone and not nightly and not gpu" $(3) $(PYTEST_FLAGS) || [ $$? = 5 ]
endef
define nightly
$(call pytest,$(1)) tests integration_tests -m "nightly and not gpu and not alone" -n $(WORKERS) --dist worksteal $(2) $(PYTEST_FLAGS)
$(call pytest,$(1)) tests integration_tests -m "nightly and alone and not gpu" $(2) $(PYTEST_FLAGS)
COUNTOFF_TEST_EXAMPLES=20 $(call pytest,$(1)) tests/core/protocol -n $(WORKERS) $(2) $(PYTEST_FLAGS)
endef
# Frameworks' own loggers write with trackers that are on the path of that run alone. What these need else, .venv has.
define trackers
$(call pytest,.venv-trackers) integration_tests/test_alert_recipes.py $(PYTEST_FLAGS)
.venv/bin/uv pip install --quiet --target .venv-tracked --no-deps $(UV_FLAGS) --constraints $(CONSTRAINTS_.venv-trackers) \
	tensorboard wandb absl-py grpcio gitpython gitdb smmap platformdirs
PYTHONPATH=.venv-tracked $(call pytest,.venv) integration_tests/test_trackers.py $(PYTEST_FLAGS)
endef

# Run outside the checkout, so that it is the installed one: first alone, then with what the command line needs.
define install_in
.venv-wheels/bin/uv venv --quiet --python $$python $(1) && \
	$(call install_wheel,$(1),) && \
	(cd $(1) && bin/python --version && bin/countoff --version && bin/python -c 'import countoff.core' && \
	bin/python -m countoff.run --help >/dev/null && bin/countoff explain 87 >/dev/null) && \
	$(call install_wheel,$(1),[cli]) && \
	(cd $(1) && bin/countoff plan --batch-size 8 --world-size 4)
endef
install_wheel = .venv-wheels/bin/uv pip install --quiet --python $(1)/bin/python $(UV_FLAGS) "$$(echo dist/*.whl)$(2)"

# Universal: one file for every Python from 3.10 on. Always from the index alone, so that no local build gets pinned.
define compile
.venv/bin/uv pip compile --quiet --universal --python-version 3.10 --upgrade $(RESOLUTION_$(1)) --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links --group $(GROUP_$(1)) $(call extras,$(1)) \
	--output-file $(CONSTRAINTS_$(1)) pyproject.toml $(2)
endef

.SECONDEXPANSION:
.venv/.installed .venv-latest/.installed .venv-oldest/.installed .venv-trackers/.installed: %/.installed: pyproject.toml $$(CONSTRAINTS_$$*)
	test -x $*/bin/uv || { $(PYTHON) -m venv $* && $*/bin/python -m pip install --quiet uv; }
	$*/bin/uv pip install --quiet --python $*/bin/python $(UV_FLAGS) \
		--constraints $(CONSTRAINTS_$*) --group $(GROUP_$*) --editable '.[$(EXTRAS_$*)]'
	touch $@

# torch for CPUs has a tenth of the size of the one with CUDA, and the demo needs no more. Where its index cannot be
# reached, or wheels are given, it is the torch that there is. No bytecode is compiled beforehand: that takes longer than
# all that the demo imports.
DEMO_INSTALL = .venv-demo/bin/uv pip install --python .venv-demo/bin/python $(FIND_LINKS) \
	--constraints $(CONSTRAINTS_.venv-latest) --editable '.[demo]'

.venv-demo/.installed: pyproject.toml $(CONSTRAINTS_.venv-latest)
	@echo "First, PyTorch and Lightning are installed into .venv-demo, once: 1.1 GB on disk. Then the demo runs for about a minute."
	@test -x .venv-demo/bin/uv || { $(PYTHON) -m venv .venv-demo && .venv-demo/bin/python -m pip install --quiet uv; }
	@$(if $(FIND_LINKS),,$(DEMO_INSTALL) --torch-backend cpu ||) $(DEMO_INSTALL)
	@touch $@

.venv-docs/.installed: pyproject.toml
	test -x .venv-docs/bin/uv || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install --quiet uv; }
	.venv-docs/bin/uv pip install --quiet --python .venv-docs/bin/python $(UV_FLAGS) --group docs --editable .
	touch $@

.venv-wheels/.installed: pyproject.toml
	test -x .venv-wheels/bin/uv || { $(PYTHON) -m venv .venv-wheels && .venv-wheels/bin/python -m pip install --quiet uv; }
	.venv-wheels/bin/uv pip install --quiet --python .venv-wheels/bin/python $(UV_FLAGS) --group release
	touch $@

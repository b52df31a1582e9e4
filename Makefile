# `make demo` and `make test` are all that a newcomer needs; each makes its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/koinon_proto/v1/*.proto)
WORKERS ?= 4
SPARKS ?= 4.0 4.1 4.3
SEEDS ?= 5000
SCHEDULES ?= 20
MINUTES ?= 60

.PHONY: help env demo test test-long test-failed soak nemesis fuzz check test-spark-matrix test-redis-py proto bench bench-peers docs compose-image compose-test compose-clean clean

help:           ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## ?/\t/'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Koinon needs Python 3.11 or newer; this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

env: $(VENV)/.installed  ## make the environment (.venv) with everything in it

demo: env       ## a local cluster, real data, processes killed, nodes added: watch it go on
	$(BIN)/python -m demo

test: env       ## the test suite
	$(BIN)/python -m pytest -n $(WORKERS) -m "not long"

test-long: env  ## what takes long: more seeds, everybody killed at every step, Spark killed
	$(BIN)/python -m pytest -n $(WORKERS) -m long

test-failed: env  ## once more, one by one, the tests that failed in the last run
	$(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none

test-spark-matrix:  ## the tests of Spark and ingest with each PySpark (SPARKS="4.0 4.1 4.3"), each in an environment of its own
	@set -e; for version in $(SPARKS); do \
		home=build/pyspark-$$version; echo "PySpark $$version ($$home)"; \
		test -x $$home/bin/python || $(PYTHON) -m venv $$home; \
		$$home/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' "pyspark==$$version.*"; \
		$$home/bin/python -m pytest -q -m "not long" $(ARGS) tests/spark tests/ingest; \
	done

test-redis-py: env  ## redis-py's own tests of clusters, strings, keys and expiry, against three nodes
	$(BIN)/python -m tests.redis_py

soak: env       ## thousands of new seeds of the simulation (SEEDS=5000)
	$(BIN)/python -m tests.simulation --count $(SEEDS) --workers $(WORKERS)

nemesis: env    ## new schedules of faults on real processes (SCHEDULES=20, FAULTS=split,kill; or KILLS=1000), as root
	$(BIN)/python -m tests.nemesis $(if $(KILLS),--kills $(KILLS),--count $(SCHEDULES)) $(if $(FAULTS),--faults $(FAULTS))

fuzz: env       ## messages of every kind at every method of a cluster, for an hour (MINUTES=60; STRANGERS=1: without a certificate)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(STRANGERS),--unauthenticated)

check: env      ## style, types, import rules, sizes and names, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.house
	$(BIN)/python proto/generate.py --check

proto: env      ## regenerate the code beside the .proto files
	$(BIN)/python proto/generate.py

bench: env      ## print the figures of this machine (python -m bench list: every scenario and its settings)
	$(BIN)/python -m bench run

bench-peers: env  ## the same work by Koinon, Redis and etcd, side by side (SET="rounds=3 rows=get,put")
	$(BIN)/python -m bench run peers $(if $(SET),--set $(SET))

docs: env       ## a site of all pages and the API, with its links checked: build/site/docs/index.html
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/site

compose-image: env  ## the image for compose/, from a registry or from Debian's packages
	$(BIN)/python -m tests.compose image $(if $(SPARK),--spark)

compose-test: env  ## the cluster in containers, cut off, killed, grown and rolled (SPARK=1: and loaded)
	$(BIN)/python -m tests.compose test $(if $(SPARK),--spark)

compose-clean: env  ## remove the images that these two have made
	$(BIN)/python -m tests.compose clean

clean:          ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

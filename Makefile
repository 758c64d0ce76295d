# Commands for users and CI. Needs GNU Make 3.81 (macOS has it) or newer and python3 >= 3.11.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE # each of the hundreds of processes of the tests would compile all modules
# Debian packages Python without `venv`. As root, install it.
DEBIAN_VENV = { test "$$(id -u)" = 0 && apt-get --version >/dev/null 2>&1 && apt-get update -qq && \
	apt-get install -y -qq python3-venv && "$(PYTHON)" -m venv --clear .venv; }
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

.PHONY: demo serve test test-acl soak check docs bench tlds lock locked clean

demo: .venv/all
	$(BIN)/scorepool demo

serve: .venv/all
	$(BIN)/scorepool serve

# Three processes, because tests wait a third of their time. Files run in their order, so that long ones are not last.
# A test that fails runs once more. One that then passes is listed as RERUN: it has a race, which is to be mended.
SUITE := $(BIN)/python -m pytest tests --numprocesses 3 --dist loadfile --no-loadscope-reorder --reruns 1

test: .venv/dev
	$(SUITE)

# The whole suite, its processes as the Redis user that docs/deploy.md describes.
test-acl: .venv/dev
	TEST_REDIS_ACL=1 $(SUITE)

soak: .venv/dev
	$(BIN)/python -m pytest tests -m soak -s

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The pages that follow from the code, which tests compare, and the site: open build/site/index.html.
docs: .venv/dev
	for name in commands sdk reference examples; do $(BIN)/python docs/generators/$$name.py || exit; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Takes 15 minutes on two idle cores. The published figures take longer: add --model 0.6b to the other commands too.
bench: .venv/dev
	$(BIN)/python -m bench.shared_prefix
	$(BIN)/python -m bench.shared_prefix --model 0.6b
	$(BIN)/python -m bench.unique_prompts
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.many_models --model wide
	$(BIN)/python -m bench.generate
	$(BIN)/python -m bench.speculation
	$(BIN)/python -m bench.sparse_prefill
	$(BIN)/python -m bench.through_queue --runs 3
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.job_queue
	$(BIN)/python -m bench.client_decoding
	$(BIN)/python -m bench.linearity --runs 3 --out build/bench
	$(BIN)/python -m bench.profile

# The names that webhooks may go to: run it before a release. The package holds the Public Suffix List of its day.
tlds: .venv/dev
	$(PIP) --upgrade --no-deps --target build/tlds publicsuffixlist
	PYTHONPATH=build/tlds $(BIN)/python -m survey.top_level_domains > build/top_level_domains.txt
	mv build/top_level_domains.txt store/

# Install what `.venv/all` does, but only files whose hashes are in deploy/requirements-all.txt.
locked:
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --require-hashes --requirement deploy/requirements-all.txt
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --editable .
	@touch .venv/all

# The hashes of every package that the image and `make locked` install, for all platforms: run it when pyproject.toml or
# constraints.txt changes. setuptools builds scorepool itself.
LOCK = echo setuptools | build/uv/bin/uv pip compile --quiet pyproject.toml - --constraint constraints.txt --universal \
	--python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock"
lock:
	"$(PYTHON)" -m venv build/uv
	build/uv/bin/pip --disable-pip-version-check --quiet install uv
	$(LOCK) --extra api --extra webhook --output-file deploy/requirements-server.txt
	$(LOCK) --extra all --output-file deploy/requirements-all.txt

clean:
	rm -rf .venv build dist *.egg-info

# One stamp file per extra: packages are installed again when pyproject.toml or constraints.txt changes.
.venv/all .venv/dev: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "scorepool needs Python 3.11 or newer: install it (python.org, brew, apt), or set PYTHON=path"; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv --clear .venv || $(DEBIAN_VENV)
	$(PIP) --editable ".[$(notdir $@)]"
	@touch $@

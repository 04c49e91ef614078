# Everything from a fresh clone. Python 3.11, git and make are needed; the rest is installed here.
# `make` lists the targets. Each step of the set-up leaves a stamp next to what it made, and is
# repeated only when its list of versions changes, so the second time needs no network.

# The Python 3.11 of the environments: `make setup PYTHON=...`, else the first of these. The
# system's is usually built with profile-guided optimization (docs/performance.md). Debian packs
# venv apart, so it may have none.
PYTHONS := $(or $(PYTHON),/usr/bin/python3.11 python3.11 python3 python)
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))
ENV := .venv
INFERENCE_ENV := .venv-inference
AGENTS_ENV := .venv-agents
VERIFIERS_ENV := .venv-verifiers
UV := $(ENV)/bin/uv
# What learner and servers compute on: cpu, or cuda for NVIDIA's GPUs (`make setup DEVICE=cuda`).
# Later targets keep the choice. `make clean` forgets it.
DEVICE := $(or $(shell cat .streamrl/.device 2>/dev/null),cpu)
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE is $(DEVICE); it can be cpu or cuda)
endif
LEARNER_READY := $(ENV)/$(if $(filter cuda,$(DEVICE)),.cuda,.installed)
INFERENCE_READY := $(INFERENCE_ENV)/$(if $(filter cuda,$(DEVICE)),.cuda,.synced)
# Tests wait for brokers and processes too: three files at a time keep two cores busy.
THREE := -n 3 --dist loadfile --no-loadscope-reorder
# Whole runs mostly wait for their servers and for each other: two at a time keep two cores busy.
# Only the files that have such tests are read for them.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
LIVE_FILES = $$(grep -rl 'mark\.live' tests --include='test_*.py')
# Debian's packages for tests: a browser, the checkers of alert rules and of the compose file, and
# Go for the env in another language.
PROGRAMS := chromium prometheus docker-compose golang-go
EXTRAS := $(addprefix --extra ,learner plot s3 broker envs dashboard gateway tensorboard wandb \
	mlflow ray docs dev)
# Lists of packages for the images: `make dist` writes what is in them.
SHIPPED := core envs learner learner-gpu inference inference-gpu
# Programs in tests/ that try to break streamrl, and measurements in bench/.
PROOFS := advise agents attacks chaos chaos-cluster clients kubernetes mutants poison ray rewards \
	slurm soak thousand-envs
BENCHES := bench-learner bench-loop bench-packing bench-scaling bench-smoke bench-weights

.PHONY: help setup setup-verifiers quickstart learn check docs test test-all dist lock clean \
	$(PROOFS) bench $(BENCHES)
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 17
	@echo
	@echo "Proofs, each python -m tests.NAME (with _ for -):"
	@echo "    $(PROOFS)"
	@echo "Measurements, each python -m bench.NAME (bench/README.md):"
	@echo "    bench $(BENCHES)"

setup: $(LEARNER_READY) $(INFERENCE_READY) .streamrl/.kafka ## what is needed; DEVICE=cuda: for GPUs
	@echo $(DEVICE) > .streamrl/.device

setup-verifiers: $(VERIFIERS_ENV)/.synced ## .venv-verifiers, for env servers: docs/env-servers.md

quickstart: setup ## the whole loop, until the policy has learned to copy digits: minutes
	@$(ENV)/bin/streamrl up --fresh deploy/runs/quickstart.yaml

learn: setup ## SmolLM2-135M-Instruct learns sums: 20 minutes on two idle cores, 8 GB
	$(ENV)/bin/python examples/smollm2.py runs/models/smollm2-135m-instruct
	@$(ENV)/bin/streamrl up --fresh deploy/runs/learn.yaml
	@$(ENV)/bin/streamrl eval learn --list

check: $(ENV)/.installed ## ruff and pyright
	$(ENV)/bin/ruff check .
	$(ENV)/bin/pyright

docs: $(ENV)/.installed ## the documentation as a site, in build/site; needs no network
	NO_MKDOCS_2_WARNING=1 $(ENV)/bin/mkdocs build --quiet --strict

test: setup .streamrl/.programs ## all tests but the slow ones
	$(ENV)/bin/python -m pytest -m "not slow and not live" $(THREE)
	$(ENV)/bin/python -m pytest -m "not slow and live" $(TWO) $(LIVE_FILES)

test-all: setup setup-verifiers $(AGENTS_ENV)/.synced .streamrl/.programs ## all tests
	$(ENV)/bin/python -m pytest -m "not live" $(THREE)
	$(ENV)/bin/python -m pytest -m live $(LIVE_FILES)

dist: $(ENV)/.installed ## wheel and source in dist/, bills of materials in build/sbom
	@rm -rf dist build/sbom
	$(UV) build --quiet --no-build-isolation --python $(ENV)/bin/python
	@mkdir -p build/sbom
	@for list in $(SHIPPED); do \
		$(ENV)/bin/cyclonedx-py requirements requirements/$$list.txt --output-reproducible \
			--output-format JSON -o build/sbom/$$list.cdx.json || exit 1; done

# A list for each environment: the sources' (main), those of the images, vLLM's. Every file in them
# has its hash, and nothing else is installed.
COMPILE = $(UV) pip compile --quiet --python-version 3.11 --no-annotate --generate-hashes \
	--custom-compile-command "make lock"
OURS = $(COMPILE) --prerelease if-necessary-or-explicit
AS_MAIN = $(OURS) --constraint requirements/main.txt pyproject.toml --extra s3 --extra gateway

lock: $(UV) ## resolve the lists in requirements/ again (pins that still fit stay)
	$(OURS) pyproject.toml $(EXTRAS) -o requirements/main.txt
	awk '/^[a-z]/ { ours = /^uv==/ } /^#/ || ours' requirements/main.txt > requirements/uv.txt
	$(AS_MAIN) -o requirements/core.txt
	$(AS_MAIN) --extra envs -o requirements/envs.txt
	$(AS_MAIN) --extra learner -o requirements/learner.txt
	$(AS_MAIN) --extra learner --extra gpu -o requirements/learner-gpu.txt
	$(COMPILE) --override requirements/inference-overrides.txt requirements/inference.in \
		-o requirements/inference.txt
	$(COMPILE) requirements/inference-gpu.in -o requirements/inference-gpu.txt
	$(COMPILE) requirements/agents.in -o requirements/agents.txt
	$(COMPILE) requirements/verifiers.in -o requirements/verifiers.txt

clean: ## remove what was installed; runs/ stays
	rm -rf $(ENV) $(INFERENCE_ENV) $(AGENTS_ENV) $(VERIFIERS_ENV) .streamrl build dist \
		.pytest_cache .ruff_cache

# ---- proofs and measurements; their options: python -m tests.NAME --help -------------------------

$(PROOFS): $(ENV)/.installed .streamrl/.kafka
	@$(ENV)/bin/python -m tests.$(subst -,_,$@)
agents clients: setup $(AGENTS_ENV)/.synced
clients: .streamrl/clients/.installed
kubernetes slurm: setup
# The table is the same each time.
rewards: export PYTHONHASHSEED := 0

bench: setup
	$(ENV)/bin/python -m bench.data_path
$(BENCHES): bench-%: setup
	$(ENV)/bin/python -m bench.$*

# ---- steps of the set-up -------------------------------------------------------------------------

$(UV):
	@python=; for name in $(PYTHONS); do \
		if $$name -c '$(USABLE)' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "make: no Python 3.11 found (tried $(PYTHONS)); install it, with its venv module" >&2; \
		exit 1; fi; \
	$$python -m venv $(ENV)
	$(ENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/uv.txt

$(ENV)/.synced: requirements/main.txt | $(UV)
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(ENV)/bin/python $<
	@touch $@

$(ENV)/.installed: pyproject.toml $(ENV)/.synced
	$(UV) pip install --quiet --python $(ENV)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

$(ENV)/.cuda: requirements/learner-gpu.txt $(ENV)/.installed
	$(UV) pip install --quiet --require-hashes --compile-bytecode --python $(ENV)/bin/python -r $<
	@touch $@

# One environment for either device: what was there for the other one is replaced.
$(INFERENCE_ENV)/.synced: requirements/inference.txt | $(UV)
$(INFERENCE_ENV)/.cuda: requirements/inference-gpu.txt | $(UV)
$(INFERENCE_ENV)/.synced $(INFERENCE_ENV)/.cuda:
	@test -x $(INFERENCE_ENV)/bin/python || $(ENV)/bin/python -m venv --without-pip $(INFERENCE_ENV)
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(INFERENCE_ENV)/bin/python $<
	@rm -f $(INFERENCE_ENV)/.synced $(INFERENCE_ENV)/.cuda
	@touch $@

$(AGENTS_ENV)/.synced $(VERIFIERS_ENV)/.synced: .venv-%/.synced: requirements/%.txt | $(UV)
	@test -x .venv-$*/bin/python || $(ENV)/bin/python -m venv --without-pip .venv-$*
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python .venv-$*/bin/python $<
	@touch $@

# Node 20 is needed, with its npm; the clients bring everything else. `npm ci` would refuse a lock
# without the builds for other systems.
.streamrl/clients/.installed: $(addprefix tests/clients/,package.json package-lock.json ai_sdk.mjs)
	@command -v npm >/dev/null || \
		{ echo "make: no npm found; install Node 20 or newer" >&2; exit 1; }
	@mkdir -p .streamrl/clients
	@cp $^ .streamrl/clients
	npm install --prefix .streamrl/clients --no-audit --no-fund --silent
	@touch $@

.streamrl/.kafka: streamrl/stream/local_kafka/broker_files/jars.txt | $(ENV)/.installed
	@mkdir -p .streamrl
	$(ENV)/bin/python -m streamrl.stream.local_kafka.distribution
	@touch $@

.streamrl/.programs: Makefile tests/deploy/kubectl.py examples/go-env/go.mod | $(ENV)/.installed
	@mkdir -p .streamrl
	@for program in chromium promtool docker-compose go; do \
		command -v $$program >/dev/null && continue; \
		as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
		$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq --no-install-recommends $(PROGRAMS) >/dev/null || exit 1; \
		break; done
	$(ENV)/bin/python -m tests.deploy.kubectl
	$(ENV)/bin/python -m tests.support.brokers  # brokers start in half the time
	cd examples/go-env && GOTOOLCHAIN=local go build -o ../../.streamrl/go-env .
	@touch $@

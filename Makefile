# Everything from a fresh clone: Python 3.11, git and make are needed, the rest is installed here. `make` lists the targets.
#
# Each step of the set-up leaves a stamp beside what it made and is not done again until its list of versions changes: no network the second time.

# The Python 3.11 of both environments, unless it is named (`make setup PYTHON=python3.11`): the system's own before the first of the path, which may be
# one that was built without profile-guided optimization (docs/performance.md). Debian packs venv apart, so it may have none.
PYTHONS := $(or $(PYTHON),/usr/bin/python3.11 python3.11 python3 python)
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))
ENV := .venv
INFERENCE_ENV := .venv-inference
AGENTS_ENV := .venv-agents
VERIFIERS_ENV := .venv-verifiers
UV := $(ENV)/bin/uv
# What learner and servers compute on: cpu, or cuda for NVIDIA's GPUs (`make setup DEVICE=cuda`). Later targets keep what was chosen; back to cpu is `make clean`.
DEVICE := $(or $(shell cat .streamrl/.device 2>/dev/null),cpu)
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE is $(DEVICE); it can be cpu or cuda)
endif
LEARNER_READY := $(ENV)/$(if $(filter cuda,$(DEVICE)),.cuda,.installed)
INFERENCE_READY := $(INFERENCE_ENV)/$(if $(filter cuda,$(DEVICE)),.cuda,.synced)
# Tests wait for brokers and processes, too: three files at a time keep two cores busy.
THREE := -n 3 --dist loadfile --no-loadscope-reorder
# Whole runs wait for their servers to start and for each other most of the time: two keep two cores busy. No other file is read for them.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
LIVE_FILES = $$(grep -rl 'mark\.live' tests --include='test_*.py')
# Debian's, for tests: a browser, the checker of alert rules, the checker of the compose file, and Go for the env in another language.
PROGRAMS := chromium prometheus docker-compose golang-go
EXTRAS := --extra learner --extra plot --extra s3 --extra broker --extra envs --extra dashboard --extra gateway --extra tensorboard --extra wandb --extra mlflow --extra docs --extra dev

.PHONY: help setup setup-verifiers quickstart learn check docs test test-all chaos poison rewards month mutants soak agents attacks bench bench-scaling bench-smoke bench-packing bench-weights bench-loop bench-learner budgets real-size dist lock manifests sbom clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 14

setup: $(LEARNER_READY) $(INFERENCE_READY) .streamrl/.kafka ## both Python environments and the local Kafka; DEVICE=cuda: for NVIDIA's GPUs
	@echo $(DEVICE) > .streamrl/.device

setup-verifiers: $(VERIFIERS_ENV)/.synced ## .venv-verifiers, in which env servers of verifiers run: docs/verifiers.md

quickstart: setup ## the whole loop: envs, Kafka, learner and vLLM, until the policy has learned to copy digits
	@$(ENV)/bin/streamrl up --fresh deploy/runs/quickstart.yaml

learn: setup ## a pretrained model of 135 million parameters learns sums in words: up to 45 minutes and 8 GB of memory on two cores
	$(ENV)/bin/python examples/smollm2.py runs/models/smollm2-135m-instruct
	@$(ENV)/bin/streamrl up --fresh deploy/runs/learn.yaml
	@$(ENV)/bin/streamrl eval learn --list

check: $(ENV)/.installed ## ruff and pyright; that the documentation builds strictly is one of the tests
	$(ENV)/bin/ruff check .
	$(ENV)/bin/pyright

docs: $(ENV)/.installed ## the documentation as a site, in build/site; needs no network
	NO_MKDOCS_2_WARNING=1 $(ENV)/bin/mkdocs build --quiet --strict

test: setup .streamrl/.programs ## all tests but the slow ones, three files at a time; then whole runs, two at a time
	$(ENV)/bin/python -m pytest -m "not slow and not live" $(THREE)
	$(ENV)/bin/python -m pytest -m "not slow and live" $(TWO) $(LIVE_FILES)

test-all: setup setup-verifiers $(AGENTS_ENV)/.synced .streamrl/.programs ## all tests
	$(ENV)/bin/python -m pytest -m "not live" $(THREE)
	$(ENV)/bin/python -m pytest -m live $(LIVE_FILES)

chaos: $(ENV)/.installed .streamrl/.kafka ## kill a run CHAOS_KILLS times (100) as CHAOS_SEED says, then account for every rollout
	@$(ENV)/bin/python -m tests.chaos --kills $(or $(CHAOS_KILLS),100) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) --dir $(or $(CHAOS_DIR),runs/chaos)

poison: $(ENV)/.installed ## records that nobody should write, each given to the parts that read its topic: a table of how they end
	@$(ENV)/bin/python -m tests.poison

rewards: $(ENV)/.installed ## answers as models write them, 30 right and 30 wrong for each shipped reward: what each earns
	@PYTHONHASHSEED=0 $(ENV)/bin/python -m tests.rewards

mutants: $(ENV)/.installed ## MUTANTS (300) changes to code that decides, one after another: the tests of its room are to fail on 90 %
	@nice $(ENV)/bin/python -m tests.mutants --count $(or $(MUTANTS),300)

month: $(ENV)/.installed ## MONTH_BATCHES (1,000,000) batches of 100 envs with a simulated clock: does anything grow? 40 minutes
	@$(ENV)/bin/python -m tests.soak.month --batches $(or $(MONTH_BATCHES),1000000)

soak: $(ENV)/.installed .streamrl/.kafka ## 100 producers for SOAK_MINUTES (30) while the broker dies, a disk is full and the clock steps: docs/reliability.md
	@$(ENV)/bin/python -m tests.soak --minutes $(or $(SOAK_MINUTES),30) --dir $(or $(SOAK_DIR),runs/soak)

agents: setup $(AGENTS_ENV)/.synced ## agents of the SDKs of openai, anthropic and openai-agents, trained one after another: docs/train-your-agent.md
	@$(ENV)/bin/python -m tests.agents

clients: $(ENV)/.installed .streamrl/.kafka $(AGENTS_ENV)/.synced .streamrl/clients/.installed ## Claude Code, Codex and nine more through a live gateway, a loop with a tool each: docs/train-your-agent.md
	@$(ENV)/bin/python -m tests.clients $(if $(CLIENTS_WRITE),--write) $(CLIENTS)

attacks: $(ENV)/.installed .streamrl/.kafka ## attacks on streamrl's own defences, as this user and, from root, as a plain one: each must fail
	@$(ENV)/bin/python -m tests.attacks
	@$(ENV)/bin/python -m tests.attacks.live

bench: setup ## the data path against plain Kafka: bench/README.md
	$(ENV)/bin/python -m bench.data_path

bench-scaling: setup ## the data path with more envs, partitions, learners, longer windows and responses: bench/README.md
	$(ENV)/bin/python -m bench.scaling

bench-smoke: setup ## has the data path become slower? against the recorded ratio to plain Kafka
	$(ENV)/bin/python -m bench.smoke

bench-packing: $(ENV)/.installed ## how full rows are, how even processes' shares, how fast: bench/README.md
	$(ENV)/bin/python -m bench.packing

bench-weights: setup ## from an update to the tokens of the new version, by stage, with 1 and 2 vLLM servers: bench/README.md
	$(ENV)/bin/python -m bench.weights

bench-loop: setup ## where the time of learner and servers goes in a live run, and what overlapping gains: bench/README.md
	$(ENV)/bin/python -m bench.loop

bench-learner: setup ## the learner against Levanter alone, steps in turns: bench/README.md
	$(ENV)/bin/python -m bench.learner

budgets: $(ENV)/.installed ## the learner's memory for real models on 1 and 8 devices, without them: docs/performance.md
	$(ENV)/bin/python -m bench.budgets

real-size: setup ## three steps of a Qwen3 of 0.6 billion parameters on this machine: memory and times (22 GiB, 20 minutes)
	$(ENV)/bin/python -m bench.real_size

dist: $(ENV)/.installed ## the wheel and the source distribution, in dist/
	@rm -rf dist
	$(UV) build --quiet --no-build-isolation --python $(ENV)/bin/python

# A list for each environment that something installs: the sources' (main), those of the images (deploy/docker/Dockerfile), vLLM's. Every file in them
# has its hash, and nothing else is installed.
COMPILE = $(UV) pip compile --quiet --python-version 3.11 --no-annotate --generate-hashes --custom-compile-command "make lock"
OURS = $(COMPILE) --prerelease if-necessary-or-explicit
AS_MAIN = $(OURS) --constraint requirements/main.txt pyproject.toml --extra s3 --extra gateway

lock: $(UV) ## resolve the lists in requirements/ again (pins that still fit stay)
	$(OURS) pyproject.toml $(EXTRAS) -o requirements/main.txt
	awk '/^[a-z]/ { ours = /^uv==/ } /^#/ || ours' requirements/main.txt > requirements/uv.txt
	$(AS_MAIN) -o requirements/core.txt
	$(AS_MAIN) --extra envs -o requirements/envs.txt
	$(AS_MAIN) --extra learner -o requirements/learner.txt
	$(AS_MAIN) --extra learner --extra gpu -o requirements/learner-gpu.txt
	$(COMPILE) --override requirements/inference-overrides.txt requirements/inference.in -o requirements/inference.txt
	$(COMPILE) requirements/inference-gpu.in -o requirements/inference-gpu.txt
	$(COMPILE) requirements/agents.in -o requirements/agents.txt
	$(COMPILE) requirements/verifiers.in -o requirements/verifiers.txt

manifests: $(ENV)/.installed ## topics and users of the Kubernetes overlays, written again from their run files
	@for file in deploy/kubernetes/overlays/*/run.yaml; do \
		here=$$(dirname $$file); \
		$(ENV)/bin/streamrl topics render $$file > $$here/topics.yaml.new || exit 1; \
		$(ENV)/bin/streamrl topics acls --render $$file > $$here/users.yaml.new || exit 1; \
		mv $$here/topics.yaml.new $$here/topics.yaml; mv $$here/users.yaml.new $$here/users.yaml; done

sbom: $(ENV)/.installed ## what each list in requirements/ is made of, as CycloneDX, in build/sbom
	@mkdir -p build/sbom
	@for list in core envs learner learner-gpu inference inference-gpu; do \
		$(ENV)/bin/cyclonedx-py requirements requirements/$$list.txt --output-reproducible --output-format JSON -o build/sbom/$$list.cdx.json || exit 1; done
	@wc -c build/sbom/*.json

clean: ## remove what was installed; runs/ stays
	rm -rf $(ENV) $(INFERENCE_ENV) $(AGENTS_ENV) $(VERIFIERS_ENV) .streamrl build dist .pytest_cache .ruff_cache

# ---- steps of the set-up --------------------------------------------------------------------------------------------------------------------

$(UV):
	@python=; for name in $(PYTHONS); do \
		if $$name -c '$(USABLE)' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: no Python 3.11 found (tried $(PYTHONS)); install it, with its venv module" >&2; exit 1; fi; \
	$$python -m venv $(ENV)
	$(ENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt

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

# Node 20 is needed, with its npm; the clients bring everything else. `npm ci` would refuse a lock without the builds for other systems.
.streamrl/clients/.installed: tests/clients/package.json tests/clients/package-lock.json tests/clients/ai_sdk.mjs
	@command -v npm >/dev/null || { echo "make: no npm found; install Node 20 or newer" >&2; exit 1; }
	@mkdir -p .streamrl/clients
	@cp $^ .streamrl/clients
	npm install --prefix .streamrl/clients --no-audit --no-fund --silent
	@touch $@

.streamrl/.kafka: streamrl/local_kafka/broker_files/jars.txt | $(ENV)/.installed
	@mkdir -p .streamrl
	$(ENV)/bin/python -m streamrl.local_kafka.distribution
	@touch $@

.streamrl/.programs: Makefile tests/deploy/kubectl.py examples/go-env/go.mod | $(ENV)/.installed
	@mkdir -p .streamrl
	@if ! (command -v chromium && command -v promtool && command -v docker-compose && command -v go) >/dev/null; then \
		as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
		$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(PROGRAMS) >/dev/null; fi
	$(ENV)/bin/python -m tests.deploy.kubectl
	$(ENV)/bin/python -m tests.support.brokers  # brokers start in half the time
	cd examples/go-env && GOTOOLCHAIN=local go build -o ../../.streamrl/go-env .  # what it needs is fetched here, and compiled once
	@touch $@

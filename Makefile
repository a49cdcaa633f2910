# `make demo` and `make test` need Python 3.11 or 3.12, Node >= 20 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(CURDIR)/node_modules/.bin:$(PATH)
# The CLI warns on Node 20 that its releases of 2027 will need 22.
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test check format synth render image cluster-manifests test-deploy test-cluster test-faults soak test-gpu \
	bench-gpu bench-recovery setup setup-infra clean help

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

demo: setup ## synth, render, real text, and a rehearsal with faults; ends in a verdict
	python tools/demo.py

test: setup ## unit and multi-process tests
	python -m pytest tests --ignore tests/deploy --ignore tests/cluster --ignore tests/gpu \
		--ignore tests/faults --durations 15

check: setup ## formatting, lint, types
	ruff format --check .
	ruff check .
	mypy

format: setup
	ruff format .
	ruff check --fix .

synth: setup-infra ## CloudFormation templates into cdk.out/, without credentials or network
	cdk synth --quiet --no-lookups --no-notices

render: setup-infra ## the Job of RECIPE for OUTPUTS, as YAML
	@python -m k8s render $(or $(RECIPE),training/recipes/llama3_8b_p5.toml) \
		--outputs $(or $(OUTPUTS),k8s/sample_outputs.json)

test-deploy: setup ## the real CDK CLI deploys, changes, and destroys against a mock of AWS
	python -m pytest tests/deploy

test-cluster: setup ## a real Kubernetes control plane (KUBERNETES_SERVER_BIN)
	python -m pytest tests/cluster

test-faults: setup ## every kind of fault at every point, each run judged bit for bit against an undisturbed one
	python -m pytest tests/faults --durations 0

SEED ?= 1
FAULTS ?= 200
soak: setup ## FAULTS random faults by SEED, five to a run
	python -m training prepare training/recipes/soak_cpu.toml
	python -m tools.soak --seed $(SEED) --faults $(FAULTS)

image: setup-infra ## both container images, where there is a Docker engine
	docker build --target trainer --tag holdfast-trainer:$$(python -m stacks.image_sources) --file training/Dockerfile .
	docker build --target control --tag holdfast-control:$$(python -m stacks.image_sources) --file training/Dockerfile .

cluster-manifests: setup-infra ## in-cluster software as YAML, from OUTPUTS, for GitOps
	python -m stacks.render $(or $(OUTPUTS),outputs.json)

test-gpu: setup ## what needs one CUDA GPU
	python -m pytest tests/gpu -m gpu

bench-gpu: setup ## speed, snapshots, recovery on all GPUs of this machine, resumable
	python -m training prepare
	python -m bench.multi_gpu --output runs/multi-gpu.jsonl
	python -m bench.multi_gpu --output runs/multi-gpu.jsonl --table

bench-recovery: setup ## fault to first new step beside torchrun and plain NVRx; an idle machine, please
	python -m training prepare
	python -m bench.recovery --output runs/recovery.jsonl

setup: $(VENV)/.all node_modules/.installed ## install everything (done by the other targets)

setup-infra: $(VENV)/.infra node_modules/.installed ## install the infrastructure half alone, no torch

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
		f"error: PYTHON={sys.executable}: is {v[0]}.{v[1]}, needs 3.11 or 3.12; run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.all: requirements.txt requirements-infra.txt requirements-training.txt requirements-dev.txt tools/install.py | $(VENV)/bin/python
	$(BIN)/python tools/install.py requirements.txt requirements-dev.txt
	@touch $@ $(VENV)/.infra

$(VENV)/.infra: requirements-infra.txt tools/install.py | $(VENV)/bin/python
	$(BIN)/python tools/install.py requirements-infra.txt
	@touch $@

node_modules/.installed: package-lock.json
	npm ci --no-audit --no-fund --loglevel=error
	@touch $@

clean: ## remove what the targets made, except runs/
	rm -rf $(VENV) node_modules cdk.out

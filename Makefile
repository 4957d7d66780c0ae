# Two environments: .venv (platform: Dagster, MLflow, Lance, trainer, tests) and .venv-serving (SGLang).
PYTHON        ?= python3
UV_VERSION    := 0.13.9
TORCH_VERSION := 2.13.0
# cpu | auto | cu130 | rocm6.4 ...: which PyTorch build; only `cpu` never downloads a GPU build
TORCH_BACKEND ?= cpu
DEMO_ARGS     ?=
SOAK_ARGS     ?=
# the Python that has SGLang and the project (pip install --no-deps -e .), as in SGLang's own images
GPU_PYTHON    ?= $(shell command -v $(PYTHON))
GPU_ARGS      ?=

UV      := .tools/bin/uv
# one process a core, one thread a process; the longest files first, as tests/*/conftest.py say
UNIT    := OMP_NUM_THREADS=1 .venv/bin/pytest tests/unit -n auto --dist loadfile --no-loadscope-reorder
# three at a time, whatever the cores: real services are waited for more than they compute
REAL    := .venv/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder
# a folder of torch wheels that pip was told of (find-links) is used before any download
LOCAL_WHEELS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null || $(PYTHON) -m pip config get :env:.find-links 2>/dev/null))
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup setup-next setup-peers setup-system demo soak gpu test test-faults test-gate test-ui test-unit test-integration lint lock docs chart clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/pip install -q --disable-pip-version-check uv==$(UV_VERSION)

# $(call install,venv,lock): torch first (from a local wheel, else of the backend asked for), then the lock.
# Compiled at once: where Python may write no bytecode, SGLang's three processes would each compile for ten seconds
define install
$(UV) venv -q --clear --python 3.11 $(1)
{ [ "$(TORCH_BACKEND)" = cpu ] && [ -n "$(LOCAL_WHEELS)" ] && \
  $(UV) pip install -q --python $(1) --no-deps --no-index $(addprefix --find-links ,$(LOCAL_WHEELS)) torch==$(TORCH_VERSION); } || \
$(UV) pip install -q --python $(1) --torch-backend=$(TORCH_BACKEND) -c $(2) torch==$(TORCH_VERSION)
$(UV) pip install -q --python $(1) --no-deps --compile-bytecode -r $(2)
endef

.venv/.ready: requirements/dev.txt pyproject.toml | $(UV)
	$(call install,.venv,requirements/dev.txt)
	$(UV) pip install -q --python .venv --no-deps -e .
	@touch $@

.venv-serving/.ready: requirements/serving.txt pyproject.toml $(wildcard patches/torchvision/pyproject.toml) | $(UV)
	$(call install,.venv-serving,requirements/serving.txt)
	.venv-serving/bin/python -c 'import torchvision' 2>/dev/null || \
	  $(UV) pip install -q --python .venv-serving --no-deps ./patches/torchvision
	$(UV) pip install -q --python .venv-serving --no-deps -e .
	@touch $@

# the next SGLang version that has an adapter (docs/upgrade-sglang.md); only tests and those who ask for it need it
.venv-serving-next/.ready: requirements/serving-next.txt pyproject.toml $(wildcard patches/*/pyproject.toml) | $(UV)
	$(call install,.venv-serving-next,requirements/serving-next.txt)
	for name in torchvision sgl_kernel; do \
	  .venv-serving-next/bin/python -c "import $$name" 2>/dev/null || \
	  $(UV) pip install -q --python .venv-serving-next --no-deps ./patches/$$name || exit 1; done
	$(UV) pip install -q --python .venv-serving-next --no-deps -e .
	@touch $@

# the trainer that `tide bench train` measures beside ours; only that benchmark needs it
.venv-peers/.ready: requirements/peers.txt | $(UV)
	$(call install,.venv-peers,requirements/peers.txt)
	@touch $@

setup: .venv/.ready .venv-serving/.ready  ## install both environments (done by every target that needs them)

setup-next: .venv-serving-next/.ready  ## install SGLang 0.5.23 as well, beside them

setup-peers: .venv-peers/.ready  ## install the peers of `tide bench train` in an environment of their own

setup-system:  ## what the tests need of the system: PostgreSQL, Prometheus, Chromium (installed by apt-get where this is Debian and root)
	deployments/local/system-packages.sh

demo: setup  ## serve, capture, fine-tune, validate and deploy a draft on this machine; DEMO_ARGS="--workload code"
	.venv/bin/tide demo $(DEMO_ARGS)

soak: setup  ## the loop left to itself while traffic shifts, a window is poisoned, a draft sabotaged (up to 75 minutes)
	.venv/bin/tide soak $(SOAK_ARGS)

gpu: .venv/.ready  ## what a CUDA or ROCm box shows, as one JSON object; GPU_PYTHON=the python with SGLang, GPU_ARGS="--config FILE"
	TIDE_SERVING__PYTHON=$(GPU_PYTHON) .venv/bin/python -m tide_platform.bench.gpu $(GPU_ARGS)

test: setup setup-next setup-peers setup-system lint  ## the test suite: fast unit tests first, then real services (20 minutes)
	$(UNIT)
	$(REAL) tests/contract tests/integration -m "not faults and not slow"

test-faults: setup setup-next setup-peers  ## the slow ones: the whole stack killed, interrupted, restarted; benchmarks, images (25 minutes)
	.venv/bin/pytest tests/faults tests/integration -m "faults or slow"

test-gate: setup  ## the consistency gate with a real server: good drafts pass, planted faults are named (5 minutes)
	.venv/bin/pytest tests/gate

test-ui: setup setup-system  ## a real browser on the pages of Dagster and MLflow (5 minutes)
	.venv/bin/pytest tests/ui

test-unit: setup setup-system  ## unit tests only (five minutes)
	$(UNIT)

test-integration: setup setup-next setup-peers setup-system  ## tests against real services only
	$(REAL) tests/integration

lint: .venv/.ready  ## ruff, pyright, import contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/pyright

lock: | $(UV)  ## resolve requirements/*.in again (the locks hold names and versions only)
	$(UV) pip compile -q --universal --python-version 3.11 --no-header --no-emit-package torch -o requirements/dev.txt requirements/dev.in
	$(UV) pip compile -q --universal --python-version 3.11 --no-header --excludes requirements/excludes.txt -o requirements/serving.txt requirements/serving.in
	$(UV) pip compile -q --universal --python-version 3.11 --no-header --excludes requirements/excludes.txt --excludes requirements/serving-next-excludes.txt -o requirements/serving-next.txt requirements/serving-next.in
	$(UV) pip compile -q --universal --python-version 3.11 --no-header --excludes requirements/excludes.txt -o requirements/peers.txt requirements/peers.in

docs: .venv/.ready  ## generate docs/support.md and the tables of docs/metrics.md and of the training pods from the code, and the dashboards
	{ sed '/^| feature/,$$d' docs/support.md; .venv/bin/python -c 'from tide_platform.engine.support import markdown_table; print(markdown_table(), end="")'; } > docs/support.md.new && mv docs/support.md.new docs/support.md
	{ sed '/^### /,$$d' docs/metrics.md; .venv/bin/python -c 'from tide_platform.metrics.catalogue import markdown_tables; print(markdown_tables(), end="")'; } > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	.venv/bin/python -m tide_platform.cluster.table docs/trainer-pods.md
	.venv/bin/python deployments/grafana/build.py

chart: .venv/.ready  ## copy dashboards and rules into the Helm chart, and write what it renders to the tests' golden files
	cp deployments/grafana/dashboards/*.json deployments/helm/tide/files/dashboards/
	cp deployments/prometheus/rules/*.yml deployments/helm/tide/files/rules/
	.venv/bin/python -m tests.unit.cluster.test_chart_golden

clean:  ## remove the environments and the local stack's state (.tide)
	rm -rf .venv .venv-serving .venv-serving-next .venv-peers .tide

# Two environments: .venv (platform: Dagster, MLflow, Lance, trainer, tests) and .venv-serving (SGLang).
PYTHON        ?= python3
UV_VERSION    := 0.13.9
TORCH_VERSION := 2.13.0
# cpu | auto | cu130 | rocm6.4 ...: which PyTorch build; only `cpu` never downloads a GPU build
TORCH_BACKEND ?= cpu
DEMO_ARGS     ?=
# the Python that has SGLang and the project (pip install --no-deps -e .), as in SGLang's own images
GPU_PYTHON    ?= $(shell command -v $(PYTHON))
GPU_ARGS      ?=

UV      := .tools/bin/uv
# a folder of torch wheels that pip was told of (find-links) is used before any download
LOCAL_WHEELS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null || $(PYTHON) -m pip config get :env:.find-links 2>/dev/null))
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup setup-next setup-peers setup-system demo gpu test test-faults test-gate test-unit test-integration lint lock docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/pip install -q --disable-pip-version-check uv==$(UV_VERSION)

# $(call install,venv,lock): torch first (from a local wheel, else of the backend asked for), then the lock
define install
$(UV) venv -q --clear --python 3.11 $(1)
{ [ "$(TORCH_BACKEND)" = cpu ] && [ -n "$(LOCAL_WHEELS)" ] && \
  $(UV) pip install -q --python $(1) --no-deps --no-index $(addprefix --find-links ,$(LOCAL_WHEELS)) torch==$(TORCH_VERSION); } || \
$(UV) pip install -q --python $(1) --torch-backend=$(TORCH_BACKEND) -c $(2) torch==$(TORCH_VERSION)
$(UV) pip install -q --python $(1) --no-deps -r $(2)
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

setup-system:  ## what the tests need of the system: PostgreSQL (installed by apt-get where this is Debian and root)
	deployments/local/system-packages.sh

demo: setup  ## serve, capture, fine-tune, validate and deploy a draft on this machine; DEMO_ARGS="--workload code"
	.venv/bin/tide demo $(DEMO_ARGS)

gpu: .venv/.ready  ## what a CUDA or ROCm box shows, as one JSON object; GPU_PYTHON=the python with SGLang, GPU_ARGS="--config FILE"
	TIDE_SERVING__PYTHON=$(GPU_PYTHON) .venv/bin/python -m tide_platform.bench.gpu $(GPU_ARGS)

test: setup setup-next setup-peers setup-system lint  ## the test suite: fast unit tests first, then real services (20 minutes)
	.venv/bin/pytest -m "not faults and not gate"

test-faults: setup  ## the slow ones: the whole stack killed, interrupted, restarted (10 minutes)
	.venv/bin/pytest -m faults

test-gate: setup  ## the consistency gate with a real server: good drafts pass, planted faults are named (5 minutes)
	.venv/bin/pytest tests/gate

test-unit: setup setup-system  ## unit tests only (two minutes)
	.venv/bin/pytest tests/unit

test-integration: setup setup-next setup-peers  ## tests against real services only
	.venv/bin/pytest tests/integration

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

docs: .venv/.ready  ## generate docs/support.md from the code
	{ sed '/^| feature/,$$d' docs/support.md; .venv/bin/python -c 'from tide_platform.engine.support import markdown_table; print(markdown_table(), end="")'; } > docs/support.md.new && mv docs/support.md.new docs/support.md

clean:  ## remove the environments and the local stack's state (.tide)
	rm -rf .venv .venv-serving .venv-serving-next .venv-peers .tide

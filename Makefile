# The only door: developers and CI run the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE ?= $(or $(VLLM_GATEWAY_TEST_CACHE),$(HOME)/.cache/vllm-gateway-tests)
RUNS := $(VENV)/.runs# made once what running needs is installed
STAMP := $(VENV)/.installed# and what development needs
# Processes that run tests. Tests wait more than they compute: four on two cores.
JOBS ?= 4

.PHONY: setup browser screenshots fmt lint types arch collect test faults chaos fault-report incident-report test-fast test-pythons e2e e2e-vllm e2e-others e2e-redis clients vllm-tests ci demo run schema references clean

$(RUNS): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

setup: $(STAMP)
$(STAMP): $(RUNS)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[redis,kubernetes,kvevents,otel,oidc]' --group dev
	@touch $@

screenshots: browser   ## the pictures of the README; takes five minutes
	$(BIN)/python -m tests.e2e.screenshots deploy/screenshots

browser: setup         ## what drives a Chromium in the tests of the dashboard
	@$(BIN)/python -m pip install --quiet --group browser

# What `vllm-gateway demo` is given, such as --port 0.
DEMO ?=
demo: $(RUNS)          ## gateway and three simulated backends on loopback
	@$(BIN)/vllm-gateway demo $(DEMO)

fmt: setup
	$(BIN)/ruff check --fix --quiet . && $(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

arch: setup
	$(BIN)/lint-imports

collect: setup         ## compiles all tests once; else each process that runs some would do it
	@$(BIN)/pytest --collect-only --quiet >/dev/null || true  # `make test` tells what does not compile

test: setup            ## everything that needs no other program than Python
	$(BIN)/pytest -m 'not e2e' --ignore=tests/faults -n $(JOBS) --dist loadfile --no-loadscope-reorder

faults: setup          ## faults of the catalogue, and two minutes of a mix of them under load
	$(BIN)/pytest tests/faults -n $(JOBS) --dist loadfile
	$(BIN)/python -m tests.faults.chaos --seconds 120 --rate 25 $(if $(CI),--seed 1)

chaos: setup           ## the long mix: half an hour, and a thousand kills
	$(BIN)/python -m tests.faults.chaos --seconds 1800 --rate 200
	$(BIN)/python -m tests.faults.chaos --seconds 600 --rate 50 --kills 1000

fault-report: setup    ## runs every test that the catalogue of faults names, and writes the table
	$(BIN)/python -m tests.faults.report --e2e

incident-report: browser ## plays ten incidents before a real Chromium and Prometheus, and writes what operators are told
	$(BIN)/python -m tests.incidents.report

test-fast: setup
	$(BIN)/pytest tests/unit tests/properties tests/house

test-pythons:          ## unit tests and contracts on each other Python that pyproject.toml claims
	@bash .ci/pythons

e2e: setup             ## real vLLM, real nginx, real SDKs; skips what is not installed
	@$(MAKE) --jobs 2 --keep-going --output-sync e2e-vllm e2e-others
	@$(MAKE) e2e-redis

e2e-redis: setup       ## several gateways on one Redis; without engines beside it, which make Redis late
	$(BIN)/pytest -m e2e -n 2 --dist loadfile --durations 15 tests/e2e/*_redis.py

e2e-vllm: setup        ## the tests that need a real vLLM: one process, for two pairs of engines are too many
	$(BIN)/pytest -m 'e2e and vllm' --durations 15 tests/e2e

e2e-others: setup      ## all others of e2e
	$(BIN)/pytest -m 'e2e and not vllm' -n 2 --dist loadfile --durations 15 tests/e2e $(foreach each,$(wildcard tests/e2e/*_redis.py),--ignore $(each))

clients: setup         ## the clients that people have, unmodified; installs them first
	bash tests/e2e/clients/install.sh $(CACHE)
	VLLM_GATEWAY_TEST_CACHE=$(CACHE) $(BIN)/pytest tests/e2e/test_clients.py

vllm-tests: setup      ## vLLM's own API tests, directly and through the gateway; installs them first
	bash tests/e2e/install.sh $(CACHE)
	bash tests/vllm_suite/install.sh $(CACHE)
	$(BIN)/python tests/vllm_suite/run.py $(CACHE)

ci: lint types arch test faults

schema: setup
	$(BIN)/vllm-gateway config schema > configs/gateway.schema.json

references: schema     ## the pages of deploy/ that are made from the source
	$(BIN)/python -m gateway.config.reference > deploy/CONFIGURATION.md
	$(BIN)/python -m gateway.cli.reference > deploy/COMMANDS.md
	$(BIN)/python -m gateway.core.codes > deploy/ERRORS.md
	$(BIN)/python -m gateway.observe.reference > deploy/METRICS.md
	$(BIN)/python -m gateway.admin.reference > deploy/ADMIN_API.md
	$(BIN)/python -m gateway.observe.rules > deploy/prometheus/alerts.yaml
	$(BIN)/python -m gateway.observe.rules runbooks > deploy/RUNBOOKS.md
	$(BIN)/python -m gateway.observe.grafana > deploy/grafana/vllm-gateway.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Set up, run and check tgi-orchestrator.  `make help` lists the commands.
PYTHON ?= python3
BIN := .venv/bin
BOOTSTRAP := $(PYTHON) -I orchestrator/bootstrap.py
SET_UP := test -x $(BIN)/tgi-orchestrator || { echo "Nothing is set up here: run make up first." >&2; exit 2; }
# A file's tests stay together: they share what takes long to start.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE = docker build -f compose/Dockerfile --build-arg VERSION=$(VERSION) \
	--build-arg REVISION="$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" $(ARGS)
QUICK := not e2e and not slow and not docker and not gpu and not tgi

.DEFAULT_GOAL := help
.PHONY: help up down status load images test test-all lint format clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

# exec: a signal reaches the program itself, and make reports the program's own exit code.
up: ## set up and start everything; ARGS="--prefill 2 --port 8080" is passed on
	@$(BOOTSTRAP) run && exec $(BIN)/tgi-orchestrator up $(ARGS)

down: ## stop what runs
	@$(SET_UP) && exec $(BIN)/tgi-orchestrator down $(ARGS)

status: ## show what runs
	@$(SET_UP) && exec $(BIN)/tgi-orchestrator status $(ARGS)

load: ## put load on what runs; ARGS="--users 8 --run-time 60s --host URL" is passed on to Locust
	@$(BOOTSTRAP) load && exec $(BIN)/python locustfiles/run.py $(ARGS)

images: ## build the container images; ARGS="--build-arg BASE_IMAGE=..." is passed on
	@$(IMAGE) --target orchestrator -t tgi-orchestrator:$(VERSION) .
	@$(IMAGE) --target cpu -t tgi-orchestrator-cpu:$(VERSION) .

test: lint ## lint, unit and integration tests; no root, no Docker, five minutes at most
	@$(BIN)/pytest tests/unit tests/integration -m "$(QUICK)" $(PARALLEL) $(ARGS)

test-all: lint ## everything, with the real model; skips what this machine cannot do
	@$(BIN)/pytest tests/unit tests/integration $(PARALLEL) $(ARGS)
	@$(BIN)/pytest tests --ignore tests/unit --ignore tests/integration $(ARGS)

lint: ## ruff, mypy and the import contracts
	@$(BOOTSTRAP) test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: ## apply ruff's fixes and formatting, renew the module tables
	@$(BOOTSTRAP) test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python docs/modules.py

clean: ## remove .venv and caches; models stay in ~/.cache/tgi-orchestrator
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find orchestrator tgi_patches locustfiles tests -name __pycache__ -type d -prune -exec rm -rf {} +

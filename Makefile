# Everything runs in .venv inside the checkout, which is made when it is missing and renewed when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test unit check format report package versions page docs clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[hf,lightning,dev]'
	@touch $(STAMP)

install: $(STAMP) ## .venv with autopar in it; .venv/bin/autopar is the command line

demo: $(STAMP) ## train a small Llama on 4 processes and on 1, and compare (a few minutes)
	$(BIN)/python examples/train_llama_stdlib.py

# three workers for two processors: a test whose ranks wait for each other leaves a processor idle
WORKERS := $(shell expr \( $$(getconf _NPROCESSORS_ONLN) \* 3 + 1 \) / 2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal
# packages whose tests start no process groups; the search against brute force takes as long as all of these
UNIT := $(addprefix tests/,devices ops passes price rules schedules search shard techniques trainers emit/test_emit_golden.py)
UNIT += --ignore tests/search/test_search_experts.py --ignore tests/search/test_search_optimum.py

test: $(STAMP) ## the test suite
	$(PYTEST)

unit: $(STAMP) ## the tests of rules, costs, schedules and the search: less than a minute
	$(PYTEST) $(UNIT)

test-slow: $(STAMP) ## the tests that repeat at length what the suite shows in short
	$(PYTEST) -m slow

check: $(STAMP) ## formatter, linter and type checker, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the sources as the formatter and the linter want them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

report: $(STAMP) ## a page of evidence, `make report NAME=survey`; without a name, the list of reports
	@$(BIN)/python tests/reports $(NAME) $(ARGS)

package: $(STAMP) ## build wheel and sdist, install the wheel into a new environment, plan and train there
	@$(BIN)/python tests/reports package

versions: $(STAMP) ## a part of the tests under versions of Python and torch, those that this machine has
	@$(BIN)/python tests/reports versions

docs: $(STAMP) ## the documentation as a site, in build/docs
	$(BIN)/zensical build --strict

page: ## the script of the pages that `autopar report` writes, from autopar/report/web and npm's packages
	cd autopar/report/web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache build dist

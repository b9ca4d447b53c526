# Everything runs in .venv inside the checkout, which is made when it is missing and renewed when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check format matrix survey random-models volumes dtensor-check measured-memory measured-time bench mutations check-cost simpler house growth endtoend published infeasible clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[hf,dev]'
	@touch $(STAMP)

install: $(STAMP) ## .venv with autopar in it; .venv/bin/autopar is the command line

demo: $(STAMP) ## train a small Llama on 4 processes and on 1, and compare (a few minutes)
	$(BIN)/python examples/train_llama_stdlib.py

test: $(STAMP) ## the test suite
	$(BIN)/python -m pytest

check: $(STAMP) ## formatter, linter and type checker, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the sources as the formatter and the linter want them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: $(STAMP) ## every plan kind against one device in float64 (long)
	OMP_NUM_THREADS=1 $(BIN)/python tests/matrix.py

# torchvision's wheels are built for a torch with CUDA. Where it is installed transformers imports it, and beside another torch that
# fails: it stays in a folder of its own, with timm, which needs it. tests/survey_other.py finds them there.
survey: $(STAMP) ## models of transformers, timm, torchvision, diffusers and peft, against eager PyTorch: docs/survey.md (long)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[hf,dev,survey]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --upgrade --no-deps --target $(VENV)/survey timm torchvision
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/survey.py

random-models: $(STAMP) ## 5,000 models drawn at random against eager PyTorch, on one device and under random plans on two (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python tests/random_models.py --count 5000 --seed 0 --results docs/random_models.jsonl

house: $(STAMP) ## figures of the sources: lines, imports inside functions, cycles among packages, long lists of parameters
	@$(BIN)/python tests/house_figures.py

volumes: $(STAMP) ## bytes per layer as emitted beside the published formulas: docs/volumes.md
	$(BIN)/python tests/volumes.py

dtensor-check: $(STAMP) ## our rules against DTensor's, and which is wrong where they differ: docs/dtensor-check.md
	OMP_NUM_THREADS=1 $(BIN)/python -m autopar.checks --dtensor docs/dtensor-check.md

measured-memory: $(STAMP) ## predicted against measured memory of emitted programs: docs/measured-memory.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/measured_memory.py --fresh

measured-time: $(STAMP) ## profile this machine, then predicted against measured step times (a quiet machine, half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m autopar profile
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/measured_time.py

bench: $(STAMP) ## profile this machine, then automatic against hand-tuned programs: docs/bench.md (a quiet machine, half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m autopar profile
	OMP_NUM_THREADS=1 $(BIN)/python -m autopar bench --processes 2 --output docs/bench-2.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m autopar bench --processes 4 --output docs/bench-4.jsonl
	$(BIN)/python tests/bench_page.py

mutations: $(STAMP) ## put faults in on purpose, one at a time, and see what catches them (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutations.py

check-cost: $(STAMP) ## what comparing the captured graph with the model costs: docs/capture-check.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/check_cost.py

simpler: $(STAMP) ## autopar's plans against those of simpler searches, at the same prices: docs/simpler.md (long)
	OMP_NUM_THREADS=1 $(BIN)/python tests/simpler.py

growth: $(STAMP) ## planning time against layers and devices: docs/growth.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/growth.py --fresh

endtoend: $(STAMP) ## six requests from the command line to the plan, the largest on 16,384 GPUs (a quiet machine): docs/endtoend.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/endtoend.py --fresh

published: $(STAMP) ## the automatic layout on every cell of the published sweep, and what it would have lost: docs/published.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/published.py

infeasible: $(STAMP) ## requests that cannot be met, what is suggested, and whether it helps: docs/infeasible.md (long)
	OMP_NUM_THREADS=1 $(BIN)/python tests/infeasible.py

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache build dist

# Each target does its own set-up; a stamp in .venv makes the second call instant.
PYTHON ?= python3
BASE := .venv/.stamp-base
TEST := .venv/.stamp-test

.PHONY: setup demo test lint smollm2 study chaos soak clean

setup: $(TEST)

demo: $(BASE)  ## train the tiny model on the CPU
	.venv/bin/streamrl launch configs/tiny_cpu.yaml

test: $(TEST)
	scripts/test.sh --durations=15

lint: $(TEST)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

smollm2: $(TEST)  ## the model and data of configs/smollm2_*.yaml
	scripts/smollm2.sh

study: $(TEST)  ## what staleness costs, with and without correction: half an hour
	.venv/bin/python examples/study_staleness.py runs/study

chaos: $(TEST)  ## kill actors and drivers of a run fifty times: nothing may be lost or trained twice
	.venv/bin/python -m tests.actors.chaos --kills 50

soak: $(TEST)  ## half an hour of a fast run: nothing of it may grow
	.venv/bin/python -m tests.actors.soak --minutes 30

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BASE): pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" scripts/setup.sh base
	touch $@

$(TEST): pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" scripts/setup.sh test
	touch $(BASE) $@

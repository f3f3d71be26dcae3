# Two commands do all the set-up:  make demo  and  make test.  ARGS goes on to them:  make demo ARGS="--plot memory.png".
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: demo test test-cuda check bench clean

# torch goes first and alone: any package that depends on it would otherwise pull in the CUDA build. Bytecode is left to
# the first import: most of these modules are never imported, and to compile them all takes a minute.
INSTALL := $(BIN)/python -m pip install -q --no-compile

# What hetero itself needs; what its tests and checks need as well.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -c constraints.txt -e .
	touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

# The virtual accelerator, beside the above where make runs several jobs. Without a compiler its tests say so themselves.
$(VENV)/.compiled: $(VENV)/.installed
	-CUDA_VISIBLE_DEVICES= $(BIN)/python -c 'import hetero; hetero.virtual_device()' && touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m hetero demo $(ARGS)

test: $(VENV)/.compiled $(VENV)/.ready
	@# Real devices are hidden: everything runs on the virtual accelerator.
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.each_file --jobs $(JOBS) --pytest='$(ARGS)' tests/*/test_*.py

# The tests marked cuda, on a machine that has such a device.
test-cuda: $(VENV)/.ready
	@$(BIN)/python -m tests.each_file --jobs $(JOBS) --pytest='-m cuda $(ARGS)' \
		tests/manage/test_*.py tests/pool/test_pool_cuda.py

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

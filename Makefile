# `make demo` and `make test` do everything, set-up included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(BIN)/python -m pip --disable-pip-version-check -q
# The editable install maps modules to files, so a file that moves or goes needs a new one.
MODULES := $(VENV)/.modules
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/* csrc/*/*) $(MODULES)

.PHONY: setup demo test sanitize gpu check format clean FORCE

setup: $(READY)

# torch comes first and pinned: an open range would fetch gigabytes of CUDA packages.
$(READY): $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("ringdp needs Python 3.11 or newer; this is %d.%d (set PYTHON=...)" % v[:2])'
	@command -v $${CXX:-g++} >/dev/null || { echo "ringdp needs a C++ compiler: install g++ or set CXX"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes on a fresh machine)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(RUNS) install -c constraints.txt torch numpy
	$(RUNS) install -c constraints.txt scikit-build-core nanobind cmake ninja ruff mypy
	$(RUNS) install -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

$(MODULES): FORCE
	@mkdir -p $(VENV)
	@find ringdp kernels -name '*.py' | sort | cmp -s - $@ || find ringdp kernels -name '*.py' | sort >$@

demo: setup
	$(BIN)/ringdp train

# In two processes, as ranks often wait for one another, and half of the tests use one core.
test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

sanitize: setup
	$(BIN)/python -m pytest tests/transport/test_sanitizers.py

# Every test and bench that needs a GPU, in less than ten minutes: over PYTHON's own packages, and
# fetching nothing, where its torch sees one. COPY=DIR: what is found is copied there, too.
gpu: OPTIONS := $(if $(COPY),--copy '$(COPY)')
gpu:
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then $(PYTHON) -m bench.overlay $(OPTIONS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python -m bench.gpu $(OPTIONS); fi

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m bench.map

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

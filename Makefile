# make setup | check | test | test-compat | demo | bench | clean
#
# Each target makes .venv and installs what it needs, once: a stamp file for each set of extras
# depends on setup.cfg. Another interpreter: make PYTHON=/path/to/python3.12 test
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
LINE_LENGTH := 99
SHELL_FILES = .ci/run egs_demo/run.sh egs_demo/path.sh egs_demo/cmd.sh egs_demo/utils/parse_options.sh
PYTHON_FILES = espnet_sync tests egs_demo/local

.PHONY: setup check test test-compat demo bench clean help

help:
	@sed -n '1,4s/^# \{0,1\}//p' Makefile

setup: $(VENV)/.installed-dev

check: $(VENV)/.installed-dev
	$(BIN)/ruff check --target-version py310 --line-length $(LINE_LENGTH) --select E,F,W,I,B,UP,D,N,SIM,RUF \
	    --ignore D100,D104,D107,RUF022 --config 'lint.pydocstyle.convention="google"' \
	    --per-file-ignores 'tests/*:D101,tests/*:D102,tests/*:D103,tests/*:D105' $(PYTHON_FILES)
	$(BIN)/ruff format --check --target-version py310 --line-length $(LINE_LENGTH) $(PYTHON_FILES)
	$(BIN)/mypy
	cd egs_demo && ../$(BIN)/shellcheck -x ../.ci/run run.sh path.sh cmd.sh utils/parse_options.sh
	$(BIN)/python -m pytest -q --doctest-modules espnet_sync

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# The library's tests with older Pythons, torch and ESPnet. The demo, the trainings and the
# benchmarks need what is in the wheel of espnet 202611: speech, and espnet3.
test-compat: .venv-compat-3.11/.installed .venv-compat-3.10/.installed
	@for python in $(^D); do \
	    $$python/bin/python -c 'import platform, espnet2, numpy, torch; print("Python", platform.python_version(), "torch", torch.__version__, "espnet", espnet2.__version__, "NumPy", numpy.__version__)'; \
	    OMP_NUM_THREADS=1 $$python/bin/python -m pytest -m 'not training' \
	        --ignore tests/test_egs_demo.py --ignore tests/test_readme.py \
	        --ignore tests/test_benchmarks.py $(PYTEST_ARGS); \
	done

demo: $(VENV)/.installed-demo
	cd egs_demo && PATH="$(CURDIR)/$(BIN):$$PATH" ./run.sh $(DEMO_ARGS)

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV) .venv-compat-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf egs_demo/data egs_demo/dump egs_demo/exp egs_demo/downloads
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first interpreter that is new enough, by running it: a name on PATH may be a stub of a
# version manager that runs nothing.
$(VENV)/.made:
	@for python in $(PYTHON) python3.13 python3.12 python3 ~/.pyenv/versions/*/bin/python3; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then \
	        echo "make: $$("$$python" --version) at $$(command -v "$$python")"; \
	        rm -rf $(VENV); "$$python" -m venv $(VENV); \
	        $(BIN)/python -m pip install -q --upgrade uv; touch $@; exit 0; \
	    elif [ -n "$(PYTHON)" ] && [ "$$python" = "$(firstword $(PYTHON))" ]; then \
	        echo "make: PYTHON=$(PYTHON) is no Python >= 3.12 that runs" >&2; exit 1; \
	    fi; \
	done; \
	echo "make: found no Python >= 3.12, which espnet 202611 needs. Install one (e.g." >&2; \
	echo "make: 'apt install python3.12-venv', 'conda create -n py312 python=3.12', or 'pyenv" >&2; \
	echo "make: install 3.12'), or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1

$(VENV)/.installed-%: setup.cfg $(VENV)/.made
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[$*]'
	touch $@

# NOTE: espnet 202511 names neither torchaudio, which it needs, nor the NumPy that it crashes with;
# and it keeps back setuptools, and so torch, which the last line brings up to date.
COMPAT_TORCH_3.11 := torch torchaudio
COMPAT_TORCH_3.10 := torch==2.8.* torchaudio==2.8.*

.venv-compat-%/.installed: setup.cfg $(VENV)/.made
	@for python in python$* ~/.pyenv/versions/$*.*/bin/python3; do \
	    if "$$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$*")' 2> /dev/null; then \
	        rm -rf $(@D); "$$python" -m venv $(@D); \
	        $(BIN)/uv pip install -q --python $(@D)/bin/python 'espnet==202511' 'numpy<2.4' -e '.[compat]'; \
	        $(BIN)/uv pip install -q --python $(@D)/bin/python --upgrade $(COMPAT_TORCH_$*); \
	        touch $@; exit 0; \
	    fi; \
	done; \
	echo "make: found no Python $*, which this target needs beside the others" >&2; exit 1

# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up: a fresh clone, Python 3.10+ and `make demo` or `make test` are enough.
PYTHON ?= python3
VENV   := .venv
ifeq ($(OS),Windows_NT)
PY     := $(VENV)/Scripts/python.exe
else
PY     := $(VENV)/bin/python
endif
STAMP  := $(VENV)/.ready
ARCH   ?= all

# The folder that holds torch, where the active Python has a CUDA build of it: that build is used as it is, never
# replaced by the one pinned for machines without a GPU, and it brings its own NVRTC.
FIND_CUDA_TORCH := import importlib.util as u, pathlib as p; t = u.find_spec("torch"); \
    print(p.Path(t.origin).parent.parent if t and __import__("torch").version.cuda else "")
SITE_PACKAGES   := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help demo test lint kernels bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     dense and sparse attention side by side: a table and a picture"
	@echo "make test     every test this machine can run"
	@echo "make lint     ruff, pyright and clang-format"
	@echo "make kernels  compile the kernels ahead of time (ARCH=sm_90a for one; default all)"
	@echo "make bench    time the kernels on this GPU"
	@echo "make clean    remove what make created"

demo: $(STAMP)
	$(PY) -m benchmarks.demo

test: $(STAMP)
	$(PY) -m pytest tests -n auto --dist worksteal

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)
	find csrc -name '*.cu*' | xargs $(dir $(PY))clang-format --dry-run --Werror

kernels: $(STAMP)
	$(PY) -m sparge.kernels.build --arch $(ARCH)

bench: $(STAMP)
	$(PY) -m benchmarks.attention

clean:
	rm -rf $(VENV) build dist demo_out .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "This Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@cuda_torch="$$($(PYTHON) -c '$(FIND_CUDA_TORCH)')"; \
	if [ -n "$$cuda_torch" ]; then \
	    echo "keeping the CUDA build of torch in $$cuda_torch"; \
	    echo "$$cuda_torch" > "$$($(PY) -c '$(SITE_PACKAGES)')/active_python.pth"; \
	    grep -v '# cpu' requirements-dev.txt > $(VENV)/requirements.txt; \
	else \
	    cp requirements-dev.txt $(VENV)/requirements.txt; \
	fi
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r $(VENV)/requirements.txt
	@touch $@

# Everything runs in .venv, which is made with $(PYTHON) from setup.cfg and constraints.txt. Each target installs there
# what it needs.
#
#   make setup      HyTrain with its integrations, and what the tests need
#   make demo       train a Llama on real text, through three processes; on a GPU, one that torch cannot train there
#   make test       linters, types, the website and the tests that need no GPU
#   make wheel      what is published, in build/dist: the source archive, and a wheel with the CPU kernels
#   make docs       the website, in build/site/index.html; a broken link is an error
#   make test-slow  the tests that take minutes
#   make test-frameworks  trainers' own smallest examples, beside torch's optimizers; installs them into .venv-frameworks
#   make faults     plants known faults one at a time, and says which of them the tests do not notice
#   make soak       trains through 200 kills, signals, full disks and damaged files; takes about half an hour
#   make fuzz       sends millions of wrong messages to all that reads some, and searches for loops that differ; an hour
#   make test-gpu   the tests that need a GPU, with $(PYTHON) as it is
#   make bench      seconds per step on the CPU, compared with a one-process loop
#   make bench-gpu  the same on a GPU, compared with training without offload, with $(PYTHON) as it is; more: benchmarks/
#
# On a machine with a GPU, install the torch of your choice, then `make setup SYSTEM_TORCH=1`: .venv borrows
# the torch that $(PYTHON) imports, also from an active environment, installs none, and remembers that.

PYTHON ?= python3
SYSTEM_TORCH ?= $(if $(wildcard .venv/.ready-system-torch),1)

BORROW := $(filter 1,$(SYSTEM_TORCH))
READY := .venv/.ready-$(if $(BORROW),system,pinned)-torch
FOR_TESTS := .venv/.ready-tests
FOR_DOCS := .venv/.ready-docs
FRAMEWORKS := .venv-frameworks/.ready
IN_VENV := .venv/bin/python

# Two targets at once would install into the same .venv.
.NOTPARALLEL:
.PHONY: setup demo test test-slow test-frameworks faults soak fuzz lint wheel docs test-gpu bench bench-gpu

setup: $(FOR_TESTS)

, := ,
# Of what is installed, a fifth is imported. Python compiles that once, and keeps it.
unexport PYTHONDONTWRITEBYTECODE
# Type checkers do not follow the finder that setuptools installs by default, but a path.
define INSTALL
$(IN_VENV) -m pip install --no-compile -c .venv/constraints.txt --config-settings editable_mode=compat -e '.[$(1)]'
@touch $@
endef

FAIL = { echo "make setup: $(1)" >&2; exit 1; }

# A venv with the other kind of torch starts afresh. A Python without ensurepip (Debian splits it off) may have pip.
# torch's wheels for CPUs bring torch's own C++ tests, 120 MB, which nothing here uses.
$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    $(call FAIL,$(PYTHON) is not Python 3.11 or newer; name one with PYTHON=…)
ifdef BORROW
	@$(PYTHON) -c 'import torch' || $(call FAIL,SYSTEM_TORCH=1 needs a $(PYTHON) that has torch)
endif
	@[ -z "$(filter-out $(READY),$(wildcard .venv/.ready-*-torch))" ] || rm -rf .venv
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv .venv; \
	else $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(IN_VENV) install -q pip; fi || \
	    $(call FAIL,$(PYTHON) made no venv with pip; on Debian or Ubuntu: apt install python3-venv)
ifdef BORROW
	$(PYTHON) -c 'import torch; from pathlib import Path; print(Path(torch.__file__).parent.parent)' \
	    > "$$($(IN_VENV) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-torch.pth"
	{ sed '/^# torch/,/^$$/d' constraints.txt; \
	  $(PYTHON) -c 'from importlib.metadata import version; print("torch==" + version("torch"))'; \
	} > .venv/constraints.txt
else
	cp constraints.txt .venv/constraints.txt
endif
	$(call INSTALL,recipe)
	@rm -rf .venv/lib/python*/site-packages/torch/test .venv/lib/python*/site-packages/torch/bin/test_*

$(FOR_TESTS): $(READY)
	$(call INSTALL,all$(,)test)

$(FOR_DOCS): $(READY)
	$(call INSTALL,docs)

demo: $(READY)
	$(IN_VENV) examples/demo.py

# Tests wait for processes most of the time. With more than a few at once they would wait for each other.
test: lint docs
	$(IN_VENV) -m pytest -n 3 --dist worksteal

test-slow: setup
	$(IN_VENV) -m pytest -m slow -n auto --maxprocesses 4 --dist worksteal

# Trainers find in .venv what they share with HyTrain.
$(FRAMEWORKS): tests/frameworks/requirements.txt $(FOR_TESTS)
	$(IN_VENV) -m venv --clear --without-pip .venv-frameworks
	$(IN_VENV) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$(.venv-frameworks/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(IN_VENV) -m pip --python .venv-frameworks/bin/python install --no-compile --no-deps -r $<
	@touch $@

test-frameworks: $(FRAMEWORKS)
	.venv-frameworks/bin/python -m pytest -m frameworks tests/frameworks

faults: setup
	$(IN_VENV) -m tests.faults --jobs 2

soak: setup
	$(IN_VENV) -m tests.soak --faults 200 --seed 1 --random-placements
	$(IN_VENV) -m tests.soak --faults 54 --seed 2 --ranks 2 --max-restarts 3
	$(IN_VENV) -m tests.soak.folders --seconds 600 --seed 1

fuzz: setup
	$(IN_VENV) -m tests.fuzz --frames 2000000
	$(IN_VENV) -m tests.fuzz.live --frames 1000000
	$(IN_VENV) -m tests.fuzz.loops --programs 20000 --jobs 2

lint: setup
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

wheel: setup
	$(IN_VENV) -m build --outdir build/dist .

docs: $(FOR_DOCS)
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict

test-gpu:
	$(PYTHON) -m pytest -m gpu

bench: setup
	$(IN_VENV) -m benchmarks.suite --device cpu --dtype float32 --threads 2 --shape demo --sequence 256 \
	    --rounds 3 --again cpu

bench-gpu:
	$(PYTHON) -m benchmarks.suite --again main

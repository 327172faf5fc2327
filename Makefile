# Everything runs from .venv, made here: `make demo`, `make test`.
# Another torch than the CPU build: `make install TORCH="torch==2.13.0 --index-url ..."`
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang for this machine's CPU, in an environment of its own: 3 minutes, 3 GB.
SGLANG := .venv-sglang
SGLANG_CPU := actors/engines/sglang/cpu
SGLANG_STAMP := $(SGLANG)/.installed
# SGLang for NVIDIA GPUs, in the same place: several GB.
SGLANG_GPU := actors/engines/sglang/gpu
SGLANG_GPU_STAMP := $(SGLANG)/.installed-gpu
# Tests start many processes. Where compiled modules are not kept, each of them compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE
# More workers than there are processors, since a test waits for its servers more than half of its time.
workers = --workers $$(( $$(getconf _NPROCESSORS_ONLN) + $(1) < 8 ? $$(getconf _NPROCESSORS_ONLN) + $(1) : 8 ))
# Files with tests of a marker, so that others need not be collected. tests/conftest.py sees that files name it.
files_of = $$(grep -rlw --include='test_*.py' 'mark\.$(1)' tests)

.PHONY: image demo test test-slow test-nightly test-sglang mutants check lint types imports docs install sglang sglang-gpu clean

demo: install
	$(BIN)/launch local --preset sort

test: install
	$(BIN)/pytest $(call workers,5)

test-slow: install
	$(BIN)/pytest -m "slow and not nightly and not gpu and not multi_gpu" $(call workers,3) $(call files_of,slow)

test-nightly: install sglang
	$(BIN)/pytest -m nightly $(call files_of,nightly)

test-sglang: install sglang
	$(BIN)/pytest -m "sglang and not nightly" --workers 2 $(call files_of,sglang)

# Faults that the tests must catch, about half an hour: `make mutants ONLY=WORD` tries those with the word in their names.
mutants: install
	$(BIN)/python tests/mutants $(ONLY)

check: lint types imports

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# The site, in build/docs: a link or an anchor that leads nowhere is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

image:
	docker build --quiet --target cpu --file docs/deploy/Dockerfile --tag sluice:cpu .
	docker run --rm sluice:cpu local --preset sort --dry-run

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(firstword $(TORCH)) into $(VENV): up to 3 GB to fetch, which may take minutes."
	$(BIN)/pip install --quiet $(PIP_FLAGS) $(TORCH)
	@echo "Installing Sluice and the other packages it needs into $(VENV): a minute or two."
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	touch $(STAMP)

sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(addprefix $(SGLANG_CPU)/,requirements.txt sitecustomize.py sgl_kernel/__init__.py ibverbs.c ibverbs.map)
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@echo "Installing SGLang for the CPU into $(SGLANG): 3 GB, about 3 minutes."
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement $(SGLANG_CPU)/requirements.txt
	cp -R $(SGLANG_CPU)/sgl_kernel $(SGLANG_CPU)/sitecustomize.py $$($(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	-$(CC) -shared -fPIC -Wl,-soname,libibverbs.so.1 -Wl,--version-script=$(SGLANG_CPU)/ibverbs.map -o $(SGLANG)/lib/libibverbs.so.1 $(SGLANG_CPU)/ibverbs.c
	touch $(SGLANG_STAMP)

sglang-gpu: $(SGLANG_GPU_STAMP)

$(SGLANG_GPU_STAMP): $(SGLANG_GPU)/requirements.txt
	@test ! -e $(SGLANG_STAMP) || { echo "$(SGLANG) holds SGLang for the CPU: remove it, or name another place, as in make sglang-gpu SGLANG=DIR" >&2; exit 1; }
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@echo "Installing SGLang for NVIDIA GPUs into $(SGLANG): several GB to fetch."
	$(SGLANG)/bin/pip install --quiet $(PIP_FLAGS) --requirement $(SGLANG_GPU)/requirements.txt
	touch $(SGLANG_GPU_STAMP)

clean:
	rm -rf $(VENV) $(SGLANG) runs

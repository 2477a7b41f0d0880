# One entry point for people and for CI. Every step says what it does and is quick when
# there is nothing to do. .venv is made on first use; build/ holds everything else.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS   += --no-print-directory --no-builtin-rules

BUILD      := build
VENV       := .venv
PY         := $(VENV)/bin/python
JOBS       ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE_ARGS ?=
PYTEST_ARGS ?=
DEMO_PROMPT ?= In the beginning
CUDA_ARCH  ?= 90
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

HIGH := models/tiny-moe/tiny-moe-F16.gguf
LOW  := $(BUILD)/models/tiny-moe-Q4_0.gguf
pin   = $(shell sed -n 's/^$(1) *= *"\([^"]*\)".*/\1/p' llama.cpp/upstream.toml)
say   = @echo "== $(1)"

# configure once (CMake configures again by itself when its inputs change), or when options are given
# $(1) folder, $(2) options
define configure
	@if [ -n "$(strip $(CMAKE_ARGS))" ] || ! [ -f $(1)/build.ninja -o -f $(1)/Makefile ]; then \
	    echo "== configuring $(1)"; \
	    generator=; [ -f $(1)/CMakeCache.txt ] || ! command -v ninja > /dev/null || generator="-G Ninja"; \
	    cmake -S . -B $(1) $$generator -DPython3_EXECUTABLE=$(CURDIR)/$(PY) $(2) $(CMAKE_ARGS); \
	fi
endef

.PHONY: help
help:
	@echo "make demo         build, then generate text with the embedded model through a small expert cache"
	@echo "make test         build, all tests, lint: what CI runs"
	@echo "make build        the programs, in $(BUILD)/bin"
	@echo "make lint         ruff and mypy"
	@echo "make check-stock  build unpatched upstream in $(BUILD)/stock and compare with it (slow, by hand)"
	@echo "make bench        decode, prefill, prefetch and memory under a cap: root, an hour, 8 GB of disk"
	@echo "make cuda-check   compile the CUDA files that the patches touch, where nvcc is installed"
	@echo "make binding      llama-cpp-python in .venv, without its own native build"
	@echo "make clean        remove $(BUILD) except the download; make distclean: that and .venv too"
	@echo "Variables: JOBS=$(JOBS) CMAKE_ARGS='-DGGML_CUDA=ON' PYTEST_ARGS='-k cache' HOBBIT_SDIST=folder"

#
# virtual environment
#

$(VENV)/.stamp-build: scripts/setup-venv
	@scripts/setup-venv build
	@touch $@

$(VENV)/.stamp-test: requirements-dev.txt | $(VENV)/.stamp-build
	@scripts/setup-venv test
	@touch $@

# the verified source distribution is there once the library was configured
.PHONY: binding
binding: $(VENV)/.stamp-binding-$(call pin,version)
$(VENV)/.stamp-binding-%: | $(VENV)/.stamp-test
	$(call say,installing llama-cpp-python $* in $(VENV) without its native build)
	@source="$${HOBBIT_SDIST:-}"; \
	[ -n "$$source" ] || source=$$(ls $(BUILD)/_upstream/llama_cpp_python-$*.tar.gz 2> /dev/null || true); \
	SKBUILD_WHEEL_CMAKE=false $(PY) -m pip --disable-pip-version-check --no-input install -qq \
	    --no-cache-dir --no-deps --no-build-isolation --no-binary llama-cpp-python "$${source:-llama-cpp-python==$*}" < /dev/null
	@touch $@

#
# build
#

.PHONY: build
build: $(VENV)/.stamp-build
	$(call configure,$(BUILD),-DHOBBIT_BUILD_TESTS=ON)
	$(call say,building $(BUILD)/bin)
	@cmake --build $(BUILD) --target hobbit-tools -j $(JOBS)

$(LOW): $(HIGH) | build
	$(call say,quantising $@)
	@mkdir -p $(@D)
	@$(BUILD)/bin/llama-quantize $< $@.partial Q4_0 $(JOBS) > $(BUILD)/models/quantize.log 2>&1 || \
	    { cat $(BUILD)/models/quantize.log; exit 1; }
	@mv $@.partial $@

.PHONY: models
models: $(LOW)

.PHONY: demo
demo: build $(LOW)
	$(call say,generating with a 12 MiB expert cache)
	$(BUILD)/bin/llama-cli -m $(HIGH) --hobbit-low $(LOW) --hobbit-cache 12MiB \
	    -st -p "$(DEMO_PROMPT)" -n 96 --temp 0.8 --seed 7 < /dev/null

#
# tests
#

.PHONY: test
test: build test-cpp test-asan test-python lint cuda-check
	$(call say,all passed)

.PHONY: test-cpp
test-cpp: build
	@if ! [ -f tests/cpp/CMakeLists.txt ]; then echo "== no C++ tests yet"; exit 0; fi; \
	echo "== C++ tests"; \
	cmake --build $(BUILD) -j $(JOBS); \
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)

# the engine alone, on the same source tree, under AddressSanitizer and UBSan
.PHONY: test-asan
test-asan: build
	@if [ -f tests/cpp/CMakeLists.txt ]; then $(MAKE) .test-asan; fi
.PHONY: .test-asan
.test-asan:
	$(call configure,$(BUILD)/asan,-DHOBBIT_ENGINE_ONLY=ON -DHOBBIT_SANITIZE=ON -DHOBBIT_BUILD_TESTS=ON \
	    -DGGML_NATIVE=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOBBIT_LLAMA_CPP_SRC=$(CURDIR)/$(BUILD)/llama.cpp-src)
	$(call say,engine tests under AddressSanitizer and UBSan)
	@cmake --build $(BUILD)/asan -j $(JOBS)
	@ctest --test-dir $(BUILD)/asan --output-on-failure --no-tests=error -j $(JOBS)

# by hand: the same under ThreadSanitizer
.PHONY: test-tsan
test-tsan: build
	$(call configure,$(BUILD)/tsan,-DHOBBIT_ENGINE_ONLY=ON -DHOBBIT_SANITIZE=thread -DHOBBIT_BUILD_TESTS=ON -DGGML_OPENMP=OFF \
	    -DGGML_NATIVE=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOBBIT_LLAMA_CPP_SRC=$(CURDIR)/$(BUILD)/llama.cpp-src)
	$(call say,engine tests under ThreadSanitizer)
	@cmake --build $(BUILD)/tsan -j $(JOBS) --target $(addprefix test-,precision cache activations budget config store loader stream prefetch)
	@ctest --test-dir $(BUILD)/tsan --output-on-failure --no-tests=error -j $(JOBS) -R '^(precision|cache|activations|budget|config|store|loader|stream|prefetch)$$'

.PHONY: test-python
test-python: build $(if $(wildcard $(HIGH)),$(LOW)) $(VENV)/.stamp-test binding
	@if ! ls tests/test_*.py > /dev/null 2>&1; then echo "== no Python tests yet"; exit 0; fi; \
	echo "== Python tests"; \
	$(PY) -m pytest tests $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/.stamp-test
	$(call say,lint)
	@$(PY) -m ruff format --check --quiet . || { echo "run: $(VENV)/bin/ruff format ."; exit 1; }
	@$(PY) -m ruff check --quiet .
	@packages=$$(ls -d hobbit_py gguf_tools 2> /dev/null || true); \
	$(PY) -m mypy --no-error-summary llama.cpp/prepare.py llama.cpp/cuda_check.py $$packages

.PHONY: cuda-check
cuda-check: $(VENV)/.stamp-build
	@$(PY) llama.cpp/prepare.py --out $(BUILD)/llama.cpp-src
	@$(PY) llama.cpp/cuda_check.py --tree $(BUILD)/llama.cpp-src --out $(BUILD)/cuda-check --arch $(CUDA_ARCH) $(CUDA_FILES)

.PHONY: check-stock
check-stock: build binding
	$(call configure,$(BUILD)/stock,-DHOBBIT_STOCK=ON)
	$(call say,building unpatched upstream in $(BUILD)/stock)
	@cmake --build $(BUILD)/stock --target hobbit-tools -j $(JOBS)
	@$(PY) tests/check_stock.py --fork $(BUILD)/bin --stock $(BUILD)/stock/bin --model $(HIGH)

# BENCH_DIR wants a disk, not memory
BENCH_DIR  ?= /var/tmp/hobbit-bench
BENCH_K    ?= 44
.PHONY: bench
bench: export PYTHONPATH := $(CURDIR)
bench: build $(LOW) $(VENV)/.stamp-test
	$(call say,tiny-moe with experts $(BENCH_K) and 10 times as wide, in $(BENCH_DIR))
	@mkdir -p $(BENCH_DIR)
	@for k in $(BENCH_K) 10; do \
	    high=$(BENCH_DIR)/tiny-moe-x$$k-F16.gguf low=$(BENCH_DIR)/tiny-moe-x$$k-Q4_0.gguf; \
	    [ -f $$high ] || $(PY) bench/inflate.py $(HIGH) -o $$high -k $$k; \
	    [ -f $$low ] || { $(BUILD)/bin/llama-quantize $$high $$low.partial Q4_0 $(JOBS) > /dev/null 2>&1; mv $$low.partial $$low; }; \
	done
	$(call say,decode and prefill)
	@$(PY) bench/capped.py $(BENCH_DIR)/tiny-moe-x$(BENCH_K)-F16.gguf --low $(BENCH_DIR)/tiny-moe-x$(BENCH_K)-Q4_0.gguf
	$(call say,prefetch at three bandwidths)
	@$(PY) bench/prefetch.py $(BENCH_DIR)/tiny-moe-x10-F16.gguf --low $(BENCH_DIR)/tiny-moe-x10-Q4_0.gguf
	$(call say,memory through 4000 tokens)
	@$(PY) bench/memory.py $(BENCH_DIR)/tiny-moe-x10-F16.gguf --low $(BENCH_DIR)/tiny-moe-x10-Q4_0.gguf
	$(call say,everything resident)
	@$(PY) bench/resident.py $(BENCH_DIR)/tiny-moe-x10-F16.gguf --rounds 9 --tokens 300

#
# cleaning
#

.PHONY: clean
clean:
	@if [ -d $(BUILD) ]; then find $(BUILD) -mindepth 1 -maxdepth 1 ! -name _upstream -exec rm -rf {} +; fi

.PHONY: distclean
distclean:
	@rm -rf $(BUILD) $(VENV)

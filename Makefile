# Every target makes its own virtual environment first; nothing is downloaded but packages.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ONLY ?= tests packages
WORKERS ?= $(shell nproc)
USABLE = $(VENV)/.usable
STAMP = $(VENV)/.installed
ROOMS ?= core actors models api server
SOURCES = setup.py core models actors api server bench packages src demo tests benchmarks examples docs/site .ci conftest.py

# a soak run looks for what no run has found yet; its first line says how to run it again
ifndef SEED
SEED = 1
soak: SEED := $(shell date +%s)
endif

PAGES = README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE core/errors.py $(wildcard deploy/*) \
	$(wildcard docs/*.md docs/cards/*.md docs/internals/*.md docs/reference/*.md docs/site/*.js docs/images/* examples/*.md examples/*.py demo/*.md)

# where bytecode is not written, each process that tests start compiles every module again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test core stubborn lint types docs pictures dist sanitize mutants soak proofs bench load memory clients clean

# torch first and by its exact version, so that a CPU build is taken where the machine offers one.
# setuptools warns at every editable installation of mapped folders of a folder named like the package: there is none.
$(USABLE): pyproject.toml setup.py constraints.txt $(wildcard native/*)
	@echo "setting up $(VENV) with the versions of constraints.txt, which takes a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

SATELLITES = ./packages/kit ./packages/ray ./packages/testing

$(STAMP): $(USABLE) $(wildcard packages/*/pyproject.toml)
	@echo "adding what tests and linters need to $(VENV), which takes some minutes"
	@PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt $(addprefix --editable ,$(SATELLITES)) --editable '.[dev]'
	@touch $@

demo: $(USABLE)  ## transcribe the shipped recordings with the shipped checkpoint; installs what a user needs
	@$(BIN)/triolet transcribe --model demo demo/samples/*.flac demo/samples/*.ogg demo/samples/*.mp3 demo/samples/*.wav

# a folder of its own for each run: pytest clears the common one of older runs, and another run may be at it
test: $(STAMP)  ## all tests, in as many processes as there are cores; idle ones take over from busy ones; a hang fails
	@scratch=$$(mktemp -d); trap "rm -rf $$scratch" EXIT; $(BIN)/python -m pytest --basetemp $$scratch/run \
		-o faulthandler_exit_on_timeout=true --numprocesses $(WORKERS) --dist worksteal

core:  ## what core/ decides, alone, in an environment with attrs, Hypothesis and pytest: under a minute from nothing
	@test -x .venv-core/bin/pytest || ($(PYTHON) -m venv .venv-core && .venv-core/bin/pip install --quiet \
		--constraint constraints.txt attrs hypothesis pytest)
	@mkdir -p build/core/triolet && ln -sfn $(CURDIR)/core build/core/triolet/core
	@PYTHONPATH=build/core .venv-core/bin/pytest tests/properties/core -q -W error --import-mode=importlib \
		--rootdir . -c /dev/null --confcutdir .

stubborn: $(STAMP)  ## tests whose order the machine chooses, N times each beside a process that spins: how many passed
	@$(BIN)/python -c 'while True: pass' & spins=$$!; trap "kill $$spins" EXIT; $(BIN)/python -m pytest $(ONLY) \
		-m real_time --times $(or $(N),200) -o faulthandler_exit_on_timeout=true --numprocesses $(WORKERS) --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# build/lib goes first, since setuptools takes files from there that the tree has no more
types: $(STAMP)  ## strict, of the package as it is installed
	rm -rf build/lib* packages/*/build build/types
	$(BIN)/python -m pip install --quiet --no-deps --target build/types $(SATELLITES) .
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p triolet -p triolet_kit -p triolet_ray -p triolet_testing

# pages lie as in the repository, so that each link is the same there and here; the package as it is installed, since
# its folders are mapped
docs: $(STAMP)  ## the site, in site/: open site/index.html
	@PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	rm -rf build/lib* packages/*/build build/pages build/package site
	mkdir -p build/pages
	cp --parents $(PAGES) build/pages
	$(BIN)/python -m pip install --quiet --no-deps --target build/package $(SATELLITES) .
	$(BIN)/zensical build --strict --clean 2>build/docs.stderr || (cat build/docs.stderr; exit 1)
	@! grep -i 'warning\|griffe:' build/docs.stderr  # griffe's, which --strict does not count
	$(BIN)/python -m pytest docs/site -q

# needs a Chromium; the models are folders or hub ids
pictures: $(STAMP)  ## docs/images/page-*.png: the server's page with two models, SPEECH and CHAT; takes two minutes
	@PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python docs/site/pictures.py --speech $(or $(SPEECH),openai/whisper-base) \
		--chat $(or $(CHAT),HuggingFaceTB/SmolLM2-135M-Instruct)

dist: $(STAMP)  ## wheel and sdist, in dist/: checked, and each tried in an environment of its own
	@PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dist]'
	rm -rf dist
	mkdir -p build
	for one in . $(SATELLITES); do $(BIN)/python -m build --outdir dist/$$one $$one || exit 1; done >build/dist.log 2>&1 \
		|| (cat build/dist.log; exit 1)
	$(BIN)/twine check --strict dist/*.* dist/packages/*/*
	$(BIN)/python -m pytest .ci/test_dist.py

sanitize: $(STAMP)  ## the native library under sanitizers, as shipped, and for arm64 in qemu: what it promises, broken plans
	$(BIN)/python tests/native/check.py $(SEED)

# the sanitizers first, so that what they need is missed at once
soak: $(STAMP) sanitize  ## new random examples, a million faults, replicas that are killed; what fails prints how to run it again
	@echo "the same again: make soak SEED=$(SEED)"
	$(BIN)/python -m triolet_testing --faults 1000000 --seed $(SEED) --workers 2
	$(BIN)/python -m triolet_testing.chaos --runs 10000 --seed $(SEED) --workers 2
	$(BIN)/python -m pytest tests/properties tests/actors/test_several_faults.py tests/api/test_equality.py \
		tests/api/test_mixed_transcriptions.py tests/api/test_speech_engine.py tests/models/test_beams.py \
		tests/models/test_native.py tests/models/test_native_panels.py tests/models/test_native_plans.py packages/ray \
		-m "not thorough" --hypothesis-profile=soak --hypothesis-seed=$(SEED)
	$(BIN)/python -m pytest tests packages -m thorough
	$(MAKE) mutants SEED=$(SEED)
	for what in equal kill zipf scale; do $(BIN)/python benchmarks/cluster.py $$what || exit 1; done

mutants: $(STAMP)  ## N mistakes in each of ROOMS, one at a time: fails where tests notice fewer than is recorded
	$(BIN)/python -m pytest -q -p tests.mutation \
		--mutants $(or $(N),60) --mutants-seed $(SEED) --mutants-rooms "$(ROOMS)" --mutants-workers $(WORKERS) \
		--hypothesis-profile=mutation

proofs: $(STAMP)  ## the models of the ledger and of the steps, by Spin: all states; needs the packages spin and gcc
	$(BIN)/python tests/properties/proofs/check.py

bench: $(STAMP)  ## the engine on this machine beside transformers, with the toy; or with MODEL and AUDIO, two folders
	$(BIN)/triolet bench speech --model $(or $(MODEL),demo/checkpoint) --audio $(or $(AUDIO),demo/samples) \
		--peer transformers --rounds 3

load: $(STAMP)  ## the host's work in a step, over a device that answers at once; the server beside the engine in process
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/server.py load
	$(BIN)/python benchmarks/server.py streams

memory: $(STAMP)  ## memory round by round under large requests, and how long an engine takes to end
	for what in speech images hours engines exits; do $(BIN)/python benchmarks/memory.py $$what || exit 1; done

clients:  ## OpenAI's client for Node.js, for the tests marked node
	npm ci --prefix tests/server/node

clean:
	rm -rf $(VENV) .venv-core build packages/*/build dist site .cache *.egg-info src/*.egg-info packages/*/*.egg-info tests/server/node/node_modules \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis

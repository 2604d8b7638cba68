# Two commands do everything on a fresh machine that has Python 3.11 or newer and make:
#   make demo   trains the quickstart notebook on four ranks
#   make test   lints, type checks and tests; make test-system tests whole notebooks, browsers and hosts
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NP ?= 4
INSTALLED := $(VENV)/.installed

# Nothing that has not one of the digests, and nothing else beside it.
CHECKED := --require-hashes --no-deps
# hvdlab, by the build tools that are installed already.
OURSELVES := --no-index --no-deps --no-build-isolation --editable .
# Whether the build of torch that was installed needs the libraries of CUDA beside it, by its own word.
NEEDS_CUDA = $(BIN)/python -c "import importlib.metadata as m; raise SystemExit(not any(n.startswith('nvidia') for n in m.requires('torch')))"

# How many tests run side by side: half of the time a test waits for processes. 0 runs them one after the other.
WORKERS ?= 3

# Tests start thousands of interpreters, each of which would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# Modules with a test that runs alone: to collect all others once more takes a quarter of a minute.
ALONE = $(shell grep -rl 'mark\.alone' tests --include='test_*.py')

.PHONY: help install demo lab test quick house lint types mypy pyright unit unit-root test-system timings views rebuilt audit soak chaos hours kills bench figures tables docs tutorial pictures lock test-numpy test-newest torch-next gpu test-gpu test-engines mxnet engines intel-mpi monarch clean

help: ## this list
	@grep -hE '^[a-z][a-z -]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# What is downloaded must have one of the digests in requirements/. PyTorch's build for CPUs has none there, since registries of packages do
# not have it: where the machine offers it itself (pip's `find-links`), it is taken from there first.
$(INSTALLED): pyproject.toml constraints.txt requirements/installed.txt requirements/cuda.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-index --no-deps "$$(grep -o '^torch==[^ ]*' requirements/installed.txt)" 2>/dev/null || true
	$(BIN)/python -m pip install --quiet $(CHECKED) --requirement requirements/installed.txt
	if $(NEEDS_CUDA); then $(BIN)/python -m pip install --quiet $(CHECKED) --requirement requirements/cuda.txt; fi
	$(BIN)/python -m pip install --quiet $(OURSELVES)
	@touch $@

install: $(INSTALLED) ## create .venv with everything

demo: $(INSTALLED) ## run examples/quickstart.ipynb on 4 ranks, with progress
	@$(BIN)/python examples/run.py examples/quickstart.ipynb --output out/quickstart.ipynb

lab: $(INSTALLED) ## open JupyterLab on the executed quickstart
	$(BIN)/jupyter lab $(wildcard out/quickstart.ipynb) $(if $(wildcard out/quickstart.ipynb),,examples/quickstart.ipynb)

test: lint types unit ## linters, type checkers and the tests of all parts; CI runs more (docs/design/testing.md)

lint: $(INSTALLED) ## ruff, and the imports between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

quick: $(INSTALLED) ## linters, mypy and the unit tests of what differs from main, in under two minutes
	@$(BIN)/python tests/support/quick.py

house: $(INSTALLED) ## figures of the tree's text: modules, circles of imports, names with several meanings, prose
	@$(BIN)/python tests/support/house.py

types: $(INSTALLED) ## mypy and pyright, side by side
	@$(MAKE) --no-print-directory --jobs=2 mypy pyright

mypy pyright: $(INSTALLED) ## one of the type checkers
	$(BIN)/$@

unit: $(INSTALLED) house ## the tests of all parts, on real ranks and planes, but the long ones; PYTEST_ARGS goes to pytest
	$(BIN)/python -m pytest -m "not system and not soak and not alone" -n $(WORKERS) --junitxml out/junit.xml $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "alone and not soak" --junitxml out/junit-alone.xml $(or $(PYTEST_ARGS),$(ALONE))

test-system: $(INSTALLED) ## the tests of the whole: notebooks, browsers, hosts, examples, and short campaigns of faults
	$(BIN)/python -m pytest -m "system and not soak and not alone" -n $(WORKERS) --junitxml out/junit-system.xml $(PYTEST_ARGS)

timings: $(INSTALLED) ## commit how long each group of tests took in the last run here: it orders the first run of a clean clone
	$(BIN)/python tests/support/scheduling.py

unit-root: $(INSTALLED) ## those of the tests that ordinary users can't run
	$(BIN)/python -m pytest -m "root and not soak and not alone" -n $(WORKERS) --junitxml out/junit-root.xml $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "root and alone and not soak" --junitxml out/junit-root-alone.xml $(PYTEST_ARGS)

views: $(INSTALLED) ## check and build the scripts of the widgets and of the panel; needs node, which installing does not
	cd ui && npm ci && npm run types && npm test && npm run build
	cd labextension && npm ci && npm run types && npm test && PATH="$(abspath $(BIN)):$$PATH" npm run build

rebuilt: views ## fail if the committed scripts differ from those that `make views` builds here
	git diff --exit-code -- widgets/static labextension/prebuilt ui/outputs.txt labextension/outputs.txt

audit: ## known vulnerabilities of the versions in constraints.txt and the lock files of npm, if the registries answer
	$(PYTHON) -m venv out/audit
	out/audit/bin/python -m pip install --quiet pip-audit
	out/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off
	cd ui && npm audit --package-lock-only --audit-level high
	cd labextension && npm audit --package-lock-only --audit-level high --omit dev

soak: $(INSTALLED) ## the slow tests: long random schedules, large data
	HVDLAB_TEST_EFFORT=50 $(BIN)/python -m pytest -m "soak or not soak" --timeout 3600 tests/unit/collectives tests/integration/collectives tests/system/hosts tests/chaos tests/conformance tests/integration/kernel_ext tests/unit/kernel_ext tests/system/spmd tests/unit/magics tests/system/magics tests/integration/magics tests/system/examples tests/unit/widgets tests/integration/widgets tests/system/labextension tests/integration/torch/test_habits.py tests/system/repository/test_gpu_suite.py $(PYTEST_ARGS)

chaos: $(INSTALLED) ## a thousand faults on real pools, and a thousand changes of elastic training: an hour and a half
	$(BIN)/python benchmarks/chaos.py --count 1000 --json benchmarks/results/chaos.json --page docs/reference/faults.md
	$(BIN)/python benchmarks/chaos.py --elastic 1000 --json benchmarks/results/elastic.json --page docs/reference/faults.md

hours: $(INSTALLED) ## random schedules of elastic jobs on a simulated clock for an hour, added to those of before; HOURS_ARGS="--minutes 600" for longer
	$(BIN)/python benchmarks/simulated_hours.py $(or $(HOURS_ARGS),--minutes 60) --page docs/reference/faults.md

kills: $(INSTALLED) ## a random rank is killed a hundred times every 60 steps, and every 15, while a model trains, and added to those of before: 40 minutes
	$(BIN)/python benchmarks/kills.py --kills 100 --seed $(or $(SEED),$(shell date +%s)) --add --json benchmarks/results/kills.json --page docs/reference/faults.md

figures: $(INSTALLED) ## costs of views and inspection, measured on this machine while it is idle: a quarter of an hour
	$(BIN)/python benchmarks/quiet.py

bench: $(INSTALLED) ## the figures of benchmarks/results, measured on this machine
	$(BIN)/python benchmarks/allreduce.py --ranks 2 --ranks 4 --out benchmarks/results/allreduce.json
	$(BIN)/python benchmarks/cells.py --json benchmarks/results/cells.json
	$(BIN)/python benchmarks/pool.py --json benchmarks/results/pool.json
	$(BIN)/python benchmarks/idle_pool.py --json benchmarks/results/idle_pool.json
	$(BIN)/python benchmarks/many_ranks.py --json benchmarks/results/many_ranks.json
	$(BIN)/python benchmarks/tracing.py --json benchmarks/results/tracing.json
	$(BIN)/python benchmarks/versus_horovod.py --json benchmarks/results/versus_horovod.json
	$(BIN)/python benchmarks/versus_ddp.py --json benchmarks/results/versus_ddp.json
	$(BIN)/python benchmarks/asynchronous.py
	$(BIN)/python benchmarks/autotune.py --json benchmarks/results/autotune.json
	$(BIN)/python benchmarks/timeline_drawing.py --json benchmarks/results/timeline_drawing.json
	$(BIN)/python benchmarks/strangers.py --json benchmarks/results/strangers.json
	$(BIN)/python benchmarks/soak.py --steps 10000 --json benchmarks/results/soak.json

intel-mpi: ## an environment with Intel MPI, which benchmarks/allreduce.py then measures as well
	$(PYTHON) -m venv out/intel-mpi
	out/intel-mpi/bin/python -m pip install --quiet impi-rt mpi4py numpy

monarch: ## an environment with PyTorch Monarch, which benchmarks/versus_peers.py then measures as well
	$(PYTHON) -m venv out/monarch
	out/monarch/bin/python -m pip install --quiet --no-index --no-deps "$$(grep -o '^torch==[^ ]*' requirements/installed.txt)" 2>/dev/null || true
	out/monarch/bin/python -m pip install --quiet "$$(grep -o '^torch==[^ ]*' requirements/installed.txt)" torchmonarch==0.7.0 ipykernel numpy

tables: $(INSTALLED) ## write the tables of docs/reference (settings, Horovod's names and attributes) and the map of the rooms from the code
	$(BIN)/python docs/images/rooms.py
	$(BIN)/python docs/reference/settings_table.py
	$(BIN)/python docs/reference/horovod/table.py
	$(BIN)/python docs/reference/horovod/attributes.py

test-numpy: ## the core on the oldest numpy that is accepted, without torch, in an environment of its own
	$(PYTHON) -m venv out/numpy
	out/numpy/bin/python -m pip install --quiet numpy==1.23.5 'pandas>=2.2,<2.3' msgspec 'ipyparallel>=9' mpi4py mpich cryptography \
		hypothesis pytest pytest-timeout pytest-xdist --editable .
	out/numpy/bin/python -m pytest -m "not soak" tests/unit/collectives/tracing tests/integration/collectives/tracing tests/unit/collectives/test_fold.py tests/unit/collectives/test_integers.py tests/unit/collectives/test_adasum.py tests/unit/collectives/protocol tests/integration/collectives/protocol \
		tests/integration/bindings/test_numpy_collectives.py $(PYTEST_ARGS)
	out/numpy/bin/python -m pytest -m "not soak" tests/conformance/planes/test_planes.py tests/conformance/planes/test_adasum.py \
		-k "(local or shm or mpi) and not hierarchical" $(PYTEST_ARGS)
	out/numpy/bin/python -m pytest -m "not soak" tests/integration/collectives/engine tests/unit/collectives/engine tests/unit/collectives/coordinator tests/integration/collectives/coordinator tests/integration/collectives/rendezvous \
		-k "not gloo and not test_tls and not tls and not two_hosts" $(PYTEST_ARGS)

# The first of these that runs, also those of pyenv that are not chosen.
NEWEST = $(shell for name in python3.15 python3.14 python3.13 python3.12; do for python in "$$name" "$$HOME"/.pyenv/versions/*/bin/"$$name"; do "$$python" -c "" 2>/dev/null && echo "$$python" && exit; done; done)
NEWEST_TESTS := tests/unit/collectives

test-newest: ## unit tests of the core on the newest Python that is here, without torch, in an environment of its own
	@python="$(NEWEST)"; if [ -z "$$python" ]; then echo "=== test-newest was left out: there is no Python 3.12 or newer." >&2; exit 0; fi; set -ex; \
		"$$python" -m venv --clear out/newest; \
		out/newest/bin/python -m pip install --quiet --constraint constraints.txt numpy pandas cryptography hypothesis pytest pytest-timeout pytest-xdist --editable .; \
		out/newest/bin/python -m pytest -m "not soak and not alone" -n $(WORKERS) --junitxml out/junit-newest.xml $(NEWEST_TESTS) $(PYTEST_ARGS)

# The lock has torch's present release; this target finds out early what the next one changes. Its wheels bring CUDA's libraries: five gigabytes.
torch-next: ## the process groups on the newest torch that pip finds, with its interface for repair, in an environment of its own
	$(PYTHON) -m venv out/torch-next
	grep -vE '^(torch|triton|nvidia-|cuda-)' constraints.txt > out/torch-next/constraints.txt
	out/torch-next/bin/python -m pip install --quiet --constraint out/torch-next/constraints.txt torch --editable . \
		pytest pytest-timeout pytest-xdist hypothesis greenlet cryptography
	out/torch-next/bin/python -m pytest -m "not soak" tests/integration/torch/test_c10d_reconfigure.py tests/integration/torch/test_c10d_watched.py \
		tests/integration/torch/test_c10d.py $(PYTEST_ARGS)

# Nothing is installed: the machine may reach no registry. GPU_PYTHON is the interpreter that has torch for CUDA, or out/gpu's of `make test-gpu`.
GPU_PYTHON ?= $(if $(wildcard out/gpu/bin/python),out/gpu/bin/python,$(PYTHON))

gpu: ## all that needs a GPU, in pieces with limits of their own, 25 minutes at most; GPU_ARGS="--rehearse --small" without a GPU, "--list" names them
	$(GPU_PYTHON) benchmarks/gpu_suite.py $(GPU_ARGS)

test-gpu: ## the plane for CUDA tensors on a real GPU, also its compiler by itself where there is no GPU, in an environment of its own
	$(PYTHON) -m venv out/gpu
	out/gpu/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,gpu]' pytest pytest-timeout pytest-xdist hypothesis
	out/gpu/bin/python -m pytest -rs tests/gpu $(PYTEST_ARGS)
	out/gpu/bin/python -m hvdlab check-gpus --json out/hvdlab-check-gpus.json

# After this time, in seconds since 1970, no suite of an engine begins: CI on a slow machine ends with a result, and a line for each one left out.
SUITES_BEGIN_UNTIL ?=
TOO_LATE = [ -n "$(SUITES_BEGIN_UNTIL)" ] && [ "$$(date +%s)" -ge "$(SUITES_BEGIN_UNTIL)" ] && echo "=== make $@ was left out for lack of time."

test-engines: mxnet engines ## tests in environments of their own: MXNet's, and that of Ray and Spark; --jobs=2 runs two suites at a time

mxnet: ## key-value stores beside real MXNet, in an environment of its own: it needs Python 3.11 and numpy 1.23
	$(PYTHON) -m venv out/mxnet
	out/mxnet/bin/python -m pip install --quiet $(CHECKED) --requirement requirements/mxnet.txt
	out/mxnet/bin/python -m pip install --quiet $(OURSELVES)
	@$(TOO_LATE) || { set -ex; \
		out/mxnet/bin/python -m pytest tests/engines/mxnet $(PYTEST_ARGS); \
		out/mxnet/bin/python -m pytest tests/conformance/bindings -k mxnet $(PYTEST_ARGS); \
		out/mxnet/bin/python -m pytest tests/system/repository/test_docstrings.py -k "example and mxnet" $(PYTEST_ARGS); }

# In this order, since the longest comes first. Each suite is a process of its own: a process has one SparkContext, and is connected to one Ray.
SUITES := engines-spark engines-launchers engines-trainers engines-ray engines-sshd engines-slurm engines-examples engines-dask

.PHONY: engines-installed $(SUITES)

engines: $(SUITES) ## ranks in the tasks of a real Spark, the actors of a real Ray, on the workers of a real Dask and in the jobs of a real Slurm, and over a real sshd, and Accelerate, Lightning and transformers on ranks, in an environment of its own, which has pandas 2; Spark needs Java 17

# pyspark comes as source: what builds it is installed first, checked as well.
engines-installed:
	$(PYTHON) -m venv out/engines
	out/engines/bin/python -m pip install --quiet --no-index --no-deps "$$(grep -o '^torch==[^ ]*' requirements/engines.txt)" 2>/dev/null || true
	awk '/^[a-z]/ { builds = /^(pip|setuptools|wheel)==/ } builds' requirements/engines.txt > out/engines/builds.txt
	out/engines/bin/python -m pip install --quiet $(CHECKED) --requirement out/engines/builds.txt
	out/engines/bin/python -m pip install --quiet $(CHECKED) --no-build-isolation --requirement requirements/engines.txt
	out/engines/bin/python -m pip install --quiet $(OURSELVES)

engines-launchers: SUITE = tests/conformance/launchers -k "slurm or dask or ray or spark"
engines-ray: SUITE = tests/engines/ray
engines-spark: SUITE = tests/engines/spark
engines-examples: SUITE = tests/system/repository/test_docstrings.py -k "example and (hvdlab.ray or hvdlab.spark)"
engines-trainers: SUITE = tests/engines/trainers
engines-sshd: SUITE = tests/engines/sshd
engines-slurm: SUITE = tests/engines/slurm
engines-dask: SUITE = tests/engines/dask
# Two Rays at a time would be too much for a small machine, and only one process unpacks Slurm's packages.
engines-ray engines-slurm: engines-launchers
engines-examples: engines-ray

$(SUITES): engines-installed
	@$(TOO_LATE) || { set -x; out/engines/bin/python -m pytest $(SUITE) $(PYTEST_ARGS); }

COMPILE := out/lock/bin/uv pip compile --no-config --quiet --no-annotate --custom-compile-command "make lock"
# Ray and Spark have an environment of their own: Spark is not ready for pandas 3.
EXTRAS := torch tensorflow mpi gpu tls yaml lab test docs dev
EVERYWHERE := --universal --python-version 3.11.0 --fork-strategy fewest

docs: $(INSTALLED) ## build the site into out/docs; a warning, a broken link or anchor fails it
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --builder html docs out/docs
	@echo "open out/docs/index.html"

tutorial: $(INSTALLED) ## execute the notebooks of docs/tutorial, and keep their outputs in them
	$(BIN)/python docs/tutorial/execute.py

pictures: $(INSTALLED) ## make the pictures of cells, the panel and the views again, from ranks that train in JupyterLab; needs Chromium
	$(BIN)/python docs/images/cell_outputs.py
	$(BIN)/python docs/images/panel.py
	$(BIN)/python docs/images/live_views.py
	$(BIN)/python docs/images/metric_views.py

lock: ## write constraints.txt and requirements/ for every Python that is promised; LOCK_ARGS=--upgrade brings newer versions
	$(PYTHON) -m venv out/lock
	out/lock/bin/python -m pip install --quiet uv
	printf 'mpich\ntensorflow-cpu\n' | $(COMPILE) $(EVERYWHERE) $(addprefix --extra ,$(EXTRAS)) --output-file constraints.txt $(LOCK_ARGS) pyproject.toml -
	printf 'mpich\ntensorflow-cpu\ntf_keras\npip\n' | $(COMPILE) $(EVERYWHERE) --extra torch --extra mpi --extra tls --extra lab --extra test --extra docs --extra dev \
		--constraint constraints.txt --generate-hashes --output-file out/lock/all.txt pyproject.toml -
	# What only torch's build for CUDA needs is a file of its own. `tensorflow`, for which tf_keras asks, would overwrite tensorflow-cpu.
	awk '/^[a-z]/ { cuda = /^(nvidia-|cuda-|triton=)/; left_out = /^tensorflow==/ } \
		!left_out { print > ("requirements/" (cuda ? "cuda" : "installed") ".txt") }' out/lock/all.txt
	printf 'mxnet==1.9.1\nnumpy==1.23.5\npytest\npytest-timeout\npytest-xdist\nhypothesis\nhatchling\neditables\npip\n' | $(COMPILE) \
		--python-version 3.11 --generate-hashes --output-file requirements/mxnet.txt $(LOCK_ARGS) pyproject.toml -
	cp requirements/engines.txt out/lock/engines.txt  # its pins are kept
	printf "$$(grep -oE '^(torch|tensorflow-cpu)==[^ ]*' constraints.txt)\ntf_keras\ntensorboard\nlightning\naccelerate\ntransformers\npytest\npytest-timeout\npytest-xdist\nhypothesis\nhatchling\neditables\nsetuptools\nwheel\npip\n" | \
		$(COMPILE) --python-version 3.11 --extra ray --extra spark --extra dask --generate-hashes --output-file out/lock/engines.txt $(LOCK_ARGS) pyproject.toml -
	awk '/^[a-z]/ { left_out = /^(nvidia-|cuda-|triton=|tensorflow==)/ } !left_out' out/lock/engines.txt > requirements/engines.txt

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache

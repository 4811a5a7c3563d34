# Every target sets up what it needs in .venv on a fresh machine, by itself.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
OUT ?= runs/first-$(shell date +%Y%m%d-%H%M%S)
CHAOS ?= runs/chaos-$(shell date +%Y%m%d-%H%M%S)
RESULTS ?= bench/results
MINUTES ?= 10
TODAY := $(shell date +%Y%m%d)

.PHONY: train test test-all exam interop verl ray lint format bench bench-peers chaos gpu gpu-test gpu-bench gpu-day \
	gpu-day-rehearsal gpu-day-traces docs clean

.venv/run.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev.done: .venv/run.done
	$(PIP) -e ".[dev]"
	touch $@

.venv/docs.done: .venv/run.done
	$(PIP) -e ".[docs]"
	touch $@

## train: two processes learn Python from the interpreter's own sources, in some minutes
train: .venv/run.done
	.venv/bin/meshwright train examples/first.toml --nproc 2 --out $(OUT)

# Two processes: one has the tests on the ranks' pool, the other one those that take one core. Threads that
# wait leave their core to the other one. Bytecode is kept, also where the environment says not to: some
# thousand modules would be compiled anew in both, and in each process that a test starts.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadscope

## test: a part of each product that makes every choice that has code of its own, and few runs of whole programs
test: .venv/dev.done
	$(PYTEST) -m "not full" $(ARGS)

## test-all: every test, with the full products of layouts, schedules and policies, and runs of whole programs
test-all: .venv/dev.done
	$(PYTEST) $(ARGS)

## exam: known mistakes planted in copies of the source, and what verify says of each, in some minutes
exam: .venv/run.done
	$(PY) tests/exam/exam.py $(ARGS)

## interop: exports opened by transformers, vLLM, llama.cpp and lm-eval, each in an environment of its own under
## .interop, which the first time takes several gigabytes; ARGS="--models dense --clients vllm" for a part
interop: .venv/dev.done
	$(PY) tests/interop/interop.py --work .interop/work $(ARGS)

## verl: the engine under verl's losses, in an environment of its own under .interop, as verl takes another
## transformers
verl: .interop/verl/verl.done
	.interop/verl/bin/python -m pytest tests/api/test_verl_engine.py $(ARGS)

## ray: runs on workers of a real Ray, in an environment of its own under .interop
ray: .interop/ray/ray.done
	.interop/ray/bin/python -m pytest tests/launch/test_ray.py $(ARGS)

.interop/ray/ray.done:
	$(PYTHON) -m venv .interop/ray
	.interop/ray/bin/python -m pip install -q torch==2.13.0 "ray[default,train]==2.60.0" pytest pytest-timeout hypothesis -e .
	touch $@

.interop/verl/verl.done:
	$(PYTHON) -m venv .interop/verl
	.interop/verl/bin/python -m pip install -q torch==2.13.0 verl==0.9.1 pytest pytest-timeout hypothesis -e .
	touch $@

## lint: ruff, mypy, the contract that imports go down the floors only, and the prose of docstrings and errors
lint: .venv/dev.done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PY) tools/lint_prose.py
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/dev.done
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

## bench: tokens per second side by side with plain PyTorch loops, memory by ZeRO stage, pipeline schedules
bench: .venv/dev.done
	$(PY) bench/throughput.py
	$(PY) bench/memory.py
	$(PY) bench/activations.py
	$(PY) bench/ring.py
	$(PY) bench/pipeline.py
	$(PY) bench/step_profile.py
	$(PY) bench/experts.py
	$(PY) bench/schedules.py

## bench-peers: meshwright train beside other programs, each in an environment of its own under .peers, in some
## hours; writes the rows and docs/peers.md
bench-peers: .venv/dev.done
	$(PY) bench/peers/run.py --out $(RESULTS)/peers.jsonl --page docs/peers.md $(ARGS)

## chaos: 100 faults in a run of two processes, beside its twin without any, in some minutes
chaos: .venv/run.done
	.venv/bin/meshwright chaos examples/chaos.toml --faults 100 --mtbf 2s --seed 1 --out $(CHAOS)

## gpu: the GPU tests and benchmarks, from the source tree, with the system's Python (which has a CUDA torch);
## `make -k gpu` goes on to the benchmarks after a test that failed
gpu: gpu-test gpu-bench

gpu-test:
	PYTHONPATH=src:tests $(PYTHON) -m pytest -m gpu -rs tests/gpu $(ARGS)

gpu-bench:
	PYTHONPATH=src $(PYTHON) bench/blocks_mfu.py --device cuda --out $(RESULTS)/blocks_mfu-$(TODAY).json
	PYTHONPATH=src $(PYTHON) bench/throughput.py --device cuda

## gpu-day: what GPUs are asked first, on one or on eight, in MINUTES=10 or 30, with the system's Python: tests,
## layouts, steps and kernels, with a page of results in bench/results; ARGS="--parts attention" for some of it
gpu-day:
	PYTHONPATH=src:bench $(PYTHON) -m gpu_day --minutes $(MINUTES) --out $(RESULTS)/gpu_day-$(TODAY) $(ARGS)

## gpu-day-rehearsal: the same on a GPU that is faked, in some minutes
gpu-day-rehearsal: .venv/dev.done
	PYTHONPATH=src:bench $(PY) -m gpu_day --device fake --out runs/gpu_day-rehearsal $(ARGS)

## gpu-day-traces: the fake traces of its steps anew, after a change of what a step launches, in some minutes
gpu-day-traces: .venv/dev.done
	PYTHONPATH=src:bench $(PY) -m gpu_day.traces

## docs: these pages as a site in site/, strictly: each link leads somewhere, on the site and in the repository
docs: .venv/docs.done
	.venv/bin/mkdocs build --strict
	$(PY) tools/check_links.py site

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

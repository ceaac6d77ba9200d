# People and CI use the same commands. Everything runs in .venv, which the first command makes; `make help` lists them.
# Arguments: make test ARGS="-k layers -x"; make demo ARGS="--workers 3"; make test PYTHON=python3.13
.DEFAULT_GOAL := help
.PHONY: help demo test ray soak fuzz check bench proto stubs format sanitize clean venv-demo venv-test venv-bench venv-dev

python := .venv/bin/python
over-tcp := $(addprefix tests/test_,drain.py endpoint.py faults.py hostile.py leaks.py messages.py objects.py reports.py transfer.py weights.py weights_processes.py)
inside-ray := $(addprefix tests/integrations/ray/,plain.py rdt.py pages.py rendezvous.py)
checked := $(wildcard tensorlink tools examples bench setup.py)
ARGS ?=
SECONDS ?= 600
export MPLBACKEND ?= Agg

help: ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: venv-demo ## Trains a small policy with rollout workers, weights and rollouts sent by TensorLink
	$(python) examples/rl_weight_sync.py $(ARGS)

test: venv-test ## All tests
	$(python) -m pytest $(ARGS)

ray: venv-test ## Tests inside a real Ray; each module in a process of its own, since one process stands one Ray
	for module in $(inside-ray); do $(python) -m pytest $$module $(ARGS) || exit; done

soak: venv-test ## The library's tests over TCP, in both control modes; many more faults, 10,000 of all kinds; sanitizers on the whole engine; ten minutes of everything
	for control in auto grpc; do $(python) -m pytest $(over-tcp) --transports tcp --control $$control $(ARGS) || exit; done
	TENSORLINK_FAULTS=200 $(python) -m pytest tests/test_network_faults.py $(ARGS)
	TENSORLINK_RAY_KILLS=100 $(python) -m pytest tests/integrations/ray/rdt.py -k killed_at_any_time $(ARGS)
	$(python) -m pytest -m soak $(ARGS)
	$(python) -m bench.soak --minutes 10
	$(python) -m bench.faults --faults 10000 --lease 0.3

fuzz: venv-test ## The parsers of what peers send, SECONDS each (600), in the core and in Python
	tools/fuzz.sh $(SECONDS)
	TENSORLINK_FUZZ_S=$(SECONDS) $(python) -m pytest tests/fuzz -k test_python_parsers $(ARGS)

check: venv-dev ## Lint, format, types, layers, and whether generated files are fresh
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy $(checked)
	$(python) tools/stubs.py --check
	$(python) tools/proto.py --check
	$(python) -m pytest -q tests/test_layers.py

bench: venv-bench ## Benchmarks against memcpy, Gloo and multiprocessing, as ratios
	$(python) -m bench $(ARGS)

proto: venv-dev ## Regenerates the protobuf code
	$(python) tools/proto.py

stubs: venv-dev ## Regenerates the stub of the native core
	$(python) tools/stubs.py

format: venv-dev ## Formats and fixes what can be fixed
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

sanitize: venv-test ## The core under ASan with UBSan, then TSan; ARGS are pytest's
	tools/sanitize.sh address $(ARGS)
	tools/sanitize.sh thread $(ARGS)

clean: ## Removes all that was built, .venv too
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find tensorlink -name '*.so' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +

venv-demo venv-test venv-bench venv-dev: venv-%:
	@tools/venv.sh $*

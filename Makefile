# The one list of commands. Each sets up what it needs, from a fresh clone with python3, make and pip alone, in
# .venvs/<name>: made once, and made anew when pyproject.toml has changed. `make clean` removes them.
#
#   make demo      a tool call cut in the middle, and a cursor for each row of the decision table
#   make demo-cluster   two workers and a Valkey: a call resumed on the other worker, and a worker killed
#   make test      the tests, on the newest mcp 2.x; on another SDK version: make test SDK=1.29.1
#   make check     format, lint, types, tests with coverage
#   make matrix    the tests on each of the four SDK versions
#   make wheel     build sdist and wheel, and use the wheel as a stranger would
#   make fix       format, and apply the linter's own fixes
#
# Longer, or with other people's software, from npm too:
#   make conformance   the official conformance suite, both SDK lines
#   make clients       every client against every story; writes docs/clients.md
#   make frameworks    PrefectHQ's fastmcp as the server
#   make peers         other servers, checked from outside; writes docs/checked-servers.md
#   make redis         the tests of RedisStorage on uvloop, with the Redis that Debian packages (needs apt-get, not root)
#   make soak          a network that does not behave, for SECONDS=20, from a SEED (printed; else random); STORAGE=redis
#   make soak-workers  workers that are killed and paused; 50 times each with SECONDS=60
#   make soak-ceilings floods that memory must withstand, SECONDS=20 each
#   make bench         what resumption costs, beside its peers; writes benchmarks/results.*; BENCH="--quick" and others

PYTHON ?= python3
# Options for pytest, e.g. PYTEST="-x -k cursor"; PYTEST="--numprocesses=0 --pdb" to look into a failure.
PYTEST ?=
SECONDS ?= 20
SEED ?=
STORAGE ?= memory
# Options for the benchmark, e.g. BENCH="--only append resume".
BENCH ?= --output benchmarks

# The supported ends of both lines, and the newest of each.
SDKS := 1.29.1 1 2.0.0 2
SDK ?= 2
requirement_1.29.1 := mcp==1.29.1
requirement_1 := mcp>=1.29.1,<2
requirement_2.0.0 := mcp==2.0.0
requirement_2 := mcp>=2,<3
# With uvloop and httptools, the others with asyncio's own loop and h11.
more_1 := --group uvloop
# The other line, whose client is tested against this line's server.
other_1.29.1 := 2
other_1 := 2
other_2.0.0 := 1
other_2 := 1

SOURCES := mcp_resumable tests examples benchmarks
CHECK := .venvs/check/bin/python -m

# Made by one uv, which pip installs: a fifth of pip's time. It trusts whom the machine trusts, behind a proxy too.
new_environment = $(PYTHON) -m venv --clear --without-pip $(@D)
install = .venvs/uv/bin/uv pip install --quiet --system-certs --python $(@D)/bin/python
show_sdk = $(1)/bin/python -c 'import sys, importlib.metadata as m; \
	print("== mcp", m.version("mcp"), "on Python", sys.version.split()[0], flush=True)'

.PHONY: demo demo-cluster test check format lint types covered-test matrix coverage wheel fix conformance clients frameworks soak clean
.PHONY: redis soak-ceilings soak-workers bench
.PHONY: peers
.PHONY: $(SDKS:%=test-%) $(SDKS:%=wheel-%)
.DELETE_ON_ERROR:
.SECONDEXPANSION:

demo: .venvs/mcp-$(SDK)/ready
	.venvs/mcp-$(SDK)/bin/python examples/demo.py

demo-cluster: .venvs/mcp-$(SDK)/ready
	.venvs/mcp-$(SDK)/bin/python examples/demo_cluster.py

test: test-$(SDK)

# Worker processes take a minute to kill and pause: on the newest of each line.
options_1.29.1 := --ignore=tests/redis/test_processes.py --ignore=tests/redis/test_demo_cluster.py
options_2.0.0 := $(options_1.29.1)

# A process for each core, and whoever is done takes from the others.
parallel := --numprocesses=auto --dist=worksteal

# Coverage, which takes a third of the time, is that of one SDK version: what is written for the 1.x line is little.
coverage_2 := --cov --cov-report= --cov-fail-under=0
$(SDKS:%=test-%): test-%: .venvs/mcp-%/ready .venvs/mcp-$$(other_$$*)/ready
	@$(call show_sdk,.venvs/mcp-$*)
	MCP_RESUMABLE_OTHER_PYTHON=$(CURDIR)/.venvs/mcp-$(other_$*)/bin/python \
		ONLY_WHAT_DEPENDS_ON_THE_SDK=$(if $(filter 2,$*),,1) SOAK_SECONDS=2 \
		.venvs/mcp-$*/bin/python -m pytest $(parallel) $(coverage_$*) $(options_$*) $(PYTEST)

matrix: $(SDKS:%=test-%)

# Of the last `make test`.
coverage: .venvs/check/ready
	$(CHECK) coverage report

check: format lint types covered-test

format: .venvs/check/ready
	$(CHECK) ruff format --check --diff $(SOURCES)

lint: .venvs/check/ready
	$(CHECK) ruff check $(SOURCES)

types: .venvs/check/ready
	$(CHECK) mypy
	$(CHECK) pyright --pythonpath .venvs/check/bin/python

covered-test: test-2
	$(MAKE) coverage

fix: .venvs/check/ready
	$(CHECK) ruff check --fix $(SOURCES)
	$(CHECK) ruff format $(SOURCES)

wheel: .venvs/build/ready
	rm -rf dist
	.venvs/build/bin/python -m build
	$(MAKE) wheel-1 wheel-2

# -I: nothing of the checkout can be imported.
$(SDKS:%=wheel-%): wheel-%:
	$(PYTHON) -m venv --clear .venvs/wheel-$*
	.venvs/wheel-$*/bin/python -m pip install --quiet dist/*.whl '$(requirement_$*)'
	@$(call show_sdk,.venvs/wheel-$*)
	.venvs/wheel-$*/bin/python -I tests/readme.py README.md
	.venvs/wheel-$*/bin/python -m pip install --quiet 'pytest>=8'
	.venvs/wheel-$*/bin/python -I tests/stranger.py

conformance: .venvs/conformance/ready .venvs/mcp-1/ready .venvs/mcp-2/ready
	.venvs/mcp-1/bin/python tests/conformance/run.py .venvs/conformance
	.venvs/mcp-2/bin/python tests/conformance/run.py .venvs/conformance

clients: .venvs/mcp-2/ready
	MCP_RESUMABLE_CLIENTS=1 .venvs/mcp-2/bin/python -m pytest --capture=no tests/clients $(PYTEST)

frameworks: .venvs/fastmcp-3/ready .venvs/fastmcp-4/ready
	.venvs/fastmcp-3/bin/python -m pytest tests/frameworks $(PYTEST)
	.venvs/fastmcp-4/bin/python -m pytest tests/frameworks $(PYTEST)

# node and npm are only needed for one of the servers; without them it is left out, loudly.
peers: .venvs/mcp-1/ready .venvs/mcp-2/ready .venvs/peers/ready $(if $(shell command -v npm),.venvs/peers-node/ready)
	MCP_RESUMABLE_PEERS=$(CURDIR)/.venvs .venvs/mcp-2/bin/python -m pytest tests/peers $(PYTEST)

redis: .venvs/mcp-1/ready .venvs/redis/redis-server
	REDIS_SERVER=$(CURDIR)/.venvs/redis/redis-server .venvs/mcp-1/bin/python -m pytest $(parallel) tests/redis $(PYTEST)

soak: .venvs/mcp-$(SDK)/ready
	SOAK_SECONDS=$(SECONDS) SOAK_SEED=$(SEED) SOAK_STORAGE=$(STORAGE) .venvs/mcp-$(SDK)/bin/python -m tests.soak.soak

soak-workers: .venvs/mcp-$(SDK)/ready
	SOAK_SECONDS=$(SECONDS) SOAK_SEED=$(SEED) .venvs/mcp-$(SDK)/bin/python -m pytest --capture=no tests/redis/test_processes.py

soak-ceilings: .venvs/bench/ready
	.venvs/bench/bin/python -m benchmarks.ceilings --seconds $(SECONDS)

bench: .venvs/bench/ready
	.venvs/bench/bin/python -m benchmarks $(BENCH)

.venvs/uv/ready:
	$(PYTHON) -m venv --clear $(@D) && $(@D)/bin/python -m pip install --quiet 'uv>=0.13'
	touch $@

.venvs/mcp-%/ready: pyproject.toml | .venvs/uv/ready
	$(new_environment)
	$(install) --editable '.[testing,demo,redis,cli]' --group test $(more_$*) '$(requirement_$*)'
	touch $@

.venvs/check/ready: pyproject.toml | .venvs/uv/ready
	$(new_environment)
	$(install) --editable '.[testing,demo,redis,cli]' --group test --group check '$(requirement_2)'
	touch $@

.venvs/fastmcp-%/ready: pyproject.toml | .venvs/uv/ready
	$(new_environment)
	$(install) --editable '.[testing,demo,redis,cli]' --group test 'fastmcp==$*.*'
	touch $@

.venvs/bench/ready: pyproject.toml | .venvs/uv/ready
	$(new_environment)
	$(install) --editable '.[bench,redis]'
	touch $@

# Unpacked instead of installed: the program is in redis-tools, the libraries are those it needs beside the common ones.
.venvs/redis/redis-server:
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && apt-get download redis-server redis-tools libatomic1 libjemalloc2 liblzf1
	cd $(@D) && for package in *.deb; do dpkg -x "$$package" root; done
	printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$$@"\n' \
		"$$(echo "$(CURDIR)/$(@D)"/root/usr/lib/*-linux-gnu)" "$(CURDIR)/$(@D)/root/usr/bin/redis-server" >$@.made
	chmod +x $@.made
	$@.made --version
	mv $@.made $@

.venvs/conformance/ready: tests/conformance/package.json tests/conformance/package-lock.json
	rm -rf $(@D) && mkdir -p $(@D) && cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund
	touch $@

.venvs/peers/ready: tests/peers/programs/requirements.txt | .venvs/uv/ready
	$(new_environment)
	$(install) --requirement $<
	touch $@

.venvs/peers-node/ready: $(addprefix tests/peers/programs/,package.json package-lock.json typescript_sdk.mjs)
	rm -rf $(@D) && mkdir -p $(@D) && cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund
	touch $@

.venvs/build/ready: pyproject.toml | .venvs/uv/ready
	$(new_environment)
	$(install) --group build
	touch $@

clean:
	rm -rf .venvs build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

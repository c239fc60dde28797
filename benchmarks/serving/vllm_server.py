"""A real vLLM server with or without the connector, in a Python of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

SOURCES = Path(__file__).parents[2] / "src"
WORKER = "kvboost.connectors.vllm.worker.KVBoostWorker"
START_S = 600.0


@dataclass(frozen=True)
class Reply:
    """An answer of the server, and what it says of reuse."""

    text: str
    tokens: list[str]
    logprobs: list[dict[str, float]]  # of each token, as many as were asked for
    num_cached: int
    kvboost: dict[str, Any]
    seconds: float


class VllmServer:
    """`connector` is its kv_connector_extra_config; None: vLLM alone."""

    def __init__(
        self,
        python: str,
        model: str,
        log: Path,
        *,
        connector: dict[str, Any] | None = None,
        dtype: str = "bfloat16",
        arguments: Sequence[str] = (),
        moves: bool = True,
        ranks: int = 1,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", dtype, "--enforce-eager", "--enable-prompt-tokens-details"]
        command += ["--max-logprobs", "-1", "-tp", str(ranks), *arguments]
        if connector is not None:
            config = {
                "kv_connector": "KVBoostConnector",
                "kv_connector_module_path": "kvboost.connectors.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            }
            command += ["--kv-transfer-config", json.dumps(config)]
            command += ["--worker-cls", WORKER] if moves else []
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CPU_OMP_THREADS_BIND": _cores(ranks),
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        environment.pop("OMP_NUM_THREADS", None)
        self.log = log
        self._read_bytes = 0  # of the log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=600)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def complete(
        self,
        tokens: Sequence[int],
        *,
        most: int = 1,
        reuse: str | None = None,
        salt: str | None = None,
        logprobs: int | None = None,
    ) -> Reply:
        body = _body(tokens, most, reuse) | {"logprobs": logprobs}
        if salt is not None:
            body["cache_salt"] = salt
        if logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        started = time.perf_counter()
        response = self._client.post("/v1/completions", json=body)
        seconds = time.perf_counter() - started
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text[:500]}")
        said = response.json()
        choice, usage = said["choices"][0], said["usage"]
        details = usage.get("prompt_tokens_details") or {}
        listed = choice.get("logprobs") or {}
        return Reply(
            text=choice["text"],
            tokens=listed.get("tokens") or [],
            logprobs=listed.get("top_logprobs") or [],
            num_cached=details.get("cached_tokens") or 0,
            kvboost=(said.get("kv_transfer_params") or {}).get("kvboost") or {},
            seconds=seconds,
        )

    def stream(self, tokens: Sequence[int], most: int, reuse: str | None) -> tuple[float, str]:
        """Seconds until the first token was there, and the whole text."""
        body = _body(tokens, most, reuse) | {"stream": True}
        first, texts, started = 0.0, [], time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - started
                texts += [each["text"] for each in json.loads(line[6:])["choices"]]
        return first, "".join(texts)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once all requests have given their blocks back."""
        for _ in range(1200):
            said = self._client.post("/reset_prefix_cache")
            if said.status_code == 200 and "Failed to reset" not in self._new_log():
                return
            time.sleep(0.05)
        raise RuntimeError("vLLM does not empty its prefix cache")

    def counters(self) -> dict[str, float]:
        """Our counters on vLLM's Prometheus endpoint."""
        found: dict[str, float] = {}
        for line in self._client.get("/metrics").text.splitlines():
            if line.startswith("vllm:kvboost_"):
                name, value = line.rsplit(" ", 1)
                found[name.partition("{")[0].removeprefix("vllm:kvboost_")] = float(value)
        return found

    def kill(self) -> None:
        """As a machine that fails."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._client.close()

    def stop(self) -> None:
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _new_log(self) -> str:
        text = self.log.read_bytes()[self._read_bytes :]
        self._read_bytes += len(text)
        return text.decode(errors="replace")

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError("vLLM has ended:\n" + self.log.read_text()[-20_000:])
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError("vLLM did not start:\n" + self.log.read_text()[-20_000:])


def _body(tokens: Sequence[int], most: int, reuse: str | None) -> dict[str, Any]:
    body = {"model": "m", "prompt": list(tokens), "max_tokens": most}
    body |= {"temperature": 0, "ignore_eos": True}
    asked = {"kv_transfer_params": {"kvboost": {"reuse": reuse}}}
    return body | asked if reuse is not None else body


def _cores(ranks: int) -> str:
    """All cores, shared out to ranks, as vLLM wants to be told."""
    share = max(1, (os.cpu_count() or 1) // ranks)
    return "|".join(f"{rank * share}-{(rank + 1) * share - 1}" for rank in range(ranks))

"""llama-server with reuse of moved pieces (`--cache-reuse`), asked over HTTP."""

from __future__ import annotations

import http
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import loop

PROGRAM = Path(sys.prefix).parent / "build" / "bin" / "llama-server"
REUSED_TOKENS = 64  # the least piece that is moved
START_S = 300.0
REPLY_S = 600.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # through no proxy


class LlamaServer(loop.System):
    """A server of its own, with one slot: all of its memory is for one prompt after the other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._port = loop.free_port()
        numbers = {
            "--port": self._port,
            "--ctx-size": settings["max_tokens"],
            "--threads": settings["num_threads"],
            "--threads-batch": settings["num_threads"],
            "--cache-reuse": REUSED_TOKENS,
            "--parallel": 1,
        }
        options = [str(part) for pair in numbers.items() for part in pair]
        command = [str(PROGRAM), "--model", settings["gguf"], "--host", "127.0.0.1", "--slots"]
        # With its second cache it empties the slot for a prompt that is not alike: nothing to move.
        command += ["--cache-ram", "0"]
        command += ["--slot-save-path", tempfile.gettempdir()]  # without it no slot can be erased
        self._process = subprocess.Popen([*command, *options])
        loop.wait_for(self._process, self._is_healthy, START_S, "llama-server")

    def versions(self) -> dict[str, str]:
        said = subprocess.run([str(PROGRAM), "--version"], capture_output=True, text=True)
        first = (said.stdout + said.stderr).strip().splitlines()[0]
        return {"llama.cpp": first.removeprefix("version: ")}

    def forget(self) -> None:
        with self._open("/slots/0?action=erase", {}) as response:
            response.read()

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        started = time.perf_counter()
        first_at, answer, last = None, list[int](), dict[str, Any]()
        body = {
            "prompt": tokens,
            "n_predict": num_new,
            "temperature": 0,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": True,
        }
        with self._open("/completion", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line[6:])
                answer += last.get("tokens") or []
                first_at = first_at or time.perf_counter()
        ended = time.perf_counter()
        num_cached = last.get("timings", {}).get("cache_n")
        return loop.Answer((first_at or ended) - started, ended - started, answer, num_cached)

    def traffic(self, requests: Sequence[loop.Request]) -> list[loop.Answer]:
        """The server queues prompts as they come."""
        with ThreadPoolExecutor(len(requests)) as clients:
            asked = [clients.submit(self.ask_late, *each) for each in loop.arrivals(requests)]
            return [each.result() for each in asked]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_healthy(self) -> bool:
        with self._open("/health") as response:
            return bool(response.status == http.HTTPStatus.OK)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request; an error of the server is raised."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return _DIRECT.open(request, timeout=REPLY_S)


if __name__ == "__main__":
    loop.serve(LlamaServer)

"""llama-server with reuse of moved pieces (`--cache-reuse`), asked over HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import loop

PROGRAM = Path(sys.prefix).parent / "build" / "bin" / "llama-server"
REUSED_TOKENS = 64  # the least piece that is moved
START_S = 300.0
REPLY_S = 600.0


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
        self._wait()

    def versions(self) -> dict[str, str]:
        said = subprocess.run([str(PROGRAM), "--version"], capture_output=True, text=True)
        first = (said.stdout + said.stderr).strip().splitlines()[0]
        return {"llama.cpp": first.removeprefix("version: ")}

    def forget(self) -> None:
        status, said = self._post("/slots/0?action=erase", {})
        if status != http.HTTPStatus.OK:
            raise RuntimeError(f"llama-server does not erase its slot: {said!r}")

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
        connection = self._connect()
        connection.request("POST", "/completion", json.dumps(body), _HEADERS)
        with connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"llama-server: {response.status} {response.read()!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line[6:])
                answer += last.get("tokens") or []
                first_at = first_at or time.perf_counter()
        ended = time.perf_counter()
        connection.close()
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

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                connection = self._connect()
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("llama-server did not start; see the log")

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        connection = self._connect()
        connection.request("POST", path, json.dumps(body), _HEADERS)
        with connection.getresponse() as response:
            return response.status, response.read()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=REPLY_S)


_HEADERS = {"Content-Type": "application/json"}


if __name__ == "__main__":
    loop.serve(LlamaServer)

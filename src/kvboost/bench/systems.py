"""The systems that are compared, and a process for each of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.bench.environments import OWN
from kvboost.errors import KVBoostError

PACKAGE = Path(__file__).parents[1]
WORKERS = Path(__file__).parent / "workers"
START_S = 900.0  # until a worker must be ready
COMMAND_S = 900.0  # until it must have answered a command
LEAVE_S = 30.0  # until it must have ended
TAIL = 3000  # characters of its log in an error
GIB = 2**30


@dataclass(frozen=True)
class System:
    """Something to compare, and how its worker is started."""

    name: str
    title: str
    worker: str  # file name
    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    most_rounds: int | None = None  # None: as many as the others
    can_traffic: bool = True


BARE = ("bare.py", OWN)
INSIDE_VLLM = ("inside_vllm.py", "vllm")
# One round and no traffic: it takes minutes where prompts are new.
LLAMA: tuple[Any, ...] = ("llama", {}, 1, False)
_ALL = (
    System("transformers", "Transformers, generate()", *BARE),
    System("transformers-again", "Transformers once more: the noise", *BARE),
    System(
        "transformers-prefix", "Transformers, prefix kept by hand", *BARE, {"keeps_prefix": True}
    ),
    System("transformers-cb", "Transformers, continuous batching", "continuous.py", OWN),
    System(
        "kvboost-exact",
        "KVBoost, exact",
        "ours.py",
        OWN,
        {"options": {"reuse": "exact", "max_cache_bytes": 2 * GIB}},
    ),
    System(
        "kvboost-auto",
        "KVBoost, auto",
        "ours.py",
        OWN,
        {"options": {"reuse": "auto", "max_cache_bytes": 2 * GIB}},
    ),
    System(
        "kvboost-public",
        "kvboost 0.9.0 from PyPI",
        "public.py",
        "public",
        {"max_cache_bytes": 2 * GIB},
    ),
    System("vllm", "vLLM, prefix caching", *INSIDE_VLLM),
    System("vllm-kvboost", "vLLM with KVBoost's connector", *INSIDE_VLLM, {"beside": "kvboost"}),
    System("vllm-lmcache", "vLLM with LMCache", *INSIDE_VLLM, {"beside": "lmcache"}),
    System("llama-cpp-python", "llama-cpp-python, 4 bits", "llama_cpp_python.py", *LLAMA),
    System("llama-server", "llama-server with cache reuse, 4 bits", "llama_server.py", *LLAMA),
)
SYSTEMS = {system.name: system for system in _ALL}
"""All systems by name, in the order of tables."""
OURS = ("kvboost-exact", "kvboost-auto", "vllm-kvboost")
"""Those that run our code."""


class WorkerProcess:
    """A worker in a process of its own, which takes commands until it is closed."""

    def __init__(
        self, system: System, python: Path, settings: Mapping[str, Any], log_path: Path
    ) -> None:
        """Start it, and wait until it is ready.

        Raises:
            KVBoostError: it ended or took too long; the message has the end of its log.
        """
        self._system, self._log_path = system, log_path
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory()
        command = [str(python), str(WORKERS / system.worker)]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps({**settings, **system.settings})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._variables(),
                text=True,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.versions: dict[str, str] = self._reply("start", START_S)["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, tokens: Sequence[int], num_new: int) -> dict[str, Any]:
        """The answer to a prompt and its times, as the worker says them."""
        return self._command({"do": "ask", "tokens": list(tokens), "num_new": num_new})

    def forget(self) -> None:
        """Let it drop all cached K/V."""
        self._command({"do": "forget"})

    def rest(self) -> None:
        """Wait until it does nothing any more."""
        self._command({"do": "rest"})

    def traffic(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Times and answers of prompts that come at their times (`at_s`), in their order."""
        reply = self._command({"do": "traffic", "requests": [dict(each) for each in requests]})
        answers: list[dict[str, Any]] = reply["answers"]
        return answers

    def close(self) -> None:
        """Ask the process to exit; kill it and its children if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.stdin.close()
            self._process.wait(LEAVE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _variables(self) -> dict[str, str]:
        """The worker's environment: only ours finds our package, and nothing beside it."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if self._system.name not in OURS:
            return inherited
        path = Path(self._folder.name)
        (path / PACKAGE.name).symlink_to(PACKAGE)
        return inherited | {"PYTHONPATH": str(path)}

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._error(f"has ended before `{command['do']}`") from None
        return self._reply(command["do"], COMMAND_S)

    def _reply(self, what: str, deadline_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise self._error(f"did not answer `{what}` in {deadline_s:.0f} s") from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
            raise self._error(f"ended during `{what}` with code {self._process.poll()}")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._error(f"answered `{what}` with what is no JSON") from None
        if "error" in reply:
            raise KVBoostError(f"{self._system.name}: `{what}` failed: {reply['error']}")
        return reply

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _error(self, what: str) -> KVBoostError:
        log = self._log_path.read_text(errors="replace")[-TAIL:].strip()
        return KVBoostError(f"{self._system.name} {what}; its log ends with:\n{log}")

"""What every worker does: commands in and replies out, a JSON document a line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions, version
from typing import Any, TextIO


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and how long they took."""

    ttft_s: float  # until the first token was there
    total_s: float
    tokens: list[int]
    num_cached: int | None = None  # prompt tokens that were not computed; None: not known
    stages_ms: dict[str, float] = field(default_factory=dict)

    def since(self, start: float) -> Answer:
        """The same with its times counted from `start`."""
        return replace(self, ttft_s=self.ttft_s - start, total_s=self.total_s - start)


@dataclass(frozen=True)
class Request:
    """A prompt that arrives at its time."""

    at_s: float  # since the traffic began
    tokens: list[int]
    num_new: int


class System(ABC):
    """Something that answers prompts, greedily and without an end before `num_new` tokens."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def versions(self) -> dict[str, str]:
        """Names and versions of what runs: of those packages that are installed."""
        present = [package for package in self.packages if any(distributions(name=package))]
        return {package: version(package) for package in present}

    @abstractmethod
    def forget(self) -> None:
        """Drop all cached K/V."""

    @abstractmethod
    def ask(self, tokens: list[int], num_new: int) -> Answer:
        """Answer one prompt."""

    def rest(self) -> None:
        """Wait until nothing goes on after the last answer."""
        return

    def traffic(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer prompts that come at their times; one after the other unless overridden.

        The times of an answer count from the arrival of its prompt.
        """
        return [self.ask_late(*each) for each in arrivals(requests)]

    def ask_late(self, request: Request, arrived_at: float) -> Answer:
        """Answer a prompt that may have waited."""
        waited_s = time.perf_counter() - arrived_at
        return self.ask(request.tokens, request.num_new).since(-waited_s)

    def close(self) -> None:
        """Give everything back."""
        return


def arrivals(requests: Sequence[Request]) -> Iterator[tuple[Request, float]]:
    """Requests as they come, each with the time when it did, by `time.perf_counter`."""
    started = time.perf_counter()
    for request in requests:
        arrived_at = started + request.at_s
        time.sleep(max(0.0, arrived_at - time.perf_counter()))
        yield request, arrived_at


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning of both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def wait_for(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], seconds: float, name: str
) -> None:
    """Wait until a server that was started takes requests."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            if is_ready():
                return
        time.sleep(0.1)
    raise RuntimeError(f"{name} did not start; see the log")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def serve(make: Callable[[dict[str, Any]], System]) -> None:
    """Make a system of the settings in the first argument, and do what standard input says."""
    commands, replies = _own_streams()
    system = make(json.loads(sys.argv[1]))
    _say(replies, {"ready": system.versions()})
    for line in commands:
        try:
            reply = handle(system, json.loads(line))
        except Exception as error:  # whatever a system raises is told, and the next command tried
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        _say(replies, reply)
    system.close()


def handle(system: System, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command; returns the reply."""
    match command["do"]:
        case "ask":
            return asdict(system.ask(command["tokens"], command["num_new"]))
        case "traffic":
            answers = system.traffic([Request(**each) for each in command["requests"]])
            return {"answers": [asdict(each) for each in answers]}
        case "forget":
            system.forget()
        case "rest":
            system.rest()
        case unknown:
            raise ValueError(f"no command {unknown!r}")
    return {"ok": True}


def _own_streams() -> tuple[TextIO, TextIO]:
    """Standard input and output for the protocol alone; what else prints goes to the log."""
    commands, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, replies


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()

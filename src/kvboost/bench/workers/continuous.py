"""Transformers' continuous batching, with its prefix sharing on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

import bare
import loop
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE_TOKENS = 64  # prompts share whole pages
BATCH_TOKENS = 512  # of a step
NUM_PROMPTS = 8  # of the longest kind, that the pages hold at the same time
POLL_S = 1.0  # after which it is checked that the batch still runs


class Continuous(loop.System):
    """One manager that runs until it is told to forget."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._host = bare.load(settings)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=settings.get("num_prompts", NUM_PROMPTS)
            * (settings["max_tokens"] // PAGE_TOKENS + 2),
            max_batch_tokens=BATCH_TOKENS,
            auto_switch_to_flash=False,
        )
        self._count = 0
        self._start()

    def forget(self) -> None:
        """Start anew: its pages cannot be emptied."""
        self.close()
        self._start()

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        started = time.perf_counter()
        (answer,) = self._collect([self._submit(tokens, num_new)])
        return answer.since(started)

    def traffic(self, requests: Sequence[loop.Request]) -> list[loop.Answer]:
        first = self._count + 1
        names = [_name(first + number) for number in range(len(requests))]
        times = list[float]()

        def submit_all() -> None:
            for request, arrived_at in loop.arrivals(requests):
                times.append(arrived_at)
                self._submit(request.tokens, request.num_new)

        arriving = Thread(target=submit_all)
        arriving.start()
        collected = self._collect(names)
        arriving.join()
        return [answer.since(at) for answer, at in zip(collected, times, strict=True)]

    def close(self) -> None:
        self._manager.stop(block=True)

    def _start(self) -> None:
        self._manager = self._host.init_continuous_batching(
            generation_config=bare.greedy(1), continuous_batching_config=self._config
        )
        self._manager.start()
        self._collect([self._submit([0], 1)])  # its pages are made with its first step

    def _submit(self, tokens: list[int], num_new: int) -> str:
        self._count += 1
        name = _name(self._count)
        self._manager.add_request(
            tokens, request_id=name, max_new_tokens=num_new, streaming=True, eos_token_id=-1
        )
        return name

    def _collect(self, names: Sequence[str]) -> list[loop.Answer]:
        """Wait for the answers to these prompts; their times are those of the clock."""
        first_at: dict[str, float] = {}
        done: dict[str, loop.Answer] = {}
        while len(done) < len(names):
            output = self._manager.get_result(timeout=POLL_S)
            now = time.perf_counter()
            if output is None:
                self._check()
                continue
            if output.error:
                raise RuntimeError(output.error)
            name = output.request_id
            if output.generated_tokens:
                first_at.setdefault(name, now)
            if output.is_finished():
                tokens = list(output.generated_tokens)
                done[name] = loop.Answer(first_at.get(name, now), now, tokens)
        return [done[name] for name in names]

    def _check(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("the batching thread has ended; its error is in the log")


def _name(number: int) -> str:
    return f"prompt-{number}"


if __name__ == "__main__":
    loop.serve(Continuous)

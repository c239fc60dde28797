"""KVBoost, called as a library; traffic goes through its batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import loop
import torch
from bare import DTYPES, FirstToken

from kvboost import KVBoost
from kvboost.core import Sampling


class Ours(loop.System):
    """An engine with the options that the settings give."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["num_threads"])
        dtype = DTYPES[settings["dtype"]]
        self._engine = KVBoost.from_pretrained(
            settings["model"], dtype=dtype, **settings["options"]
        )

    def versions(self) -> dict[str, str]:
        import kvboost  # noqa: PLC0415  (only its version is of interest)

        return {"kvboost": kvboost.__version__, **super().versions()}

    def forget(self) -> None:
        """Delete what is stored, once everything is."""
        self._engine.flush()
        self._engine.contents.delete(None, tenant="")

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        clock = FirstToken()
        started = time.perf_counter()
        result = self._engine.generate(
            tokens,
            max_new_tokens=num_new,
            eos_token_id=-1,
            do_sample=False,
            stopping_criteria=[clock],
        )
        ended = time.perf_counter()
        return loop.Answer(
            (clock.at or ended) - started,
            ended - started,
            list(result.token_ids),
            result.cached_tokens,
            dict(result.stages_ms),
        )

    def rest(self) -> None:
        """Wait for storing and audits."""
        self._engine.flush()

    def traffic(self, requests: Sequence[loop.Request]) -> list[loop.Answer]:
        waiting = []
        for request, arrived_at in loop.arrivals(requests):
            times = list[float]()
            sampling = Sampling(max_new_tokens=request.num_new, ignore_eos=True)
            ticket = self._engine.submit(
                request.tokens, sampling, listener=lambda _, to=times: to.append(_now())
            )
            ended = Future[float]()
            ticket.future.add_done_callback(lambda _, to=ended: to.set_result(_now()))
            waiting.append((ticket, arrived_at, times, ended))
        answers = []
        for ticket, arrived_at, times, ended in waiting:
            tokens = list(ticket.result().token_ids)
            answers.append(loop.Answer(times[0], ended.result(), tokens).since(arrived_at))
        return answers

    def close(self) -> None:
        self._engine.close()


def _now() -> float:
    return time.perf_counter()


if __name__ == "__main__":
    loop.serve(Ours)

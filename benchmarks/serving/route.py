"""What does the OpenAI route cost? The same prompts in process and through a local server.

In turns: `stream` (Transformers' generate), `submit` (the batch, as the server uses it) and the
`openai` client. The server is another process with a model of its own. What a class for LangChain
or LlamaIndex could save by calling the engine itself is the route beside `submit`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.material import dtype_name, engine_of, stream
from benchmarks.common.measure import Row, by_turns, median_ms, median_ratio
from benchmarks.serving.stalls import Stream
from kvboost import KVBoost

if TYPE_CHECKING:
    from openai import OpenAI

WAYS = ("stream", "submit", "route")
Ask = Callable[[str], tuple[float, float]]
"""Answers a prompt; seconds until the first piece of text, and in all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that questions share")
    parser.add_argument("--own", type=int, default=32, help="tokens of each question")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")


def run(options: argparse.Namespace) -> Iterator[Row]:
    about = {"prompt": options.prompt, "own": options.own, "new": options.new}
    with engine_of(options) as engine, _client(options) as client:
        ways = _ways(engine, client, options.new)
        for row in _table(_measure(ways, engine.tokenizer, options)):
            yield about | row


def _measure(
    ways: dict[str, Ask], words: Any, options: argparse.Namespace
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    def ask(way: str, turn: int) -> list[tuple[float, float]]:
        shared = words.decode(stream(words, options.prompt, seed=turn))
        asked = [words.decode(stream(words, options.own, 1000 + 2 * turn + n)) for n in (0, 1)]
        # In process the two ways share a store: each has a beginning of its own.
        return [ways[way](f"{way} {shared}\n\n{question}") for question in asked]

    rounds = by_turns({way: partial(ask, way) for way in WAYS}, options.rounds)
    return {
        (state, way): [each[number] for each in rounds[way]]
        for number, state in enumerate(("cold", "warm"))
        for way in WAYS
    }


def _table(times: dict[tuple[str, str], list[tuple[float, float]]]) -> Iterator[Row]:
    for (state, way), values in times.items():
        row: Row = {"state": state, "way": way}
        for place, what in enumerate(("ttft", "total")):
            own = [value[place] for value in values]
            base = [value[place] for value in times[state, "submit"]]
            row[f"{what}_ms"] = median_ms(own)
            row[f"{what}_to_submit"] = median_ratio(own, base)
        yield row


def _ways(engine: KVBoost, client: OpenAI, num_new: int) -> dict[str, Ask]:
    name = client.models.list().data[0].id

    def by_stream(prompt: str) -> tuple[float, float]:
        return _clock(lambda: engine.stream(prompt, num_new, min_new_tokens=num_new))

    def by_submit(prompt: str) -> tuple[float, float]:
        asked = Stream(engine, prompt, num_new)
        asked.ticket.result()
        return asked.times[0] - asked.started_at, time.perf_counter() - asked.started_at

    def by_route(prompt: str) -> tuple[float, float]:
        def answer() -> Iterator[str]:
            pieces = client.completions.create(
                model=name,
                prompt=prompt,
                max_tokens=num_new,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return (piece.choices[0].text for piece in pieces if piece.choices)

        return _clock(answer)

    return {"stream": by_stream, "submit": by_submit, "route": by_route}


def _clock(call: Callable[[], Iterator[str]]) -> tuple[float, float]:
    first, started = None, time.perf_counter()
    for piece in call():
        if piece and first is None:
            first = time.perf_counter()
    ended = time.perf_counter()
    return (first or ended) - started, ended - started


@contextlib.contextmanager
def _client(options: argparse.Namespace) -> Iterator[OpenAI]:
    """A client of a server that runs for as long as the block."""
    from openai import OpenAI  # noqa: PLC0415 - other benchmarks do without

    from servers import kvboost_server  # noqa: PLC0415 - needs pytest

    flags = ("--dtype", dtype_name(options))
    with (
        tempfile.TemporaryDirectory() as folder,
        kvboost_server(options.model, Path(folder) / "log", *flags) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        yield client

"""The package `kvboost` of PyPI, in the mode that it recommends."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import bare
import loop
from transformers import AutoTokenizer


class Public(loop.System):
    """Its engine on the same model in the same dtype; it takes texts only."""

    packages = ("kvboost", "torch", "transformers")

    def __init__(self, settings: dict[str, Any]) -> None:
        package = import_module("kvboost")  # theirs: ours is not on this worker's path
        self._words = AutoTokenizer.from_pretrained(settings["model"])
        self._mode = package.GenerationMode.CHUNK_KV_REUSE
        engine_words = AutoTokenizer.from_pretrained(settings["model"])
        engine_words.eos_token = None  # so that no token ends an answer early
        self._engine = package.KVBoost(
            bare.load(settings),
            engine_words,
            max_cache_bytes=settings["max_cache_bytes"],
            recompute_strategy="selective",
        )

    def forget(self) -> None:
        self._engine.reset_cache()

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        """Answer one prompt. The call returns when it has stored, so the total has that in it."""
        text = self._words.decode(tokens, clean_up_tokenization_spaces=False)
        answer, times = list[int](), list[float]()

        def note(token: int) -> None:
            answer.append(token)
            times.append(time.perf_counter())

        started = time.perf_counter()
        result = self._engine.generate(text, max_new_tokens=num_new, mode=self._mode, on_token=note)
        ended = time.perf_counter()
        return loop.Answer(times[0] - started, ended - started, answer, result.cached_tokens)


if __name__ == "__main__":
    loop.serve(Public)

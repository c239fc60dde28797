"""llama-cpp-python, which keeps the K/V of its last prompt."""

from __future__ import annotations

import os
import time
from importlib import import_module
from itertools import islice
from pathlib import Path
from sys import prefix
from typing import Any

import loop

LIBRARIES = Path(prefix).parent / "build" / "bin"  # where `kvboost bench setup llama` puts them


class LlamaCppPython(loop.System):
    """`Llama.generate`, below which there is no more text handling."""

    packages = ("llama-cpp-python",)

    def __init__(self, settings: dict[str, Any]) -> None:
        if LIBRARIES.exists():
            os.environ["LLAMA_CPP_LIB_PATH"] = str(LIBRARIES)
        self._llama = import_module("llama_cpp").Llama(
            settings["gguf"],
            n_ctx=settings["max_tokens"],
            n_threads=settings["num_threads"],
            n_threads_batch=settings["num_threads"],
            verbose=False,
        )

    def forget(self) -> None:
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()  # noqa: SLF001  (there is no other door)

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        started = time.perf_counter()
        new = self._llama.generate(tokens, temp=0.0, repeat_penalty=1.0)
        answer = [next(new)]
        first_at = time.perf_counter()
        answer += islice(new, num_new - 1)
        ended = time.perf_counter()
        num_cached = min(loop.num_common(held, tokens), len(tokens) - 1)
        return loop.Answer(first_at - started, ended - started, answer, num_cached)

    def close(self) -> None:
        self._llama.close()


if __name__ == "__main__":
    loop.serve(LlamaCppPython)

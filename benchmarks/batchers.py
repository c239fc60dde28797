"""Engines that answer many prompts at once, all called alike: greedy, a fixed number of tokens."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvboost import KVBoost
from kvboost.core import Sampling
from material import DTYPES, model, tokenizer

PAGE_TOKENS = 64  # of Transformers' cache: prompts share whole pages
BATCH_TOKENS = 512  # of a step of its continuous batching
VLLM_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


class Batcher(Protocol):
    """Something that answers prompts."""

    has_cache: bool  # whether a later call finds what an earlier one computed
    about: dict[str, Any]  # facts that its figures need beside them

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]: ...

    def close(self) -> None: ...


class Apart:
    """A batcher in a process of its own: several teams of threads in one would slow each other."""

    def __init__(self, make: Callable[..., Batcher], *arguments: Any, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        given = (other, torch.get_num_threads(), make, arguments, options)
        self._process = context.Process(target=_work, args=given, daemon=True)
        self._process.start()
        other.close()
        self.has_cache, self.about = self._pipe.recv()

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        self._pipe.send((prompts, num_new))
        answers: list[list[int]] = self._pipe.recv()
        return answers

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)


def _work(
    pipe: Connection,
    num_threads: int,
    make: Callable[..., Batcher],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(num_threads)
    batcher = make(*arguments, **options)
    pipe.send((batcher.has_cache, batcher.about))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(batcher.answer(*pipe.recv()))
    batcher.close()


class Ours:
    """All prompts are submitted at once; what they left is stored before the clock stops."""

    has_cache = True

    def __init__(self, name: str, dtype: str, num_prompts: int, **options: Any) -> None:
        host, words = model(name, DTYPES[dtype]), tokenizer(name)
        self._engine = KVBoost(host, words, max_batch_size=num_prompts, **options)
        self.about: dict[str, Any] = options

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
        tickets = [self._engine.submit(prompt, sampling) for prompt in prompts]
        answers = [list(ticket.result().token_ids) for ticket in tickets]
        self._engine.flush()
        return answers

    def close(self) -> None:
        self._engine.close()


class OneByOne:
    """Transformers' `generate()`, a prompt after the other."""

    has_cache = False

    def __init__(self, name: str, dtype: str) -> None:
        self._host = model(name, DTYPES[dtype])
        self.about: dict[str, Any] = {}

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        config = _greedy(num_new)
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = self._host.generate(ids, attention_mask=mask, generation_config=config)
            answers.append(output[0, len(prompt) :].tolist())
        return answers

    def close(self) -> None:
        pass


class ContinuousBatching:
    """Transformers' own, with its prefix sharing on."""

    has_cache = False  # the cache is made anew for each call

    def __init__(self, name: str, dtype: str) -> None:
        self._host = model(name, DTYPES[dtype])
        self.about = {"page_tokens": PAGE_TOKENS, "batch_tokens": BATCH_TOKENS}

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        longest = max(map(len, prompts)) + num_new
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=len(prompts) * (longest // PAGE_TOKENS + 2),
            max_batch_tokens=BATCH_TOKENS,
            auto_switch_to_flash=False,
        )
        results = self._host.generate_batch(
            list(prompts),
            generation_config=_greedy(num_new),
            continuous_batching_config=config,
            max_new_tokens=num_new,
        )
        return [result.generated_tokens for result in results.values()]

    def close(self) -> None:
        pass


class Vllm:
    """vLLM with prefix caching, in another Python that has it installed."""

    has_cache = True

    def __init__(
        self, python: str, model: str, dtype: str, max_tokens: int, *, is_eager: bool
    ) -> None:
        num_threads = torch.get_num_threads()
        # Cores instead of a number of threads: told a number, its scheduler takes as many, too.
        cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}" if num_threads > 1 else "0"}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH")
        }
        program = Path(__file__).with_name("vllm_worker.py")
        command = [python, str(program), model, VLLM_DTYPES[dtype], str(max_tokens)]
        self._process = subprocess.Popen(
            [*command, "--eager"] if is_eager else command,
            env=inherited | cores,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._read()

    def answer(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        self._process.stdin.flush()
        answers: list[list[int]] = self._read()["answers"]
        return answers

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with code {self._process.wait()}: see above")
        message: dict[str, Any] = json.loads(line)
        return message


def _greedy(num_new: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=-1,  # no token has it: the answer has its full length
        pad_token_id=0,
    )

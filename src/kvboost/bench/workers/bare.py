"""Transformers' own `generate()`, without a cache between calls or with a prefix kept by hand."""

from __future__ import annotations

import time
from typing import Any

import loop
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token was there; stops nothing."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called after each token."""
        if self.at is None:
            input_ids[0, -1].item()  # waits for the device
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Bare(loop.System):
    """Every prompt is computed in full."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._host = load(settings)

    def forget(self) -> None:
        """Nothing is kept."""

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        return self._generate(tokens, num_new, time.perf_counter(), 0)

    def _generate(
        self, tokens: list[int], num_new: int, started: float, num_cached: int, **arguments: Any
    ) -> loop.Answer:
        ids = torch.tensor([tokens], device=self._host.device)
        clock = FirstToken()
        output = self._host.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy(num_new),
            stopping_criteria=StoppingCriteriaList([clock]),
            **arguments,
        )
        answer = output[0, len(tokens) :].tolist()
        ended = time.perf_counter()
        return loop.Answer((clock.at or ended) - started, ended - started, answer, num_cached)


class Prefix(Bare):
    """Keeps the K/V of the last prompt and its answer, and computes what differs from them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.forget()

    def forget(self) -> None:
        self._cache, self._held = DynamicCache(config=self._host.config), list[int]()

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        started = time.perf_counter()
        shared = min(loop.num_common(self._held, tokens), len(tokens) - 1)
        if shared == 0:
            self.forget()
        elif shared < len(self._held):
            self._cache.crop(shared - len(self._held))
        self._held = []  # until the answer is there: a call that fails leaves nothing to trust
        cache = self._cache
        answer = self._generate(tokens, num_new, started, shared, past_key_values=cache)
        self._held = [*tokens, *answer.tokens][: cache.get_seq_length()]
        return answer


def load(settings: dict[str, Any]) -> Any:
    """The model of the settings, on a GPU if there is one."""
    torch.set_num_threads(settings["num_threads"])
    dtype = DTYPES[settings["dtype"]]
    host = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    return host.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def greedy(num_new: int) -> GenerationConfig:
    """The most likely tokens, as many as asked for."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=-1,  # no token has it: the answer has its full length
        pad_token_id=0,
    )


if __name__ == "__main__":
    loop.serve(lambda settings: (Prefix if settings.get("keeps_prefix") else Bare)(settings))

"""A tokenizer, workers and a judge that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvboost.bench.settings import Settings
from kvboost.errors import KVBoostError


class WordTokenizer:
    """A token for each different word."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[self._token(word) for word in text.split()])

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        said = " ".join(f"<{each['role']}> {each['content']}" for each in messages)
        return f"{said} <assistant> "

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def _token(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


@dataclass
class FakeWorker:
    """Answers with the first tokens of a prompt; a `speed` in ms a prompt token."""

    log: list[str]
    name: str
    ms_per_token: float
    fails_after: int | None = None
    versions: Any = None
    num_asked: int = 0

    def forget(self) -> None:
        self.log.append(f"{self.name} forget")

    def rest(self) -> None:
        self.log.append(f"{self.name} rest")

    def ask(self, tokens: Sequence[int], num_new: int) -> dict[str, Any]:
        self.num_asked += 1
        if self.fails_after is not None and self.num_asked > self.fails_after:
            raise KVBoostError(f"{self.name} has ended; its log ends with:\n/somewhere/else")
        self.log.append(f"{self.name} ask")
        ttft_s = self.ms_per_token * len(tokens) / 1e3
        return {
            "ttft_s": ttft_s,
            "total_s": 2 * ttft_s,
            "tokens": list(tokens[:num_new]),
            "num_cached": 0,
            "stages_ms": {"forward": 1e3 * ttft_s, "decode": 1e3 * ttft_s},
        }

    def traffic(self, requests: Sequence[Any]) -> list[dict[str, float]]:
        return [{"ttft_s": 0.1, "total_s": 0.2} for _ in requests]

    def close(self) -> None:
        self.log.append(f"{self.name} close")


class FakeJudge:
    judged: list[tuple[int, ...]] = []  # noqa: RUF012  (of all that were made)

    def __init__(self, model: str) -> None:
        del model

    def verdict(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, float]:
        del prompt
        self.judged.append(tuple(answer))
        return {"top1": 0.5, "regret": 0.1}


def settings(**changed: Any) -> Settings:
    given: dict[str, Any] = {
        "model": "/somewhere/model",
        "gguf": None,
        "data": None,
        "dtype": "fp32",
        "seed": 0,
        "rounds": 2,
        "num_tokens": 80,
        "systems": ("transformers", "kvboost-exact", "vllm"),
        "workloads": ("system-prompt", "rag-shuffled"),
        "questions": (),
        "is_quick": False,
    }
    return Settings(**(given | changed))

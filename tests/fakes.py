"""Stand-ins at the seams: a K/V buffer without a model, and a tier that fails on demand."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import torch

from kvboost.core import KVGeometry, PlaneGroup, PrefixKey, Rotation, Span
from kvboost.errors import TierUnavailable
from kvboost.tiers.base import Tier
from kvboost.tiers.memory import MemoryTier

GEOMETRY = KVGeometry(
    num_layers=2,
    groups=(PlaneGroup((0, 1, 2), heads=2, head_dim=4), PlaneGroup((3,), heads=1, head_dim=6)),
    dtype="float32",
    itemsize=4,
)


class FakeSlots:
    """Rows of distinct numbers, so that a row in the wrong place is seen."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        self.exact_stop = sys.maxsize
        generator = torch.Generator().manual_seed(seed)
        self.rows = [
            torch.randn(len(g.planes), g.heads, num_tokens, g.head_dim, generator=generator)
            for g in GEOMETRY.groups
        ]

    def write(self, span: Span, kv: list[torch.Tensor]) -> None:
        for rows, source in zip(self.rows, kv, strict=True):
            rows[:, :, span.start : span.stop] = source[:, :, : len(span)]

    def read(self, span: Span) -> list[torch.Tensor]:
        return [rows[:, :, span.start : span.stop] for rows in self.rows]


class FakeModel:
    """A geometry and rotations, as `place` wants them: K planes turn, V planes do not."""

    geometry = GEOMETRY
    rotations = {  # noqa: RUF012
        0: Rotation((1.0, 0.1), 0, "half"),
        1: None,
        2: Rotation((1.0, 0.1), 0, "half"),
        3: None,
    }


class FaultyTier(MemoryTier):
    """Raises, loses or truncates what it holds, once told to."""

    fault = ""

    def get(self, key: PrefixKey) -> memoryview | None:
        frame = super().get(key)
        if self.fault == "down":
            raise TierUnavailable("the tier is down")
        if self.fault == "lost":
            return None
        return frame[:-4] if self.fault == "truncated" and frame is not None else frame

    def put(self, key: PrefixKey, frame: memoryview) -> list[PrefixKey]:
        if self.fault == "down":
            raise TierUnavailable("the tier is down")
        return super().put(key, frame)


def fill(tier: Tier, names: Iterable[str], size_bytes: int = 10) -> list[PrefixKey]:
    """Put entries under short names; return what was evicted on the way."""
    evicted: list[PrefixKey] = []
    for name in names:
        evicted += tier.put(PrefixKey(name.encode()), memoryview(bytes(size_bytes)))
    return evicted


class WordTokenizer:
    """Token 17 is the word "17": enough to follow ids through the engine."""

    chat_template = "words"

    def __call__(self, text: str, **_: object) -> object:
        return type("Encoding", (), {"input_ids": [int(word) for word in text.split()]})()

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f"{int(token)} " for token in tokens)

    def batch_decode(self, sequences: list[list[int]], **_: object) -> list[str]:
        return [self.decode(tokens) for tokens in sequences]

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(512)}

    def apply_chat_template(self, messages: list[dict], **_: object) -> dict[str, list[int]]:
        return {"input_ids": [n for m in messages for n in (3, *self(m["content"]).input_ids, 4)]}


def words(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that `WordTokenizer` knows, others for every seed."""
    return random.Random(seed).choices(range(5, 500), k=num_tokens)

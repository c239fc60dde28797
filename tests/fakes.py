"""Stand-ins at the seams: a K/V buffer without a model, and a tier that fails on demand."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvboost.codecs.frame import MAGIC, Head, owner_of, read
from kvboost.codecs.raw import RawCodec
from kvboost.core import FrameKey, KVGeometry, Owner, PlaneGroup, PrefixKey, Rotation, Span
from kvboost.errors import TierUnavailable
from kvboost.metrics import Metrics
from kvboost.tiers.base import OwnTier, StoredChunk, Tier, TierStats
from kvboost.tiers.host import HostFrames
from kvboost.tiers.index import ChunkIndex
from kvboost.tiers.memory import MemoryTier
from kvboost.tiers.stack import Opener, TierStack
from kvboost.tiers.store import ChunkStore
from waiting import at_once

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

    def place(self, span: Span, chunk: StoredChunk, offset: int) -> None:
        self.write(span, [part[:, :, offset : offset + len(span)] for part in chunk.kv()])

    def write(self, span: Span, kv: list[torch.Tensor]) -> None:
        for rows, source in zip(self.rows, kv, strict=True):
            rows[:, :, span.start : span.stop] = source

    def read(self, span: Span) -> list[torch.Tensor]:
        return [rows[:, :, span.start : span.stop] for rows in self.rows]

    def turn(self, span: Span, change: Callable[[list[torch.Tensor]], None]) -> None:
        change(self.read(span))


class FakeModel:
    """A geometry and rotations, as `place` wants them: K planes turn, V planes do not."""

    geometry = GEOMETRY
    rotations = {  # noqa: RUF012
        0: Rotation((1.0, 0.1), 0, "half"),
        1: None,
        2: Rotation((1.0, 0.1), 0, "half"),
        3: None,
    }


class FaultyTier(Tier):
    """A shared tier in a dict, which fails, hangs, loses or spoils what it holds once told to."""

    name = "faulty"

    def __init__(self) -> None:
        self.frames: dict[FrameKey, bytes] = {}
        self.fault = ""
        self.thawed = threading.Event()

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        self._stumble()
        found = {key: self.frames[key] for key in keys if key in self.frames}
        if self.fault == "lost":
            return {}
        if self.fault == "truncated":
            found = {key: frame[:-4] for key, frame in found.items()}
        if self.fault == "corrupted":
            found = {key: frame[:-1] + bytes([frame[-1] ^ 1]) for key, frame in found.items()}
        return {key: memoryview(bytearray(frame)) for key, frame in found.items()}

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        self._stumble()
        self.frames.update({key: bytes(frame) for key, frame in frames.items()})
        return []

    def discard(self, keys: Iterable[FrameKey]) -> None:
        self._stumble()
        for key in keys:
            self.frames.pop(key, None)

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        self.discard(keys)
        whose = {k: owner_of(memoryview(f)) for k, f in self.frames.items() if f[:4] == MAGIC}
        self.discard([key for key, owner in whose.items() if owner in owners])

    @property
    def num_chunks(self) -> int:
        return sum(frame[:4] == MAGIC for frame in self.frames.values())  # the others are notes

    def stats(self) -> TierStats:
        return TierStats(len(self.frames), sum(map(len, self.frames.values())), 0)

    def _stumble(self) -> None:
        if self.fault == "down":
            raise TierUnavailable("the tier is down")
        if self.fault == "frozen":
            self.thawed.wait()
        if self.fault == "slow":
            time.sleep(0.08)


class FaultyDisk(FaultyTier, OwnTier):
    """The same as a tier that knows what it holds."""

    def holds(self, key: FrameKey) -> bool:
        return key in self.frames

    def heads(self) -> list[Head]:
        return [read(memoryview(frame)) for frame in self.frames.values() if frame[:4] == MAGIC]


def store_of(
    budget_bytes: int = 10**9,
    below: Sequence[Tier] = (),
    deadline_s: float = 5.0,
    geometry: KVGeometry = GEOMETRY,
) -> ChunkStore:
    """A store in memory, on top of other tiers."""
    metrics = Metrics()
    tiers = TierStack(MemoryTier(budget_bytes), HostFrames(RawCodec(geometry)), metrics, deadline_s)
    store = ChunkStore(ChunkIndex(), tiers, RawCodec(geometry), metrics)
    for number, tier in enumerate(below):
        opener = Opener(f"{tier.name}-{number}", lambda tier=tier: tier)
        tiers.add_below(opener, store.adopt)
    return store


def random_frames(num_frames: int, size_bytes: int) -> dict[FrameKey, memoryview]:
    """Bytes that are no frames, under keys that nobody has."""
    return {
        PrefixKey(os.urandom(32)): memoryview(os.urandom(size_bytes)) for _ in range(num_frames)
    }


def check_with_threads(tier: Tier, num_rounds: int, num_frames: int) -> None:
    """Eight threads put, get and discard frames of other sizes at once."""

    def work(size_bytes: int) -> None:
        for _ in range(num_rounds):
            frames = random_frames(num_frames, size_bytes)
            assert tier.put(frames) == []
            assert tier.get(list(frames)) == frames
            tier.discard(frames)

    at_once(work, [1000 * 3**n for n in range(8)])


def fake_chunk(content: bytes, owner: int = 0) -> Any:
    """A chunk of which no more is true than its size and whose it is."""
    entry = SimpleNamespace(space=bytes([owner]) * 32)
    return SimpleNamespace(
        nbytes=len(content), entry=entry, is_in_use=False, frame=lambda: memoryview(content)
    )


def fill(tier: MemoryTier, names: Iterable[str], size_bytes: int = 10) -> list[PrefixKey]:
    """Put entries under short names; return what was evicted on the way."""
    evicted: list[PrefixKey] = []
    for name in names:
        evicted += tier.put({PrefixKey(name.encode()): fake_chunk(bytes(size_bytes))})
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

    def apply_chat_template(
        self, messages: list[dict], *, tokenize: bool = True, **_: object
    ) -> str | dict[str, list[int]]:
        text = " ".join(f"3 {message['content']} 4" for message in messages)
        return {"input_ids": self(text).input_ids} if tokenize else text


def words(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that `WordTokenizer` knows, others for every seed."""
    return random.Random(seed).choices(range(5, 500), k=num_tokens)


MERGES = [("Ġ", "Ġ"), ('"', ":"), ('"', ","), ("}", "}"), ("a", "b"), ('"', "}"), ("1", "2")]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, some pairs are, and the last one ends an answer."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    model = BPE({piece: number for number, piece in enumerate(pieces)}, MERGES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")

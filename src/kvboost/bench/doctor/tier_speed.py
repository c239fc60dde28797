"""How fast tiers are, with frames of the size that a model's chunks have."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvboost.bench.clock import seconds
from kvboost.bench.doctor.facts import TierSpeed
from kvboost.codecs.frame import allocate, check, write
from kvboost.codecs.raw import RawCodec
from kvboost.core import (
    TOKEN_BYTES,
    Entry,
    FrameKey,
    KVGeometry,
    Namespace,
    PrefixKey,
    Provenance,
)
from kvboost.errors import KVBoostError
from kvboost.tiers.base import Tier
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.redis import RedisTier

if TYPE_CHECKING:
    from kvboost.codecs.base import KV

ALL_BYTES = 48 << 20  # about what is written to each tier
NUM_ROUNDS = 3
MOST_PER_ROUND = 8
REDIS_TIMEOUT_S = 5.0

Frames = Mapping[FrameKey, memoryview]


def random_kv(geometry: KVGeometry, num_tokens: int) -> KV:
    """K/V of a chunk that nothing can compress."""
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    return [
        torch.randn(len(group.planes), group.heads, num_tokens, group.head_dim).to(dtype)
        for group in geometry.groups
    ]


def make_frames(geometry: KVGeometry, num_tokens: int) -> list[Frames]:
    """Frames of chunks of `num_tokens`, for each round its own."""
    kv, codec, space = random_kv(geometry, num_tokens), RawCodec(geometry), os.urandom(32)
    most = ALL_BYTES // NUM_ROUNDS // codec.size(num_tokens)
    num_frames = min(max(1, most), MOST_PER_ROUND)

    def frame() -> tuple[FrameKey, memoryview]:
        key = PrefixKey(os.urandom(32))
        entry = Entry(
            tokens=bytes(TOKEN_BYTES * num_tokens),
            provenance=Provenance.EXACT,
            prefix=key,
            content=None,
            parent=None,
            home=0,
            space=Namespace(space),
        )
        return key, write(entry, kv, codec)

    return [dict(frame() for _ in range(num_frames)) for _ in range(NUM_ROUNDS)]


def memory_speed(rounds: list[Frames]) -> TierSpeed:
    """Of memory: frames copied in, and copied into rows."""
    rows = allocate(max(frame.nbytes for frames in rounds for frame in frames.values()))
    puts, gets = [], []
    for frames in rounds:
        copies: list[memoryview] = []
        puts.append(_size([frames]) / seconds(partial(copies.extend, _copies(frames))))
        gets.append(_size([frames]) / seconds(partial(_copy_all, copies, rows)))
    return TierSpeed("memory", median(puts), median(gets), 0.0)


def disk_speed(folder: str, rounds: list[Frames]) -> TierSpeed:
    """Of a new folder in `folder`, which is removed; reads come from the disk where they can.

    Where `folder` is not there yet, the nearest one above it takes its place.
    """
    budget_bytes = 4 * _size(rounds)
    wanted = Path(folder).expanduser()
    try:
        there = next(each for each in (wanted, *wanted.parents) if each.exists())
        free_bytes = shutil.disk_usage(there).free
        if free_bytes < 2 * budget_bytes:
            return TierSpeed("disk", problem=f"{folder} has only {free_bytes >> 20} MiB left")
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=there) as inside:
            tier = DiskTier(Path(inside), budget_bytes)
            return _speed("disk", tier, rounds, lambda: _drop_pages(Path(inside)), free_bytes)
    except (OSError, KVBoostError) as error:
        return TierSpeed("disk", problem=str(error))


def redis_speed(url: str, rounds: list[Frames]) -> TierSpeed:
    """Of a server; what was put there is removed."""
    try:
        return _speed("redis", RedisTier(url, REDIS_TIMEOUT_S), rounds, forget=lambda: None)
    except KVBoostError as error:
        return TierSpeed("redis", problem=str(error))


def _speed(
    name: str,
    tier: Tier,
    rounds: list[Frames],
    forget: Callable[[], None],
    free_bytes: int | None = None,
) -> TierSpeed:
    puts, gets, answers = [], [], []
    rows = allocate(max(frame.nbytes for frames in rounds for frame in frames.values()))
    try:
        for frames in rounds:
            size_bytes = sum(frame.nbytes for frame in frames.values())
            answers.append(seconds(lambda: tier.get([PrefixKey(os.urandom(32))])))
            puts.append(size_bytes / seconds(partial(_put, tier, frames)))
            forget()
            gets.append(size_bytes / seconds(partial(_get, tier, frames, rows)))
            tier.discard(frames)
    finally:
        tier.close()
    return TierSpeed(name, median(puts), median(gets), 1e3 * median(answers), free_bytes)


def _put(tier: Tier, frames: Frames) -> None:
    if tier.put(frames):
        raise KVBoostError("it has no room for what was to be measured")


def _get(tier: Tier, frames: Frames, rows: memoryview) -> None:
    """As the engine does it: what comes from outside is checked, then copied into rows."""
    found = tier.get(list(frames))
    if len(found) < len(frames):
        raise KVBoostError(f"{len(frames) - len(found)} of {len(frames)} frames did not come back")
    for key, frame in found.items():
        check(frame, key)
    _copy_all(found.values(), rows)


def _copy_all(frames: Iterable[memoryview], rows: memoryview) -> None:
    for frame in frames:
        rows[: frame.nbytes] = frame


def _copies(frames: Frames) -> Iterator[memoryview]:
    for frame in frames.values():
        copy = allocate(frame.nbytes)
        copy[:] = frame
        yield copy


def _size(rounds: list[Frames]) -> int:
    return sum(frame.nbytes for frames in rounds for frame in frames.values())


def _drop_pages(folder: Path) -> None:
    """Have the system forget what it holds of the files, so that reading reads."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

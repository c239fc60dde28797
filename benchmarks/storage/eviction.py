"""Which chunks should leave a full tier? Hit rates of policies on a trace of block ids."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from benchmarks.common.measure import Row
from benchmarks.storage.policies import (
    ARC,
    GDSF,
    LFU,
    LRU,
    LRU2,
    S3FIFO,
    SIEVE,
    Cache,
    Clairvoyant,
    TwoQ,
)
from kvboost.core import PrefixKey
from kvboost.tiers.eviction import ReuseDensity

SHARES = (0.01, 0.03, 0.10, 0.30)  # of the working set
BLOCK_BYTES = 1024  # any number: all blocks have the same size
Requests = Sequence[Sequence[int]]


class Ours(Cache):
    """The policy of the memory tier, told what that tier would tell it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._eviction = ReuseDensity(num_blocks * BLOCK_BYTES)
        self._blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def request(self, blocks: Sequence[int]) -> None:
        last_first = [(block, _key(block)) for block in reversed(blocks)]
        self._eviction.use([key for block, key in last_first if block in self._blocks])
        new = {key: BLOCK_BYTES for block, key in last_first if block not in self._blocks}
        self._eviction.add(new)
        self._blocks.update(blocks)
        excess = len(self._blocks) - self.num_blocks
        victims = [key for key, _ in zip(self._eviction.victims(), range(excess), strict=False)]
        for key in victims:
            self._eviction.remove(key)
            self._blocks.remove(int.from_bytes(key, "big"))


POLICIES: dict[str, Callable[[int], Cache]] = {
    "ours": Ours,
    "LRU": LRU,
    "LFU": LFU,
    "ARC": ARC,
    "LRU-2": LRU2,
    "GDSF": GDSF,
    "S3-FIFO": S3FIFO,
    "SIEVE": SIEVE,
    "2Q": TwoQ,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", nargs="+", required=True, help="JSON lines with `hash_ids`")
    parser.add_argument("--halves", action="store_true", help="also each half, from empty caches")


def run(options: argparse.Namespace) -> Iterator[Row]:
    for name in options.trace:
        requests, label = read(Path(name)), Path(name).stem
        yield from eviction(requests, label)
        if options.halves:
            middle = len(requests) // 2
            yield from eviction(requests[:middle], f"{label}, first half")
            yield from eviction(requests[middle:], f"{label}, second half")


def eviction(requests: Requests, label: str) -> Iterator[Row]:
    """A row for each policy and size."""
    working_set = len({block for blocks in requests for block in blocks})
    policies = POLICIES | {"clairvoyant": lambda size: Clairvoyant(size, requests)}
    for policy, build in policies.items():
        for share in SHARES:
            started = time.perf_counter()
            prefix, plain = replay(build(round(share * working_set)), requests)
            taken = time.perf_counter() - started
            row = {"trace": label, "requests": len(requests), "working_set": working_set}
            row |= {"policy": policy, "share": share, "blocks": round(share * working_set)}
            row |= {"prefix_hits": round(prefix, 5), "block_hits": round(plain, 5)}
            yield row | {"us_per_block": round(1e6 * taken / sum(map(len, requests)), 2)}


def read(file: Path) -> list[list[int]]:
    with file.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def replay(cache: Cache, requests: Requests) -> tuple[float, float]:
    """Shares of all blocks: leading ones that were all there, and ones that were there at all."""
    prefix = plain = total = 0
    for blocks in requests:
        present = [block in cache for block in blocks]
        prefix += sum(takewhile(bool, present))
        plain += sum(present)
        total += len(blocks)
        cache.request(blocks)
    return prefix / total, plain / total


def _key(block: int) -> PrefixKey:
    return PrefixKey(block.to_bytes(16, "big"))

"""Every call of the disk tier to the system fails once, and once for good, as SQLite is tested.

Whatever fails, no wrong byte is read, nothing that was acknowledged is lost, what was erased is
gone, no descriptor leaks, and the tier works again afterwards.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from fakes import GEOMETRY, FakeSlots
from kvboost.codecs import frame
from kvboost.codecs.raw import RawCodec
from kvboost.core import Entry, FrameKey, Namespace, Owner, PrefixKey, Provenance, Span
from kvboost.errors import TierUnavailable
from kvboost.tiers.disk.tier import DiskTier
from nth_call import ERRORS, Calls, counted_calls

BUDGET_BYTES = 1 << 20
NUM_TOKENS = 240  # three frames to a segment
SECRETS = range(3, 6)  # frames of an owner that is erased
EPOCH = PrefixKey(b"epoch".ljust(32))


def frame_of(number: int) -> tuple[FrameKey, bytes]:
    tokens = random.Random(number).randbytes(4 * NUM_TOKENS)
    key = PrefixKey(sha256(tokens).digest())
    space = Namespace(bytes([number in SECRETS]) * 32)
    entry = Entry(tokens, Provenance.EXACT, key, None, None, 0, space)
    kv = FakeSlots(NUM_TOKENS, seed=number).read(Span(0, NUM_TOKENS))
    return key, bytes(frame.write(entry, kv, RawCodec(GEOMETRY)))


FRAMES = [frame_of(number) for number in range(48)]
VALUES = dict(FRAMES)


class Story:
    """What happens to a folder, and what must be true of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tier: DiskTier | None = None
        self.held: set[FrameKey] = set()  # acknowledged, and not given back since
        self.epoch = 0
        self.is_erased = False
        self.num_refused = 0

    def run(self) -> None:
        """Use everything that a tier can do."""
        self.attempt(self.open)
        for number in range(40):
            self.attempt(self.put, number)
            if number == 8:
                self.attempt(self.erase)
            if number % 6 == 0:
                self.attempt(self.look, FRAMES[number // 2][0])
        self.attempt(self.discard, FRAMES[38][0])
        self.attempt(self.raise_epoch)
        self.attempt(self.compact)
        self.attempt(self.close)
        self.attempt(self.open)
        self.attempt(lambda: [head.entry.key for head in self.opened.heads()])
        self.attempt(self.put, 40)
        self.attempt(self.look, *VALUES)

    def attempt(self, act: Callable[..., object], *args: object) -> None:
        try:
            act(*args)
        except (TierUnavailable, MemoryError):
            self.num_refused += 1

    @property
    def opened(self) -> DiskTier:
        if self.tier is None:
            self.open()
        assert self.tier is not None
        return self.tier

    def open(self) -> None:
        self.tier = DiskTier(self.folder, BUDGET_BYTES)

    def close(self) -> None:
        tier, self.tier = self.tier, None
        if tier is not None:
            self.held.difference_update(tier._left)  # whom the next `put` would have told
            tier.close()

    def put(self, number: int) -> None:
        key, value = FRAMES[number]
        left = self.opened.put({key: memoryview(value)})
        self.held.add(key)
        self.held.difference_update(left)

    def look(self, *keys: FrameKey) -> None:
        for key, found in self.opened.get(keys).items():
            assert found in (VALUES[key], b"")

    def discard(self, key: FrameKey) -> None:
        self.held.discard(key)
        self.opened.discard([key])

    def erase(self) -> None:
        self.held.difference_update(FRAMES[number][0] for number in SECRETS)
        gc.collect()  # views of the file, kept by tracebacks
        self.opened.erase([], [Owner(bytes([1]) * frame.OWNER_BYTES)])
        self.is_erased = True

    def raise_epoch(self) -> None:
        self.opened.raise_epoch(EPOCH, 7)
        self.epoch = 7

    def compact(self) -> None:
        self.opened.compact()

    def check(self) -> None:
        """After the fault has passed."""
        self.put(41)
        self.look(FRAMES[41][0])
        for _ in range(2):  # in this process, and in the next one
            found = self.opened.get(list(VALUES))
            assert all(value == VALUES[key] for key, value in found.items() if value)
            assert self.held <= {key for key, value in found.items() if value}
            assert self.opened.epoch(EPOCH) >= self.epoch
            del found
            self.close()
        if self.is_erased:
            stored = b"".join(path.read_bytes() for path in self.folder.iterdir())
            assert not any(FRAMES[number][1][64:] in stored for number in SECRETS)


def num_calls(calls: Calls, folder: Path) -> int:
    calls.fail(0, forever=False, error="EIO")
    calls.heal()
    story = Story(folder)
    story.run()
    num = calls.num
    assert story.num_refused == 0 and len(story.held) > 15
    story.check()
    return num


CASES = [(error, forever) for error in ERRORS for forever in (False, True)]


@pytest.mark.parametrize("step", [len(CASES), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_call_that_fails_costs_no_byte(tmp_path: Path, case: int, step: int) -> None:
    """Together, the short versions fail each call once."""
    error, forever = CASES[case]
    gc.collect()
    num_open = len(os.listdir("/proc/self/fd"))
    gc.freeze()  # so that collecting is quick
    with counted_calls() as calls, ExitStack() as after:
        after.callback(gc.unfreeze)
        num = num_calls(calls, tmp_path / "calm")
        assert num > 200
        for nth in range(1 + case % step, num + 1, step):
            story = Story(tmp_path / str(nth))
            calls.fail(nth, forever=forever, error=error)
            story.run()
            calls.heal()
            where = f"call {nth} of {num} ({', '.join(calls.failed[:3])})"
            try:
                story.check()
            except BaseException as failure:
                failure.add_note(where)
                raise
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == num_open, where
            for path in story.folder.iterdir():
                path.unlink()

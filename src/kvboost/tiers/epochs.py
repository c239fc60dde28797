"""Epochs: how often everything of a tenant was deleted.

The epoch is part of every key. One more of it, and nothing that was stored before is found again,
by any process that knows: one small value in a shared tier tells them all.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from xxhash import xxh3_64_digest

from kvboost.codecs.frame import OWNER_BYTES, FrameError
from kvboost.core import ContentKey, FrameKey, Owner

MOST_PAST = 64  # epochs whose frames are looked for
_BODY = struct.Struct("<Q")  # the epoch; a checksum follows


@dataclass(frozen=True, eq=False)
class Erasure:
    """What is to be gone from a tier: frames by their keys, and all frames of some owners.

    With `epoch`, the tier keeps a tenant's new one, by its key. If the tier has that epoch or a
    later one already, `outdated` is told: somebody else has deleted, and stored since.
    """

    keys: frozenset[FrameKey] = frozenset()
    owners: frozenset[Owner] = frozenset()
    epoch: tuple[FrameKey, int] | None = None
    outdated: Callable[[int], object] = lambda _: None


@dataclass
class Epochs:
    """The epochs that this process knows, of tenants that had something deleted."""

    _known: dict[FrameKey, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, tenant: str) -> int:
        """0: nothing was ever deleted, as far as this process knows."""
        return self._known.get(epoch_key(tenant), 0)

    def all(self) -> dict[FrameKey, int]:
        """By their keys."""
        return dict(self._known)

    def learn(self, key: FrameKey, epoch: int) -> None:
        """Take note of an epoch, unless a later one is known."""
        with self._lock:
            self._known[key] = max(epoch, self._known.get(key, 0))


def owner(tenant: str, epoch: int) -> Owner:
    """Whose a frame is, whatever model made it: the first half of its namespace."""
    said = tenant.encode()
    digest = sha256(b"owner" + len(said).to_bytes(4, "little") + said + b"%d" % epoch)
    return Owner(digest.digest()[:OWNER_BYTES])


def past_owners(tenant: str, known: int, epoch: int) -> list[Owner]:
    """What the tenant was from a known epoch on until before this one."""
    return [owner(tenant, past) for past in range(max(known, epoch - MOST_PAST), epoch)]


def epoch_key(tenant: str) -> FrameKey:
    """Under which a shared tier has the epoch of a tenant."""
    return ContentKey(sha256(b"epoch" + tenant.encode()).digest())


def write_epoch(key: FrameKey, epoch: int) -> memoryview:
    """An epoch as it is stored under `key`."""
    body = _BODY.pack(epoch)
    return memoryview(body + xxh3_64_digest(key + body))


def read_epoch(note: memoryview) -> int:
    """The epoch of a note."""
    epoch: int = _BODY.unpack_from(note)[0]
    return epoch


def check_epoch(note: memoryview, key: FrameKey) -> None:
    """Raise `FrameError` unless this is an epoch that was written under `key`."""
    body, seal = bytes(note[: _BODY.size]), bytes(note[_BODY.size :])
    if len(body) != _BODY.size or xxh3_64_digest(key + body) != seal:
        raise FrameError("a damaged epoch")

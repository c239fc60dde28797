"""Epochs: how often all K/V of a tenant was deleted.

The epoch is part of every key: after the next one, nothing that was stored before is found again. A
note in the shared tier tells it to all processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from kvboost.codecs.frame import OWNER_BYTES
from kvboost.core import ContentKey, Entry, FrameKey, Owner

MOST_PAST = 64  # past epochs to erase frames of


@dataclass(frozen=True, eq=False)
class Erasure:
    """What to erase from a tier: frames by key, and all frames of some owners.

    With `epoch`, the tier also stores a tenant's new epoch under its key. If it has that epoch or a
    later one already, `outdated` is called: another process has deleted, and may have stored since.
    """

    keys: frozenset[FrameKey] = frozenset()
    owners: frozenset[Owner] = frozenset()
    epoch: tuple[FrameKey, int] | None = None
    outdated: Callable[[int], object] = lambda _: None

    def covers(self, entry: Entry) -> bool:
        """Whether it erases this entry's frame."""
        return entry.key in self.keys or entry.space[:OWNER_BYTES] in self.owners


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
        """Record an epoch, unless a later one is known."""
        with self._lock:
            self._known[key] = max(epoch, self._known.get(key, 0))


def owner(tenant: str, epoch: int) -> Owner:
    """The owner of a tenant's frames under any model: the first half of their namespace."""
    said = tenant.encode()
    digest = sha256(b"owner" + len(said).to_bytes(4, "little") + said + b"%d" % epoch)
    return Owner(digest.digest()[:OWNER_BYTES])


def past_owners(tenant: str, known: int, epoch: int) -> list[Owner]:
    """The tenant's owner hashes in the epochs from `known` up to `epoch`."""
    return [owner(tenant, past) for past in range(max(known, epoch - MOST_PAST), epoch)]


def epoch_key(tenant: str) -> FrameKey:
    """The key of a tenant's epoch in a shared tier."""
    return ContentKey(sha256(b"epoch" + tenant.encode()).digest())

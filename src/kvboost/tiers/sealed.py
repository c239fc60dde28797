"""Signed values in a shared tier: those written without the secret are ignored (ADR 42)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest

from kvboost.core import FrameKey, Owner
from kvboost.tiers.base import Tier, TierStats

TAG_BYTES = 32


class SealedTier(Tier):
    """Another tier whose frames and notes end with a keyed hash of their key and bytes.

    Epochs are not signed: whoever can write them can delete everything anyway.
    """

    def __init__(self, tier: Tier, secret: str) -> None:
        self._tier = tier
        self._secret = blake2b(secret.encode()).digest()

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Of the tier."""
        return self._tier.bytes_read

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """Verified values; a wrong one is empty."""
        found = self._tier.get(keys)
        return {key: self._opened(key, value) for key, value in found.items()}

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Signed copies."""
        return self._tier.put({key: self._signed(key, value) for key, value in frames.items()})

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Of the tier."""
        self._tier.discard(keys)

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Of the tier."""
        self._tier.erase(keys, owners)

    def epoch(self, key: FrameKey) -> int:
        """Of the tier."""
        return self._tier.epoch(key)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Of the tier."""
        return self._tier.raise_epoch(key, epoch)

    def stats(self) -> TierStats:
        """Of the tier."""
        return self._tier.stats()

    def close(self) -> None:
        """Of the tier."""
        self._tier.close()

    def _signed(self, key: FrameKey, value: memoryview) -> memoryview:
        signed = memoryview(bytearray(value.nbytes + TAG_BYTES))
        signed[:-TAG_BYTES] = value.cast("B")
        signed[-TAG_BYTES:] = self._tag(key, value)
        return signed

    def _opened(self, key: FrameKey, value: memoryview) -> memoryview:
        body, tag = value[:-TAG_BYTES], value[-TAG_BYTES:]
        # Nothing is neither a frame nor a note: the reader counts it as damaged.
        return body if compare_digest(tag, self._tag(key, body)) else memoryview(b"")

    def _tag(self, key: FrameKey, body: memoryview) -> bytes:
        tag = blake2b(key, key=self._secret, digest_size=TAG_BYTES)
        tag.update(body)
        return tag.digest()

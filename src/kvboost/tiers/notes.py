"""Notes: small values in shared tiers, by which processes learn what others stored and deleted.

A note has a key of its own, so that any store of keys and bytes can keep it, and a checksum. It
leads from an anchor, or from a chunk, to a stored frame; or it is the epoch of a tenant.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from xxhash import xxh3_64_digest

from kvboost.codecs.frame import FrameError
from kvboost.core import ContentKey, FrameKey, Namespace, PrefixKey

_NOTE = struct.Struct("<32sI")  # key of a frame, offset of the anchor in it
_EPOCH = struct.Struct("<Q")


def where(anchor: int, space: Namespace) -> FrameKey:
    """The key of the note on a chunk with this anchor, which comes from `anchors.pick`."""
    return ContentKey(sha256(b"where" + space + anchor.to_bytes(8, "little")).digest())


def after(parent: FrameKey) -> FrameKey:
    """The key of the note on a chunk that was computed after another one."""
    return ContentKey(sha256(b"after" + parent).digest())


def write_note(key: FrameKey, frame: FrameKey, offset: int) -> memoryview:
    """A note under `key` that leads to a token of a frame."""
    return _with_checksum(key, _NOTE.pack(frame, offset))


def read_note(note: memoryview) -> tuple[FrameKey, int]:
    """The frame and the offset that a checked note leads to."""
    frame, offset = _NOTE.unpack_from(note)
    return PrefixKey(frame), offset


def check_note(note: memoryview, key: FrameKey) -> None:
    """Raise `FrameError` unless this is a note that was written under `key`."""
    _check(note, key, _NOTE.size, "a damaged note")


def write_epoch(key: FrameKey, epoch: int) -> memoryview:
    """An epoch as it is stored under `key`."""
    return _with_checksum(key, _EPOCH.pack(epoch))


def read_epoch(note: memoryview) -> int:
    """The epoch of a checked note."""
    epoch: int = _EPOCH.unpack_from(note)[0]
    return epoch


def check_epoch(note: memoryview, key: FrameKey) -> None:
    """Raise `FrameError` unless this is an epoch that was written under `key`."""
    _check(note, key, _EPOCH.size, "a damaged epoch")


def _with_checksum(key: FrameKey, body: bytes) -> memoryview:
    return memoryview(body + xxh3_64_digest(key + body))


def _check(note: memoryview, key: FrameKey, size: int, reason: str) -> None:
    body, checksum = bytes(note[:size]), bytes(note[size:])
    if len(body) != size or xxh3_64_digest(key + body) != checksum:
        raise FrameError(reason)

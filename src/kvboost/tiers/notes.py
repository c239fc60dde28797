"""Notes in shared tiers, by which processes find what others have stored.

A note is a small value under a key of its own, so that any store of keys and bytes can keep it.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from xxhash import xxh3_64_digest

from kvboost.codecs.frame import FrameError
from kvboost.core import ContentKey, FrameKey, Namespace, PrefixKey

_BODY = struct.Struct("<32sI")  # key of a frame, offset of the anchor in it; a checksum follows


def where(anchor: int, space: Namespace) -> FrameKey:
    """The key of the note on where the words of an anchor, from `anchors.pick`, stand."""
    return ContentKey(sha256(b"where" + space + anchor.to_bytes(8, "little")).digest())


def after(parent: FrameKey) -> FrameKey:
    """The key of the note on a chunk that comes after another one."""
    return ContentKey(sha256(b"after" + parent).digest())


def write_note(key: FrameKey, frame: FrameKey, offset: int) -> memoryview:
    """A note under `key` that leads to a token of a frame."""
    body = _BODY.pack(frame, offset)
    return memoryview(body + xxh3_64_digest(key + body))


def read_note(note: memoryview) -> tuple[FrameKey, int]:
    """The frame and the offset that a checked note leads to."""
    frame, offset = _BODY.unpack_from(note)
    return PrefixKey(frame), offset


def check_note(note: memoryview, key: FrameKey) -> None:
    """Raise `FrameError` unless this is a note that was written under `key`."""
    body, seal = bytes(note[: _BODY.size]), bytes(note[_BODY.size :])
    if len(body) != _BODY.size or xxh3_64_digest(key + body) != seal:
        raise FrameError("a damaged note")

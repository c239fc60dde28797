"""Frame v2: the bytes of one chunk as tiers store it, with all that identifies it.

docs/concepts/frame-format.md is the same on a page. Nothing here allocates more than it was given,
and nothing is trusted before its checksum was verified.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

from xxhash import xxh3_64_intdigest

from kvboost.codecs.base import aligned, stay
from kvboost.codecs.slabs import Slabs
from kvboost.core import (
    TOKEN_BYTES,
    Anchor,
    ContentKey,
    Entry,
    FrameKey,
    KVGeometry,
    Namespace,
    Owner,
    PrefixKey,
    Provenance,
)
from kvboost.errors import CacheError

if TYPE_CHECKING:
    from kvboost.codecs.base import KV, Codec, Send

MAGIC = b"KVBF"
VERSION = 2
MAX_HOME = 2**31 - 1  # positions
MAX_HEAD_BYTES = 1 << 20  # far above the head of any valid frame

# magic, version, codec, provenance | bytes of head, geometry, tokens, anchors | home | bytes of
# payload | key | parent (zeros: none) | namespace | checksums of payload and head
_FIXED = struct.Struct("<4sHBBIIIIIQ32s32s32sQQ")
_ANCHOR = struct.Struct("<IQ")  # offset in the chunk, hash
_SEAL_AT = _FIXED.size - 8
HEAD_BYTES = _FIXED.size  # that every head begins with
KEY_AT = _SEAL_AT - 8 - 3 * 32
OWNER_AT, OWNER_BYTES = KEY_AT + 2 * 32, 16  # the first half of the namespace
_PROVENANCES = (Provenance.EXACT, Provenance.APPROXIMATE)
_NO_PARENT = bytes(32)
_slabs = Slabs()


class FrameError(CacheError):
    """Bytes that are not a valid frame of this version."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a frame."""

    entry: Entry
    codec: int
    geometry: str
    anchors: tuple[Anchor, ...]
    payload: slice
    payload_sum: int


def write(entry: Entry, kv: KV, codec: Codec, anchors: Iterable[Anchor] = ()) -> memoryview:
    """A frame in memory of its own; the caller may overwrite `kv` afterwards.

    The chunk is found at any position by its `anchors`.
    """
    words = b"".join(_ANCHOR.pack(*anchor) for anchor in anchors)
    parts = (describe(codec.geometry).encode(), entry.tokens, words)
    head_bytes = aligned(_FIXED.size + sum(map(len, parts)))
    payload_bytes = codec.size(entry.num_tokens)
    frame = allocate(head_bytes + payload_bytes)
    payload = frame[head_bytes:]
    codec.encode(kv, payload)
    _FIXED.pack_into(
        frame,
        0,
        MAGIC,
        VERSION,
        codec.number,
        _PROVENANCES.index(entry.provenance),
        head_bytes,
        *map(len, parts),
        entry.home,
        payload_bytes,
        entry.key,
        entry.parent or _NO_PARENT,
        entry.space,
        xxh3_64_intdigest(payload),
        0,
    )
    frame[_FIXED.size : head_bytes] = b"".join(parts).ljust(head_bytes - _FIXED.size, b"\0")
    struct.pack_into("<Q", frame, _SEAL_AT, _seal(frame[:head_bytes]))
    return frame


class LastFrame:
    """The frame of a chunk that is kept as something else, shared by the tiers that write it."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._last: Callable[[], memoryview | None] = lambda: None

    def get(
        self, entry: Entry, kv: Callable[[], KV], codec: Codec, anchors: Iterable[Anchor]
    ) -> memoryview:
        """The last one, if a tier still has it, or a new one."""
        with self._making:
            frame = self._last()
            if frame is None:
                frame = write(entry, kv(), codec, anchors)
                self._last = ref(frame)
            return frame


def read(source: memoryview) -> Head:
    """The checked head of a frame, of which only the beginning need be there.

    Raises:
        FrameError: with the reason.
    """
    if len(source) < _FIXED.size:
        raise FrameError(f"{len(source)} bytes are not a frame")
    fixed = _FIXED.unpack_from(source)
    magic, version, codec, provenance, start, *sizes, home, payload_bytes = fixed[:10]
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"not a frame of version {VERSION}")
    if start > min(len(source), MAX_HEAD_BYTES) or start != aligned(_FIXED.size + sum(sizes)):
        raise FrameError("the lengths of its parts do not add up")
    key, parent, space, payload_sum, seal = fixed[10:]
    if _seal(source[:start]) != seal:
        raise FrameError("the checksum of its head is wrong")
    geometry, tokens, words = _cut(source[_FIXED.size :], sizes)
    is_whole = len(tokens) % TOKEN_BYTES == 0 and len(words) % _ANCHOR.size == 0
    if provenance >= len(_PROVENANCES) or not is_whole or not geometry.isascii():
        raise FrameError("a field has a value that this version does not know")
    num_tokens, anchors = len(tokens) // TOKEN_BYTES, tuple(_ANCHOR.iter_unpack(words))
    is_sane = num_tokens > 0 and len(anchors) <= num_tokens and home <= MAX_HOME
    if not is_sane or any(offset >= num_tokens for offset, _ in anchors):
        raise FrameError("a count or an offset is out of range")
    is_exact = _PROVENANCES[provenance] is Provenance.EXACT
    entry = Entry(
        tokens=tokens,
        provenance=_PROVENANCES[provenance],
        prefix=PrefixKey(key) if is_exact else None,
        content=None if is_exact else ContentKey(key),
        parent=None if parent == _NO_PARENT else PrefixKey(parent),
        home=home,
        space=Namespace(space),
    )
    payload = slice(start, start + payload_bytes)
    return Head(
        entry=entry,
        codec=codec,
        geometry=geometry.decode("ascii"),
        anchors=anchors,
        payload=payload,
        payload_sum=payload_sum,
    )


def check(source: memoryview, key: FrameKey) -> Head:
    """Like `read`, but verifies every bit, and that it is the frame of `key`.

    For bytes that come from a disk or a network.
    """
    head = read(source)
    if head.entry.key != key:
        raise FrameError("it is the frame of another key")
    if head.payload.stop != len(source):
        raise FrameError(f"it has {len(source)} bytes instead of {head.payload.stop}")
    if xxh3_64_intdigest(source[head.payload]) != head.payload_sum:
        raise FrameError("the checksum of its payload is wrong")
    return head


def decode(source: memoryview, head: Head, codec: Codec, send: Send = stay) -> KV:
    """The K/V of a frame, possibly as views of it; decoded where `send` brings its bytes.

    Raises:
        FrameError: it is of another codec or geometry, or not whole.
    """
    check_codec(head, codec)
    if len(source) < head.payload.stop:
        raise FrameError(f"it has {len(source)} bytes instead of {head.payload.stop}")
    return codec.decode(source[head.payload], head.entry.num_tokens, send)


def check_codec(head: Head, codec: Codec) -> None:
    """Whether a codec can decode a frame.

    Raises:
        FrameError: it is of another codec or geometry, or not whole.
    """
    num_tokens, num_bytes = head.entry.num_tokens, head.payload.stop - head.payload.start
    if head.codec != codec.number or head.geometry != describe(codec.geometry):
        raise FrameError(f"codec {head.codec} of {head.geometry}: not what this engine reads")
    if num_bytes != codec.size(num_tokens):
        raise FrameError(f"{num_tokens} tokens do not take {num_bytes} bytes")


def owner_of(frame: memoryview) -> Owner:
    """The owner of a frame, unchecked."""
    return Owner(bytes(frame[OWNER_AT : OWNER_AT + OWNER_BYTES]))


def size_of(head: memoryview) -> int:
    """Size of a frame, from the beginning of its head, unchecked."""
    _, _, _, _, head_bytes, *_, payload_bytes = _FIXED.unpack_from(head)[:10]
    return int(head_bytes + payload_bytes)


def allocate(num_bytes: int) -> memoryview:
    """Memory for a frame, to be written in full; it ends with the frame."""
    if not hasattr(mmap, "MAP_POPULATE"):
        return memoryview(mmap.mmap(-1, num_bytes))
    return _slabs.take(num_bytes)


def describe(geometry: KVGeometry) -> str:
    """A geometry in words: the dtype, then planes x heads x head size of each group."""
    groups = (f"{len(g.planes)}x{g.heads}x{g.head_dim}" for g in geometry.groups)
    return " ".join([geometry.dtype, *groups])


def _seal(head: memoryview) -> int:
    """Checksum of a head without this field, the payload's checksum included."""
    return xxh3_64_intdigest(head[_FIXED.size :], xxh3_64_intdigest(head[:_SEAL_AT]))


def _cut(source: memoryview, sizes: list[int]) -> list[bytes]:
    parts, cursor = [], 0
    for size in sizes:
        parts.append(bytes(source[cursor : cursor + size]))
        cursor += size
    return parts

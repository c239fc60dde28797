"""Frames: what was written is read, and what was touched is refused."""

from __future__ import annotations

import os
import random
import tracemalloc
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import GEOMETRY, FakeSlots
from kvboost.codecs import frame as frames
from kvboost.codecs.base import ALIGNMENT
from kvboost.codecs.frame import FrameError
from kvboost.codecs.raw import RawCodec
from kvboost.core import Anchor, ContentKey, Entry, Namespace, PrefixKey, Provenance, Span

CODEC = RawCodec(GEOMETRY)


def entry_of(
    num_tokens: int, *, is_exact: bool = True, home: int = 7, parent: bool = True
) -> Entry:
    tokens = random.Random(num_tokens).randbytes(4 * num_tokens)
    key = sha256(tokens).digest()
    return Entry(
        tokens=tokens,
        provenance=Provenance.EXACT if is_exact else Provenance.APPROXIMATE,
        prefix=PrefixKey(key) if is_exact else None,
        content=None if is_exact else ContentKey(key),
        parent=PrefixKey(bytes(range(32))) if parent else None,
        home=home,
        space=Namespace(bytes([9]) * 32),
    )


def written(entry: Entry, anchors: tuple[Anchor, ...] = ()) -> memoryview:
    kv = FakeSlots(entry.num_tokens).read(Span(0, entry.num_tokens))
    return frames.write(entry, kv, CODEC, anchors)


@given(st.integers(1, 40), st.booleans(), st.integers(0, 2**31 - 1), st.booleans(), st.booleans())
def test_what_was_written_is_read(
    num_tokens: int, is_exact: bool, home: int, has_parent: bool, has_anchors: bool
) -> None:
    entry = entry_of(num_tokens, is_exact=is_exact, home=home, parent=has_parent)
    anchors = ((0, 2**64 - 1), (num_tokens - 1, 5))[:num_tokens] if has_anchors else ()
    source = written(entry, anchors)
    head = frames.check(source, entry.key)
    assert (head.entry, head.anchors) == (entry, anchors)
    assert head.payload.start % ALIGNMENT == 0
    expected = FakeSlots(num_tokens).rows
    for got, want in zip(frames.decode(source, head, CODEC), expected, strict=True):
        assert torch.equal(got, want)


def test_the_head_is_read_without_the_payload() -> None:
    entry = entry_of(8)
    source = written(entry)
    head = frames.read(source)
    assert frames.read(source[: head.payload.start]).entry == entry
    assert frames.owner_of(source) == entry.space[:16]


def test_a_decoded_frame_is_a_view() -> None:
    source = written(entry_of(8))
    head = frames.read(source)
    decoded = frames.decode(source, head, CODEC)
    source[head.payload.start : head.payload.start + 4] = b"\x00\x00\x80\x3f"
    assert decoded[0].flatten()[0] == 1.0


def test_a_frame_has_no_byte_of_the_one_whose_memory_it_takes() -> None:
    entry = entry_of(8)
    expected = bytes(written(entry))
    spoilt = frames.allocate(len(expected))
    spoilt[:] = b"\xff" * len(expected)
    del spoilt
    assert bytes(written(entry)) == expected


def test_a_frame_of_another_key_codec_or_geometry_is_refused() -> None:
    source = written(entry_of(8))
    with pytest.raises(FrameError, match="another key"):
        frames.check(source, PrefixKey(bytes(32)))
    other = RawCodec(GEOMETRY)
    other.number = 77
    with pytest.raises(FrameError, match="not what this engine reads"):
        frames.decode(source, frames.read(source), other)


@pytest.mark.parametrize(
    ("num_tokens", "home", "anchors"),
    [
        (0, 0, ()),
        (8, 2**31, ()),
        (8, 0, tuple((0, number) for number in range(9))),
        (8, 0, ((8, 1),)),
    ],
    ids=["no tokens", "far away", "many anchors", "an anchor outside"],
)
def test_counts_out_of_range_are_refused_though_all_checksums_are_right(
    num_tokens: int, home: int, anchors: tuple[Anchor, ...]
) -> None:
    entry = entry_of(num_tokens, home=home)
    codec = RawCodec(GEOMETRY)
    codec.encode = lambda kv, payload: None  # type: ignore[method-assign]
    source = frames.write(entry, [], codec, anchors)
    with pytest.raises(FrameError, match="out of range"):
        frames.check(source, entry.key)


def mutated(source: bytes, rng: random.Random) -> bytes:
    """A frame with one of the faults that disks and networks make, and clever ones."""
    frame, kind = bytearray(source), rng.randrange(6)
    if kind == 0:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del frame[rng.randrange(len(frame)) :]
    elif kind == 2:
        start = rng.randrange(len(frame))
        frame[start : start + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(64))
    elif kind == 3:  # a length or another number of the head
        start = rng.randrange(0, 40)
        frame[start : start + 4] = rng.choice(
            [0, 1, 2**31, 2**32 - 1, rng.getrandbits(32)]
        ).to_bytes(4, "little")
    elif kind == 4:
        frame += rng.randbytes(rng.randrange(1, 200))
    else:
        a, b = rng.randrange(len(frame)), rng.randrange(len(frame))
        frame[a], frame[b] = frame[b], frame[a]
    return bytes(frame)


def test_no_mutated_frame_is_accepted() -> None:
    rng, entry = random.Random(1), entry_of(3)
    good = bytes(written(entry, ((1, 99),)))
    num_tried = 0
    num_frames = int(os.environ.get("KVBOOST_TEST_FRAMES", "20000"))
    for _ in range(num_frames):
        bad = mutated(good, rng)
        if bad != good:
            num_tried += 1
            assert not is_accepted(bad, entry)
    assert num_tried > 0.9 * num_frames


def is_accepted(frame: bytes, entry: Entry) -> bool:
    try:
        frames.check(memoryview(frame), entry.key)
    except FrameError:
        return False
    return True


def test_refusing_a_frame_takes_no_memory() -> None:
    rng, entry = random.Random(2), entry_of(3)
    good = bytes(written(entry))
    bad = [mutated(good, rng) for _ in range(2000)]
    lengths = (8, 12, 16, 20, 28)  # that promise a lot
    bad += [good[:place] + b"\xff\xff\xff\x7f" + good[place + 4 :] for place in lengths]
    tracemalloc.start()
    for frame in bad:
        is_accepted(frame, entry)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 * len(good)


@given(st.binary(max_size=600))
@settings(max_examples=300)
def test_no_other_bytes_are_accepted(noise: bytes) -> None:
    with pytest.raises(FrameError):
        frames.check(memoryview(noise), PrefixKey(bytes(32)))
    with pytest.raises(FrameError):
        frames.check(memoryview(b"KVBF\x02\x00" + noise), PrefixKey(bytes(32)))

import pytest
import torch

from fakes import GEOMETRY, FakeSlots
from kvboost.codecs.raw import RawCodec
from kvboost.core import Span
from kvboost.errors import CacheError


def test_decoding_gives_the_same_bits_as_a_view() -> None:
    codec, slots = RawCodec(GEOMETRY), FakeSlots(20)
    kv = slots.read(Span(3, 11))
    frame = codec.encode(kv)
    assert frame.nbytes == 8 * GEOMETRY.bytes_per_token
    decoded = codec.decode(frame, 8)
    assert all(torch.equal(a, b) for a, b in zip(kv, decoded, strict=True))
    frame[:4] = b"\x00\x00\x80\x3f"
    assert decoded[0].flatten()[0] == 1.0


def test_encoding_takes_a_copy() -> None:
    codec, slots = RawCodec(GEOMETRY), FakeSlots(8)
    frame = codec.encode(slots.read(Span(0, 8)))
    before = bytes(frame)
    slots.rows[0].zero_()
    assert bytes(frame) == before


def test_a_frame_of_another_length_is_a_cache_error() -> None:
    codec = RawCodec(GEOMETRY)
    frame = codec.encode(FakeSlots(8).read(Span(0, 8)))
    with pytest.raises(CacheError, match="9 tokens take"):
        codec.decode(frame, 9)

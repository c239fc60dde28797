import torch

from fakes import GEOMETRY, FakeSlots
from kvboost.codecs.raw import RawCodec
from kvboost.core import Span


def test_decoding_gives_the_same_bits_as_a_view() -> None:
    codec, slots = RawCodec(GEOMETRY), FakeSlots(20)
    kv = slots.read(Span(3, 11))
    payload = memoryview(bytearray(codec.size(8)))
    codec.encode(kv, payload)
    decoded = codec.decode(payload, 8)
    assert all(torch.equal(a, b) for a, b in zip(kv, decoded, strict=True))
    payload[:4] = b"\x00\x00\x80\x3f"
    assert decoded[0].flatten()[0] == 1.0


def test_encoding_takes_a_copy() -> None:
    codec, slots = RawCodec(GEOMETRY), FakeSlots(8)
    payload = memoryview(bytearray(codec.size(8)))
    codec.encode(slots.read(Span(0, 8)), payload)
    before = bytes(payload)
    slots.rows[0].zero_()
    assert bytes(payload) == before

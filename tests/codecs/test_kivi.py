import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.codecs.kivi import Int4Codec, Int8Codec, KiviCodec
from kvboost.codecs.raw import RawCodec
from kvboost.core import KVGeometry, PlaneGroup

CODECS = [Int8Codec, Int4Codec]
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
STEPS = {"int8": 254, "int4": 15}  # from a group's lowest code to its highest


def geometry(*groups: tuple[tuple[int, ...], int, int], dtype: str = "bfloat16") -> KVGeometry:
    made = tuple(PlaneGroup(*group) for group in groups)
    layers = 1 + max(plane // 2 for group in made for plane in group.planes)
    return KVGeometry(layers, made, dtype, ITEMSIZE[dtype])


def random_kv(shape: KVGeometry, num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(g.planes), g.heads, num_tokens, g.head_dim, generator=chance).to(
            getattr(torch, shape.dtype)
        )
        for g in shape.groups
    ]


def payload_of(codec: KiviCodec, kv: list[torch.Tensor]) -> memoryview:
    payload = memoryview(bytearray(codec.size(kv[0].shape[2])))
    codec.encode(kv, payload)
    return payload


def there_and_back(codec: KiviCodec, kv: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(codec.decode(payload_of(codec, kv), kv[0].shape[2]))


def worst_errors(
    codec: KiviCodec, kv: torch.Tensor, back: torch.Tensor, planes: tuple[int, ...]
) -> list[tuple[float, float]]:
    """Of each group the worst error and its bound, found from the numbers alone."""
    eps = torch.finfo(kv.dtype).eps
    least = max(torch.finfo(kv.dtype).tiny * eps, torch.finfo(torch.float32).tiny)
    found = []
    for place, plane in enumerate(planes):
        grouping = codec.values if plane % 2 else codec.keys
        pieces = (x[place].double().split(grouping.size, grouping.axis - 1) for x in (kv, back))
        for x, y in zip(*pieces, strict=True):
            low, high = x.amin(grouping.axis - 1), x.amax(grouping.axis - 1)
            if not grouping.has_origin:
                high = torch.maximum(high.abs(), low.abs())
                low = -high
            size = torch.maximum(high.abs(), low.abs())
            # The middle of an int8 group is rounded, which makes one side of it longer.
            middle = eps * size if codec.name == "int8" and grouping.has_origin else 0
            step = (high - low + middle) / STEPS[codec.name] * (1 + 2 * eps) + 2 * least
            bound = step / 2 + eps / 2 * (size + step) + 2**-22 * (size + high - low)
            is_narrow = grouping.axis == 3 or kv.shape[3] == 1
            if is_narrow and grouping.has_origin:  # the product is rounded, then the sum
                bound += eps / 2 * (high - low + step)
            error = (x - y).abs().amax(grouping.axis - 1)
            found += zip(error.flatten().tolist(), bound.flatten().tolist(), strict=True)
    return found


@given(
    kind=st.sampled_from(CODECS),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    num_tokens=st.integers(1, 200),
    head_dim=st.integers(1, 140),
    offset=st.floats(-1e3, 1e3),
    exponent=st.integers(-12, 3),
    seed=st.integers(0, 1000),
)
def test_no_number_is_further_away_than_half_a_step_and_its_rounding(
    kind: type[KiviCodec],
    dtype: str,
    num_tokens: int,
    head_dim: int,
    offset: float,
    exponent: int,
    seed: int,
) -> None:
    codec = kind(geometry(((0, 1), 2, head_dim), dtype=dtype))
    (kv,) = random_kv(codec.geometry, num_tokens, seed)
    kv = (kv.double() * 10.0**exponent + offset).to(kv.dtype)
    (back,) = there_and_back(codec, [kv])
    assert back.dtype == kv.dtype and back.shape == kv.shape
    for error, bound in worst_errors(codec, kv, back, (0, 1)):
        assert error <= bound


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("kind", "limit"), [(Int8Codec, 0.52), (Int4Codec, 0.29)])
def test_a_chunk_takes_its_share_of_the_raw_size(
    kind: type[KiviCodec], limit: float, head_dim: int
) -> None:
    shape = geometry((tuple(range(8)), 2, head_dim))
    for num_tokens in (128, 256, 4096):
        assert kind(shape).size(num_tokens) <= limit * RawCodec(shape).size(num_tokens)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 129, 300])
def test_groups_that_are_not_full_are_as_good_as_full_ones(
    kind: type[KiviCodec], num_tokens: int
) -> None:
    codec = kind(geometry(((0, 1, 2, 3), 3, 65)))
    (kv,) = random_kv(codec.geometry, num_tokens)
    (back,) = there_and_back(codec, [kv])
    assert all(error <= bound for error, bound in worst_errors(codec, kv, back, (0, 1, 2, 3)))


@pytest.mark.parametrize("kind", CODECS)
def test_every_plane_group_comes_back_and_k_and_v_are_told_apart(kind: type[KiviCodec]) -> None:
    groups = [((0, 2, 4, 5), 1, 33), ((1, 3), 4, 7), ((6, 7, 8, 9), 2, 128), ((10, 12, 11), 1, 5)]
    codec = kind(geometry(*groups))
    kv = random_kv(codec.geometry, 70)
    for tensor, (planes, _, _) in zip(kv, groups, strict=True):
        for place, plane in enumerate(planes):  # large where the wrong grouping would show
            group = tensor[place, :, 0] if plane % 2 else tensor[place, ..., 0]
            group *= 1000
    back = there_and_back(codec, kv)
    for x, y, (planes, _, _) in zip(kv, back, groups, strict=True):
        assert all(error <= bound for error, bound in worst_errors(codec, x, y, planes))


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_constant_groups_come_back_as_they_are(kind: type[KiviCodec], dtype: str) -> None:
    codec = kind(geometry(((0,), 2, 6), dtype=dtype))
    channels = torch.tensor([0.0, -0.1, 3.0, 1e4, 1e-4, -777.0]).to(getattr(torch, dtype))
    kv = channels.expand(1, 2, 90, 6)
    assert torch.equal(there_and_back(codec, [kv])[0], kv)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_huge_numbers_stay_finite_and_those_beyond_a_quarter_of_the_largest_become_that(
    kind: type[KiviCodec], dtype: str
) -> None:
    codec = kind(geometry(((0, 1), 1, 4), dtype=dtype))
    (kv,) = random_kv(codec.geometry, 8)
    largest = torch.finfo(kv.dtype).max
    kv[:, :, 0] = torch.tensor([largest, -largest, math.inf, -math.inf])
    (back,) = there_and_back(codec, [kv])
    assert back.isfinite().all()
    ends = back[:, 0, 0].double() / (largest / 4)
    assert torch.allclose(ends, torch.tensor([[1.0, -1, 1, -1]]).double(), atol=0.08)


@pytest.mark.parametrize("kind", CODECS)
def test_a_nan_stays_in_its_group(kind: type[KiviCodec]) -> None:
    codec = kind(geometry(((0, 1), 1, 4)))
    (kv,) = random_kv(codec.geometry, 8)
    kv[0, 0, 3, 2] = math.nan
    kv[1, 0, 5, 1] = math.nan
    (back,) = there_and_back(codec, [kv])
    expected = torch.zeros_like(kv, dtype=torch.bool)
    expected[0, 0, :, 2] = True
    expected[1, 0, 5, :] = True
    assert torch.equal(back.isnan(), expected)


@pytest.mark.parametrize("kind", CODECS)
def test_the_same_numbers_give_the_same_bytes_wherever_they_lie(kind: type[KiviCodec]) -> None:
    codec = kind(geometry((tuple(range(6)), 3, 33)))
    (kv,) = random_kv(codec.geometry, 77)
    wide = torch.full((6, 3, 200, 33), math.nan, dtype=kv.dtype)
    wide[:, :, 50:127] = kv
    before = wide.clone()
    assert bytes(payload_of(codec, [kv])) == bytes(payload_of(codec, [wide[:, :, 50:127]]))
    assert torch.equal(wide.isnan(), before.isnan()) and torch.equal(wide[:, :, 50:127], kv)


@pytest.mark.parametrize("kind", CODECS)
def test_decoding_writes_nothing_to_the_payload(kind: type[KiviCodec]) -> None:
    codec = kind(geometry(((0, 1), 2, 16)))
    payload = payload_of(codec, random_kv(codec.geometry, 40))
    before = bytes(payload)
    for tensor in codec.decode(payload, 40):
        tensor.zero_()
    assert bytes(payload) == before


@pytest.mark.parametrize("kind", CODECS)
def test_every_byte_of_a_payload_is_decided_by_the_numbers(kind: type[KiviCodec]) -> None:
    codec = kind(geometry(((0, 1), 1, 5), ((2, 3), 1, 9)))
    kv, size = random_kv(codec.geometry, 7), codec.size(7)
    zeros, ones = memoryview(bytearray(size)), memoryview(bytearray(b"\xff" * size))
    codec.encode(kv, zeros)
    codec.encode(kv, ones)
    assert bytes(zeros) == bytes(ones)

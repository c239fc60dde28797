from hypothesis import given
from hypothesis import strategies as st

from kvboost.reuse.chunks import split

TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)
SMALL = st.lists(st.integers(0, 5), min_size=1, max_size=300)
SIZES = st.integers(8, 64)


def ids(chunk_tokens: bytes) -> list[int]:
    return [
        int.from_bytes(chunk_tokens[i : i + 4], "little") for i in range(0, len(chunk_tokens), 4)
    ]


@given(TOKENS, SIZES)
def test_chunks_put_together_are_the_tokens(tokens: list[int], size: int) -> None:
    chunks = split(tokens, size)
    assert [token for chunk in chunks for token in ids(chunk.tokens)] == tokens
    assert [chunk.span.start for chunk in chunks[1:]] == [c.span.stop for c in chunks[:-1]]


@given(TOKENS, SIZES)
def test_only_the_last_chunk_on_a_grid_is_shorter(tokens: list[int], size: int) -> None:
    lengths = [len(chunk.span) for chunk in split(tokens, size)]
    assert set(lengths[:-1]) <= {size} and 0 < lengths[-1] <= size


@given(SMALL, SMALL, SMALL, SIZES, st.integers(0, 7))
def test_a_common_prefix_is_cut_alike(
    prefix: list[int], left: list[int], right: list[int], size: int, window: int
) -> None:
    cuts = [
        {c.span.stop for c in split(prefix + rest, size, window, {0}) if c.span.stop < len(prefix)}
        for rest in (left, right)
    ]
    assert cuts[0] == cuts[1]


@given(SMALL, SIZES, st.integers(1, 7))
def test_a_cut_follows_a_boundary_where_the_window_holds_one(
    tokens: list[int], size: int, window: int
) -> None:
    for chunk in split(tokens, size, window, {0})[:-1]:
        stop, grid = chunk.span.stop, chunk.span.start + size
        places = range(max(chunk.span.start + 1, grid - window), min(grid, len(tokens)))
        boundaries = [place for place in places if tokens[place - 1] == 0]
        assert stop == (boundaries[0] if boundaries else grid)

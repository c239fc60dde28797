from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import Span
from kvboost.reuse.run import forward


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def forward(self, slots: object, tokens: list[int], positions: list[int]) -> None:
        self.calls.append((list(tokens), list(positions)))


def run(
    live: list[Span], piece_tokens: int | None, repaired: tuple[int, ...] = ()
) -> list[list[int]]:
    model, tokens = Recorder(), [1000 + i for i in range(100)]
    last = forward(model, None, tokens, live, repaired, piece_tokens)
    assert all(given == [tokens[p] for p in positions] for given, positions in model.calls)
    return [positions for _, positions in model.calls] + [list(last)]


def test_scattered_positions_are_one_piece() -> None:
    assert run([Span(3, 5), Span(9, 10)], None) == [[3, 4, 9]]
    assert run([Span(3, 5), Span(9, 10)], None, repaired=(1, 7)) == [[1, 3, 4, 7, 9]]


@given(st.integers(0, 90), st.sampled_from([8, 16, 32]))
def test_pieces_end_on_the_same_borders_wherever_the_live_part_starts(
    start: int, size: int
) -> None:
    cold, warm = run([Span(0, 100)], size), run([Span(start, 100)], size)
    assert [piece[-1] for piece in warm] == [p[-1] for p in cold][-len(warm) :]
    assert [position for piece in warm for position in piece] == list(range(start, 100))
    if start % size == 0:
        assert warm == cold[-len(warm) :]

"""Pieces come before they are needed and never more of them than the budget allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.weights.window import Piece, Window
from waiting import wait_until


class Shelf:
    """Counts what is out; raises for names in `broken`, waits where `gate` is shut.

    Names stand for tensors.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.out: list[str] = []
        self.most_bytes = 0
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def bring(self, name: str) -> str:
        self.gate.wait(10)
        if name in self.broken:
            raise OSError(f"no {name}")
        self.out.append(name)
        self.most_bytes = max(self.most_bytes, sum(self.sizes[each] for each in self.out))
        return name

    def drop(self, name: str) -> None:
        self.out.remove(name)


@contextmanager
def window_of(
    sizes: dict[str, int], budget: int
) -> Iterator[tuple[Window, Shelf, dict[str, Piece]]]:
    shelf = Shelf()
    shelf.sizes = sizes
    window = Window(budget, shelf.bring, shelf.drop)
    try:
        yield window, shelf, {name: Piece(name, size) for name, size in sizes.items()}
    finally:
        shelf.gate.set()
        window.close()


def test_what_came_next_last_time_is_brought_while_a_piece_is_used() -> None:
    sizes = dict.fromkeys("abcd", 1)
    with window_of(sizes, 2) as (window, shelf, pieces):
        for name in "abcd":
            with window.use(pieces[name]):
                pass
        assert window.num_waits == 4
        with window.use(pieces["a"]):
            wait_until(lambda: shelf.out == ["a", "b"])
        with window.use(pieces["b"]):
            wait_until(lambda: sorted(shelf.out) == ["b", "c"])
        assert window.num_waits == 5


def test_a_new_order_is_learnt() -> None:
    with window_of(dict.fromkeys("abc", 1), 2) as (window, shelf, pieces):
        for name in "abcabcacbacb":
            with window.use(pieces[name]):
                pass
        with window.use(pieces["a"]):
            wait_until(lambda: sorted(shelf.out) == ["a", "c"])


def test_pieces_that_fit_together_are_brought_once() -> None:
    with window_of(dict.fromkeys("abc", 1), 3) as (window, _, pieces):
        for name in "abcabcabc":
            with window.use(pieces[name]):
                pass
        assert (window.num_waits, window.brought_bytes, window.peak_bytes) == (3, 3, 3)


def test_a_piece_in_use_stays_though_another_needs_its_room() -> None:
    with window_of({"outer": 2, "inner": 2}, 2) as (window, shelf, pieces):
        with window.use(pieces["outer"]), window.use(pieces["inner"]):
            assert sorted(shelf.out) == ["inner", "outer"]
        with window.use(pieces["inner"]):
            wait_until(lambda: shelf.out == ["inner"])


def test_what_bringing_raises_reaches_the_user_and_is_tried_again() -> None:
    with window_of({"a": 1}, 1) as (window, shelf, pieces):
        shelf.broken = {"a"}
        for _ in range(2):
            with pytest.raises(OSError, match="no a"), window.use(pieces["a"]):
                pass
        shelf.broken = set()
        with window.use(pieces["a"]) as brought:
            assert brought == "a"


def test_a_piece_that_failed_ahead_of_time_is_tried_again_when_it_is_needed() -> None:
    with window_of(dict.fromkeys("abc", 1), 2) as (window, shelf, pieces):
        for name in "abc":
            with window.use(pieces[name]):
                pass
        shelf.broken = {"b"}
        with window.use(pieces["a"]):
            wait_until(lambda: pieces["b"].error is not None)
        shelf.broken = set()
        for name in "bc":
            with window.use(pieces[name]) as brought:
                assert brought == name


def test_a_window_that_cannot_drop_ends_instead_of_hanging() -> None:
    with window_of(dict.fromkeys("ab", 1), 1) as (window, shelf, pieces):
        with window.use(pieces["a"]):
            pass
        shelf.out.clear()  # dropping "a" raises
        with pytest.raises(RuntimeError, match="streamed no more"), window.use(pieces["b"]):
            pass


def test_nobody_waits_for_a_closed_window() -> None:
    with window_of({"a": 1}, 1) as (window, _, pieces):
        window.close()
        with pytest.raises(RuntimeError, match="streamed no more"), window.use(pieces["a"]):
            pass


def test_closing_drops_everything_and_ends_the_thread() -> None:
    with window_of({"a": 1}, 1) as (window, shelf, pieces):
        with window.use(pieces["a"]):
            pass
        window.close()
        assert shelf.out == []
        assert not window._thread.is_alive()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.lists(st.integers(0, 7), max_size=40),
    st.integers(5, 12),
)
def test_the_budget_holds_in_any_order_of_use(
    sizes: list[int], order: list[int], budget: int
) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    with window_of(named, budget) as (window, shelf, pieces):
        for number in order:
            name = str(number % len(sizes))
            with window.use(pieces[name]) as brought:
                assert brought == name
                assert name in shelf.out
        assert shelf.most_bytes <= budget
        assert window.peak_bytes <= budget

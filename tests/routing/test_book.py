"""The book: what is known of the replicas, against a plain model, within its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.routing.book import ALL_NAMES, Book, Report

REPLICAS = [f"r{number}" for number in range(11)]  # more than the bits of a byte
NAMES = st.lists(st.integers(1, 30), max_size=12)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "reported", "forget"]),
        st.sampled_from(REPLICAS),
        NAMES,
        st.sampled_from([0, 10, 20, ALL_NAMES]),
    ),
    max_size=40,
)


def array(names: list[int] | range) -> np.ndarray:
    return np.array(names, np.uint64)


class Plain:
    """The same by sets."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.fresh: dict[str, set[int]] = {}
        self.limits: dict[str, int] = {}

    def step(self, kind: str, replica: str, names: list[int], limit: int) -> None:
        if kind == "forget":
            for known in (self.held, self.fresh, self.limits):
                known.pop(replica, None)
            return
        held = self.held.setdefault(replica, set())
        fresh = self.fresh.setdefault(replica, set())
        if kind == "sent":
            held.update(names)
            fresh.update(names)
            return
        beyond = {name for name in held if name > limit}
        self.held[replica] = beyond | fresh | {name for name in names if name <= limit}
        self.fresh[replica] = set()
        self.limits[replica] = limit

    def shares(self, names: list[int], *, in_order: bool) -> dict[str, float]:
        shares = {}
        for replica, held in self.held.items():
            limit = self.limits.get(replica, ALL_NAMES)
            told = [name for name in names if name in held or name <= limit]
            is_held = [name in held for name in told]
            if in_order and False in is_held:
                is_held = is_held[: is_held.index(False)]
            if any(is_held):
                shares[replica] = sum(is_held) / len(told)
        return shares


def take(book: Book, kind: str, replica: str, names: list[int], limit: int) -> None:
    if kind == "sent":
        book.sent(array(names), replica)
    elif kind == "reported":
        told = [name for name in names if name <= limit]
        book.reported(replica, Report(limit, array(told)))
    else:
        book.forget(replica)


@settings(deadline=None)
@given(STEPS, NAMES)
def test_a_book_knows_what_sets_know(
    steps: list[tuple[str, str, list[int], int]], asked: list[int]
) -> None:
    book, plain = Book(), Plain()
    for step in steps:
        take(book, *step)
        plain.step(*step)
    for in_order in (False, True):
        expected = plain.shares(asked, in_order=in_order)
        assert book.shares(array(asked), in_order=in_order) == pytest.approx(expected)
    assert len(book) == len(set().union(*plain.held.values()))


@settings(deadline=None)
@given(STEPS, NAMES)
def test_a_book_keeps_its_bound_and_knows_nothing_wrong(
    steps: list[tuple[str, str, list[int], int]], asked: list[int]
) -> None:
    book, plain = Book(max_anchors=7), Plain()
    for step in steps:
        take(book, *step)
        plain.step(*step)
        assert len(book) <= 7
        for name in asked:
            alone = book.shares(array([name]), in_order=False)
            assert alone.keys() <= plain.shares([name], in_order=False).keys()


def test_the_oldest_names_leave_first() -> None:
    book = Book(max_anchors=4)
    book.sent(array([1, 2, 3]), "a")
    book.sent(array([1]), "b")
    book.sent(array([4, 5]), "a")
    assert [bool(book.shares(array([name]), in_order=False)) for name in range(1, 6)] == [
        True, False, True, True, True,
    ]  # fmt: skip


def test_of_a_prompt_that_is_too_long_the_beginning_is_kept() -> None:
    book = Book(max_anchors=4)
    book.sent(array(range(10)), "a")
    assert book.shares(array(range(10)), in_order=True) == {"a": 0.4}


def test_a_report_does_not_push_out_what_was_sent() -> None:
    book = Book(max_anchors=4)
    book.sent(array([100, 101, 102]), "a")
    book.reported("b", Report(ALL_NAMES, array([1, 2, 3])))
    assert book.shares(array([100, 101, 102]), in_order=True) == {"a": 1.0}
    assert book.shares(array([1, 2]), in_order=True) == {"b": 0.5}


def test_memory_is_that_of_the_bound() -> None:
    book = Book(max_anchors=5000)
    for number in range(100):
        book.sent(array(range(1000 * number, 1000 * number + 1000)), f"r{number % 20}")
    assert len(book) == 5000
    assert book.size_bytes == 5000 * (8 + 2 * 3)


def test_reports_come_over_the_wire() -> None:
    report = Report(2**63, array([2, 2**63 - 1]))
    back = Report.from_wire(report.to_wire())
    assert back is not None
    assert back.limit == report.limit
    assert back.anchors.tolist() == report.anchors.tolist()
    assert report.to_wire()["anchors"] == b"\2" + bytes(7) + b"\xff" * 7 + b"\x7f"


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [],
        {},
        {"limit": 1},
        {"limit": True, "anchors": b""},
        {"limit": 2**64, "anchors": b""},
        {"limit": -1, "anchors": b""},
        {"limit": 1.0, "anchors": b""},
        {"limit": 1, "anchors": b"1234567"},
        {"limit": 1, "anchors": [1]},
    ],
)
def test_other_things_are_no_reports(wire: object) -> None:
    assert Report.from_wire(wire) is None

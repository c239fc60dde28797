"""What an engine holds: from its store's events to a report."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvboost.routing import anchors
from kvboost.routing import held as held_module
from kvboost.routing.book import ALL_NAMES
from kvboost.routing.held import Held

WORDS = [b"the", b"of", b"and", b"to", b"in", b"reuse", b"cache", b"chunk", b"place", b"replica"]


def text_of_tokens(tokens: bytes) -> bytes:
    return b"".join(WORDS[token % len(WORDS)] + b" " for token in np.frombuffer(tokens, "<u4"))


def tokens_of(count: int, seed: int) -> list[bytes]:
    """Chunks of 50 tokens."""
    chosen = random.Random(seed).choices(range(1000), k=count)
    data = np.array(chosen, "<u4").tobytes()
    return [data[start : start + 200] for start in range(0, len(data), 200)]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def add_chain(held: Held, chunks: list[bytes], first: int = 0) -> None:
    for number, chunk in enumerate(chunks, first):
        held.added(key(number), chunk, key(number - 1) if number > first else None)


def names_of(chunks: list[bytes]) -> set[int]:
    return set(anchors.find(text_of_tokens(b"".join(chunks))).tolist())


def reported(held: Held) -> set[int]:
    return set(held.report().anchors.tolist())


def test_chunks_that_follow_each_other_have_the_anchors_of_the_whole() -> None:
    held = Held(text_of_tokens)
    chunks = tokens_of(1000, 0)
    add_chain(held, chunks)
    assert names_of(chunks) <= reported(held)
    assert held.report().limit == ALL_NAMES


def test_chunks_may_come_in_any_order() -> None:
    held = Held(text_of_tokens)
    chunks = tokens_of(1000, 0)
    for number in reversed(range(len(chunks))):
        held.added(key(number), chunks[number], key(number - 1) if number else None)
    assert names_of(chunks) <= reported(held)


def test_short_chunks_are_read_with_several_before_them() -> None:
    held = Held(text_of_tokens)
    data = b"".join(tokens_of(400, 1))
    blocks = [data[start : start + 32] for start in range(0, len(data), 32)]
    add_chain(held, blocks)
    assert names_of(blocks) <= reported(held)


def test_what_is_removed_is_not_reported() -> None:
    held = Held(text_of_tokens)
    one, other = tokens_of(500, 2), tokens_of(500, 3)
    add_chain(held, one)
    add_chain(held, other, first=100)
    both = reported(held)
    for number in range(100, 100 + len(other)):
        held.removed(key(number))
    assert reported(held) == both - (names_of(other) - names_of(one))
    assert names_of(one) <= reported(held)
    held.cleared()
    assert reported(held) == set()


def test_a_key_that_comes_back_is_read_again() -> None:
    held = Held(text_of_tokens)
    one, other = tokens_of(100, 4), tokens_of(100, 5)
    held.added(key(1), b"".join(one))
    assert reported(held) == names_of(one)
    held.removed(key(1))
    held.added(key(1), b"".join(other))
    assert reported(held) == names_of(other)


def test_of_too_many_anchors_those_with_the_smallest_names_are_reported() -> None:
    chunks = tokens_of(2000, 6)
    every, some = Held(text_of_tokens), Held(text_of_tokens, max_anchors=20)
    for held in (every, some):
        add_chain(held, chunks)
    report = some.report()
    assert report.anchors.tolist() == sorted(reported(every))[:20]
    assert report.limit == report.anchors[-1]


def test_each_chunk_is_read_once() -> None:
    read: list[bytes] = []

    def counting(tokens: bytes) -> bytes:
        read.append(tokens)
        return text_of_tokens(tokens)

    held = Held(counting)
    add_chain(held, tokens_of(500, 7))
    assert read == []  # not on the way of requests
    held.report()
    held.report()
    assert len(read) == 10


def test_much_that_is_new_is_read_bit_by_bit_the_newest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_module, "MOST_READ", 1)
    held = Held(text_of_tokens)
    one, other = tokens_of(50, 2), tokens_of(50, 3)
    add_chain(held, one)
    add_chain(held, other, first=100)
    assert reported(held) == names_of(other)
    assert reported(held) == names_of(other) | names_of(one)


def test_what_leaves_while_it_is_read_is_not_reported() -> None:
    def leaving(tokens: bytes) -> bytes:
        held.removed(key(1))
        held.added(key(2), b"".join(other))
        return text_of_tokens(tokens)

    held = Held(leaving)
    one, other = tokens_of(100, 8), tokens_of(100, 9)
    held.added(key(1), b"".join(one))
    assert reported(held) == set()
    assert reported(held) == names_of(other)


def test_a_key_that_says_something_else_by_the_time_it_was_read_is_read_again() -> None:
    def changing(tokens: bytes) -> bytes:
        held.removed(key(1))
        held.added(key(1), b"".join(other))
        return text_of_tokens(tokens)

    held = Held(changing)
    one, other = tokens_of(100, 10), tokens_of(100, 11)
    held.added(key(1), b"".join(one))
    held.report()
    held._text_of_tokens = text_of_tokens
    assert reported(held) == names_of(other)


def test_threads_may_add_and_report_together() -> None:
    held = Held(text_of_tokens)
    chunks = tokens_of(3000, 12)
    threads = [
        threading.Thread(target=add_chain, args=(held, chunks[start : start + 20], start))
        for start in range(0, 60, 20)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        held.report()
    expected = [names_of(chunks[start : start + 20]) for start in range(0, 60, 20)]
    assert set().union(*expected) <= reported(held)

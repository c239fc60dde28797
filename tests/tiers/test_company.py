"""What stood before stored text: counted token by token, and which copy is taken for it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeSlots, store_of
from kvboost.core import Match, MatchKind, Provenance, ReusePlan
from kvboost.reuse import lookup
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import content_key, derive, namespace
from kvboost.reuse.lookup import COMPANY_WINDOW as WINDOW
from kvboost.reuse.lookup import Company, find, find_moved
from kvboost.reuse.store import commit, commit_approximate
from kvboost.tiers.store import ChunkStore

SPACE = namespace(b"model", "", None)
SIZE = 32


def keep(store: ChunkStore, tokens: list[int]) -> None:
    chunks = split(tokens, SIZE)
    commit(FakeSlots(len(tokens)), chunks, derive(chunks, SPACE), SPACE, store)


def moved(store: ChunkStore, tokens: list[int], *, same_company: bool = False) -> ReusePlan:
    chunks = split(tokens, SIZE)
    exact = find(chunks, derive(chunks, SPACE), store.index)
    return find_moved(exact, chunks, store.index, SPACE, same_company=same_company)


def text(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def as_bytes(tokens: list[int]) -> bytes:
    return b"".join(chunk.tokens for chunk in split(tokens, SIZE))


def strangers_by_hand(stored: list[int], stop: int, end: int, prompt: list[int]) -> int:
    """Of the first `stop` tokens; windows reach to `end`, where the chunk ends."""
    windows = {tuple(prompt[i : i + WINDOW]) for i in range(len(prompt) - WINDOW + 1)}
    covered = {
        place
        for start in range(min(end, stop + WINDOW - 1) - WINDOW + 1)
        if tuple(stored[start : start + WINDOW]) in windows
        for place in range(start, start + WINDOW)
    }
    return len(set(range(stop)) - covered)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=150), st.data())
@settings(max_examples=200)
def test_strangers_are_counted_as_by_hand(stored: list[int], data: st.DataObject) -> None:
    """Three words only, so that windows meet all over."""
    store = store_of()
    keep(store, stored)
    prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=60))
    company = Company(as_bytes(prompt), store.index)
    chunks = split(stored, SIZE)
    keys = derive(chunks, SPACE)
    order = data.draw(st.permutations(range(len(chunks))))
    for number in order:
        span = chunks[number].span
        if store.index.get(keys[number].prefix) is None:
            continue
        offset = data.draw(st.integers(0, len(span) - 1))
        match = Match(span, keys[number].prefix, len(span), MatchKind.MOVED, offset=offset)
        by_hand = strangers_by_hand(stored, span.start + offset, span.stop, prompt)
        assert company.strangers(match) == by_hand


def test_documents_in_another_order_are_the_same_company_and_numbers_do_not_matter() -> None:
    store, documents = store_of(), [text(150, seed) for seed in range(3)]

    def prompt(order: list[int], question: list[int]) -> list[int]:
        listed = [t for n, i in enumerate(order) for t in [1, 2, 900 + n, 4, *documents[i]]]
        return [*text(40, 50), *listed, *question]

    keep(store, prompt([0, 1, 2], text(20, 60)))
    again = prompt([2, 0, 1], text(20, 61))
    assert moved(store, again, same_company=True).num_reused > 450
    fewer = prompt([2, 1], text(20, 62))  # one of those before them is missing
    assert moved(store, fewer).num_reused > 300
    assert moved(store, fewer, same_company=True).moved == ()


def test_a_few_words_of_a_stranger_are_enough_to_refuse() -> None:
    store, document = store_of(), text(150, 0)
    planted = [7, 8, 9]
    keep(store, [*text(40, 1), *planted, *document, *text(20, 2)])
    prompt = [*text(10, 3), *text(40, 1), *document, *text(20, 4)]
    assert moved(store, prompt).num_reused >= 150
    taken = moved(store, prompt, same_company=True)
    assert all(match.span.stop <= 50 for match in taken.matches)  # what stood before them


def test_a_long_text_with_strangers_is_refused_without_being_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each of its anchors again, that would take the square of its length."""
    store, document = store_of(), text(1500, 0)
    keep(store, [7, 8, 9, *text(60, 1), *document])
    monkeypatch.setattr(lookup, "_run_around", lambda *_: pytest.fail("it was followed"))
    prompt = [*text(10, 3), *document, *text(20, 4)]
    assert moved(store, prompt, same_company=True).moved == ()


def test_the_copy_with_the_fewest_strangers_is_taken() -> None:
    store, document, beside = store_of(), text(150, 0), text(150, 1)
    keep(store, [*text(90, 2), *document, *text(20, 3)])
    keep(store, [*text(30, 4), *beside, *document, *text(20, 5)])
    keep(store, [*text(60, 6), *document, *text(20, 7)])
    prompt = [*text(5, 8), *document, *beside, *text(20, 9)]
    found = [m for m in moved(store, prompt).matches if m.span.stop <= 155]
    assert found and all(m.delta == 5 - 180 for m in found)


def test_a_copy_whose_company_is_not_known_is_the_last_choice_and_never_the_same() -> None:
    store, document = store_of(), text(150, 0)
    stored = [*text(64, 1), *document, *text(20, 2)]
    keep(store, stored)
    prompt = [*text(5, 3), *text(64, 1), *document, *text(20, 4)]
    assert moved(store, prompt, same_company=True).num_reused > 200
    first = derive(split(stored, SIZE), SPACE)[0].prefix
    store.index.remove(first)
    assert moved(store, prompt, same_company=True).moved == ()
    assert moved(store, prompt).num_reused >= 150


@pytest.mark.parametrize("same_company", [False, True])
def test_approximate_copies_are_the_last_choice_and_never_the_same(same_company: bool) -> None:
    store, document = store_of(), text(160, 0)
    chunks = split(document, SIZE)
    keys = [content_key(chunk.tokens, SPACE) for chunk in chunks]
    commit_approximate(FakeSlots(len(document)), chunks, keys, SPACE, store)
    prompt = [*text(5, 1), *document, *text(20, 2)]
    assert bool(moved(store, prompt, same_company=same_company).moved) is not same_company
    company = Company(as_bytes(prompt), store.index)
    entry = store.index.get(keys[0])
    assert entry is not None and entry.provenance is Provenance.APPROXIMATE
    match = Match(chunks[0].span, keys[0], SIZE, MatchKind.MOVED)
    assert company.strangers(match) == math.inf

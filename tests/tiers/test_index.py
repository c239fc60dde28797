"""The index: numbers to numbers, words to chunks, and what is forgotten stays forgotten."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import ContentKey, Entry, Namespace, PrefixKey, Provenance
from kvboost.tiers import anchors
from kvboost.tiers.index import ChunkIndex, shared_head, shared_tail
from kvboost.tiers.table import NumberTable

SPACE, OTHER = Namespace(bytes(range(32))), Namespace(bytes(range(1, 33)))
NUMBERS = st.integers(2, 2**64 - 1)
LITTLE = st.integers(2, 40)  # collides


@given(st.lists(st.tuples(st.booleans(), st.one_of(NUMBERS, LITTLE), NUMBERS), max_size=300))
def test_a_table_is_a_dict(steps: list[tuple[bool, int, int]]) -> None:
    table, expected = NumberTable(), {}
    for is_removed, key, value in steps:
        if is_removed:
            table.remove(key)
            expected.pop(key, None)
        else:
            table.put(key, value)
            expected[key] = value
    assert len(table) == len(expected)
    assert {key: table.get(key) for _, key, _ in steps} == {
        key: expected.get(key) for _, key, _ in steps
    }


def test_a_table_forgets_what_is_not_current_when_it_is_rebuilt() -> None:
    table = NumberTable(are_current=lambda values: values % np.uint64(2) == 0)
    for number in range(2, 5000):
        table.put(number * 0x9E3779B97F4A7C15 % 2**64, number)
    assert len(table) < 4000
    assert all(table.get(n * 0x9E3779B97F4A7C15 % 2**64) == n for n in range(2, 5000, 2))


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype("<u4")


@given(
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(anchors.SHORTEST_FOUND, 400),
)
def test_equal_texts_have_an_anchor_in_common_wherever_they_stand(
    seed: int, left: int, right: int, length: int
) -> None:
    text = words(length, seed)
    found = []
    for before, number in ((left, 1), (right, 2)):
        around = np.concatenate([words(before, seed + number), text, words(90, seed + 10 + number)])
        places, hashes = anchors.pick(around, salted=7)
        inside = (places >= before) & (places <= before + length - anchors.WINDOW)
        offsets = (places[inside] - before).tolist()
        found.append(dict(zip(hashes[inside].tolist(), offsets, strict=True)))
    shared = found[0].keys() & found[1].keys()
    assert shared
    assert all(found[0][anchor] == found[1][anchor] for anchor in shared)


def test_anchors_are_few_and_salted() -> None:
    text = words(32_768, 0)
    places, hashes = anchors.pick(text, salted=1)
    assert 900 < len(places) < 1200
    assert not set(hashes.tolist()) & set(anchors.pick(text, salted=2)[1].tolist())


def entry(name: int, tokens: np.ndarray, parent: int | None = None, **more: object) -> Entry:
    settings = {"provenance": Provenance.EXACT, "home": 0, "space": SPACE} | more
    key = name.to_bytes(32, "little")
    is_exact = settings["provenance"] is Provenance.EXACT
    return Entry(
        tokens=tokens.tobytes(),
        prefix=PrefixKey(key) if is_exact else None,
        content=None if is_exact else ContentKey(key),
        parent=None if parent is None else PrefixKey(parent.to_bytes(32, "little")),
        **settings,
    )


def add(index: ChunkIndex, new: Entry) -> None:
    tokens = np.frombuffer(new.tokens, "<u4")
    places, hashes = anchors.pick(tokens, anchors.salt(new.space))
    index.add(new, zip(places.tolist(), hashes.tolist(), strict=True))


def sightings(
    index: ChunkIndex, tokens: np.ndarray, space: Namespace
) -> list[tuple[int, Entry, int]]:
    """(place in the tokens, entry, offset in its chunk)."""
    places, hashes = anchors.pick(tokens, anchors.salt(space))
    return [
        (place, *seen)
        for place, anchor in zip(places.tolist(), hashes.tolist(), strict=True)
        for seen in index.sightings(anchor, space)
    ]


def test_an_entry_comes_back_as_it_was() -> None:
    index, first = ChunkIndex(), entry(7, words(128, 0), home=300)
    second = entry(8, words(100, 1), parent=7, provenance=Provenance.APPROXIMATE)
    add(index, first)
    add(index, second)
    assert index.get(first.key) == first
    assert index.get(second.key) == second
    assert index.before(second) == first


def test_words_are_found_in_their_own_namespace_only() -> None:
    index, text = ChunkIndex(), words(128, 0)
    add(index, entry(7, text))
    prompt = np.concatenate([words(50, 1), text])
    seen = sightings(index, prompt, SPACE)
    assert seen
    assert all(place - offset == 50 for place, _, offset in seen)
    assert sightings(index, prompt, OTHER) == []
    assert index.knows(prompt, SPACE)
    assert not index.knows(prompt, OTHER)


def test_an_anchor_that_leads_to_another_namespace_leads_nowhere() -> None:
    """Salts keep hashes apart; should two meet all the same, the row has the last word."""
    index, text = ChunkIndex(), words(128, 0)
    places, hashes = anchors.pick(text, anchors.salt(SPACE))
    index.add(entry(7, text, space=OTHER), zip(places.tolist(), hashes.tolist(), strict=True))
    assert sightings(index, text, SPACE) == []


def test_a_few_copies_are_found_the_oldest_and_the_newest_and_exact_ones_first() -> None:
    index, text = ChunkIndex(), words(128, 0)
    approximate, exact = Provenance.APPROXIMATE, Provenance.EXACT
    for name, provenance, expected in (
        (7, approximate, {7}),
        (8, exact, {8}),
        (9, approximate, {8, 9}),
        (10, exact, {8, 10}),
        (11, exact, {8, 10, 11}),
        (12, exact, {8, 10, 11, 12}),
        (13, approximate, {8, 10, 11, 12}),
        (14, exact, {8, 10, 11, 14}),
        (8, exact, {8, 10, 11, 14}),
    ):
        add(index, entry(name, text, provenance=provenance))
        found = {seen.key for _, seen, _ in sightings(index, text, SPACE)}
        assert found == {each.to_bytes(32, "little") for each in expected}
    index.remove(entry(10, text).key)
    add(index, entry(12, text))  # it was known, and found no more
    found = {seen.key for _, seen, _ in sightings(index, text, SPACE)}
    assert found == {each.to_bytes(32, "little") for each in (8, 11, 12, 14)}


def test_all_chunks_within_a_text_are_found_in_their_own_namespace() -> None:
    index, text = ChunkIndex(), words(128, 0)
    inside = [entry(name, text[10:90]) for name in range(20, 30)]
    for each in (
        *inside,
        entry(40, text[:7]),
        entry(41, words(80, 1)),
        entry(42, text, space=OTHER),
    ):
        add(index, each)
    assert set(index.within(text.tobytes(), SPACE)) == {each.key for each in inside}
    beside = np.frombuffer(b"\0" + text.tobytes() + b"\0\0\0", "<u4")  # no whole token is the same
    assert index.within(beside.tobytes(), SPACE) == []


def test_what_was_removed_is_found_no_more_also_when_its_row_is_used_again() -> None:
    index, chance = ChunkIndex(), random.Random(0)
    texts = {name: words(128, name) for name in range(2, 402)}
    alive: set[int] = set()
    for step in range(2000):
        name = chance.choice(list(texts))
        if name in alive:
            index.remove(PrefixKey(name.to_bytes(32, "little")))
            alive.remove(name)
        else:
            add(index, entry(name, texts[name]))
            alive.add(name)
        if step % 100 == 0:
            for each, text in texts.items():
                assert index.knows(text, SPACE) == (each in alive)
    assert len(index) == len(alive)


def test_the_index_is_small() -> None:
    index, count = ChunkIndex(), 5000
    for name in range(2, count + 2):
        add(index, entry(name, words(128, name), parent=name - 1))
    assert index.size_bytes / count < 250  # the table's size goes in steps; docs have the mean


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_shared_ends_are_counted_in_tokens(left: bytes, right: bytes, common: bytes) -> None:
    left, right, common = (part[: len(part) // 4 * 4] for part in (left, right, common))
    assert shared_head(common + left, common + right) >= len(common) // 4
    assert shared_tail(left + common, right + common) >= len(common) // 4
    num_shared = shared_head(left, right)
    assert left[: 4 * num_shared] == right[: 4 * num_shared]
    assert (
        left[4 * num_shared :][:4] != right[4 * num_shared :][:4]
        or min(len(left), len(right)) == 4 * num_shared
    )


def test_a_copy_is_found_when_the_one_that_was_found_is_gone() -> None:
    index, text = ChunkIndex(), words(128, 0)
    add(index, entry(7, text))
    add(index, entry(8, text))
    index.remove(entry(7, text).key)
    assert index.knows(text, SPACE)
    once = sightings(index, text, SPACE)
    add(index, entry(8, text))  # seen again
    assert sightings(index, text, SPACE) == once
    index.remove(entry(8, text).key)
    assert not index.knows(text, SPACE)


def test_families_that_come_and_go_leave_nothing() -> None:
    index = ChunkIndex()
    for parent in range(1000, 1500):
        for child in range(3):
            add(index, entry(10 * parent + child, words(40, child), parent=parent))
        for child in range(3):
            index.remove(entry(10 * parent + child, words(1, 0)).key)
    assert len(index) == 0
    assert len(index._families) == 1


def test_there_may_be_many_namespaces() -> None:
    index = ChunkIndex()
    for number in range(70_000):
        space = Namespace(number.to_bytes(32, "big"))
        index.add(entry(number + 2, words(1, 0), space=space))
    assert len(index.spaces()) == len(index) == 70_000

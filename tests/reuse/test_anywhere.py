"""Text that was read before, at any other place: found token by token, placed and turned."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fakes import GEOMETRY, FakeModel, FakeSlots, FaultyDisk, FaultyTier, store_of
from kvboost.core import Chunk, MatchKind, ReusePlan, Span
from kvboost.errors import TierUnavailable
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import content_key, derive, namespace
from kvboost.reuse.lookup import LEAST_MOVED_TOKENS, find, find_moved
from kvboost.reuse.place import Placed, assemble
from kvboost.reuse.store import commit, commit_approximate
from kvboost.rope import rotate
from kvboost.tiers.anchors import SHORTEST_FOUND
from kvboost.tiers.store import ChunkStore

SPACE = namespace(b"model", "", None)
SIZE = 32


class Fixture:
    def __init__(self) -> None:
        self.store = store_of()

    def keep(self, tokens: list[int], slots: FakeSlots | None = None) -> None:
        chunks = split(tokens, SIZE)
        slots = slots or FakeSlots(len(tokens))
        commit(slots, chunks, derive(chunks, SPACE), SPACE, self.store)

    def find(self, tokens: list[int], space: bytes = SPACE) -> ReusePlan:
        chunks = split(tokens, SIZE)
        exact = find(chunks, derive(chunks, space), self.store.index)
        return find_moved(exact, chunks, self.store.index, space)


def text(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def found_ratio(plan: ReusePlan, span: Span) -> float:
    inside = [p for m in plan.matches for p in range(m.span.start, m.span.stop)]
    return len([p for p in inside if span.start <= p < span.stop]) / len(span)


@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 200), st.integers(100, 400))
@settings(max_examples=60)
def test_a_document_is_found_whole_at_any_offset(
    seed: int, before: int, after: int, length: int
) -> None:
    store, document = Fixture(), text(length, seed)
    head, other = text(before, seed + 1), text(after, seed + 3)
    assume(head != other)  # one word may be the same by chance: an exact prefix
    store.keep(head + document + text(40, seed + 2))
    plan = store.find(other + document + text(30, seed + 4))
    assert length >= SHORTEST_FOUND
    assert found_ratio(plan, Span(after, after + length)) == 1.0
    assert all(m.delta == after - before for m in plan.matches if m.kind is MatchKind.MOVED)
    moved = [m for m in plan.matches if m.kind is MatchKind.MOVED]
    assert [m.follows for m in moved] == [False] + [True] * (len(moved) - 1)


@given(st.lists(st.lists(st.integers(0, 1), max_size=200), min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_matches_say_what_the_prompt_says_and_never_overlap(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    """Two tokens only: texts that repeat themselves and each other all over."""
    store = Fixture()
    for tokens in prompts:
        if tokens:
            store.keep(tokens)
    parts = data.draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=3))
    prompt = [0, 1, *(token for part in parts for token in part[3:]), 1]
    plan, cursor = store.find(prompt), 0
    for match in plan.matches:
        assert match.span.start >= cursor
        cursor = match.span.stop
        entry = store.store.index.get(match.key)
        assert entry is not None
        stored = np.frombuffer(entry.tokens, "<u4")[match.offset :][: len(match.span)]
        assert stored.tolist() == prompt[match.span.start : match.span.stop]
        if match.kind is MatchKind.MOVED:
            assert match.delta == match.span.start - match.offset - entry.home
    assert cursor < len(prompt)


def test_documents_are_found_in_any_order() -> None:
    store, documents = Fixture(), [text(150, seed) for seed in range(6)]
    store.keep([t for document in documents for t in [1, 2, 3, *document]])
    order = [4, 1, 5, 0, 3, 2]
    prompt = text(20, 99) + [t for i in order for t in [7, *documents[i]]] + text(20, 98)
    plan = store.find(prompt)
    for place in range(6):
        start = 20 + 151 * place + 1
        assert found_ratio(plan, Span(start, start + 150)) == 1.0


def test_other_tenants_and_short_echoes_are_not_found() -> None:
    store, document = Fixture(), text(150, 0)
    store.keep(document)
    prompt = text(20, 1) + document + text(20, 2)
    assert store.find(prompt, namespace(b"model", "other", None)).matches == ()
    assert store.find(text(20, 1) + document[: LEAST_MOVED_TOKENS - 1] + text(99, 2)).matches == ()


def placed_of(plan: ReusePlan, tokens: list[int], slots: FakeSlots, store: ChunkStore) -> Placed:
    chunks = store.tiers.get([match.key for match in plan.matches])
    return assemble(plan, tokens, slots, FakeModel(), store, SPACE, chunks)


def test_moved_rows_are_turned_by_how_far_they_moved() -> None:
    store, document, slots = Fixture(), text(150, 0), FakeSlots(190)
    store.keep(text(40, 1) + document, slots)
    prompt = text(25, 2) + document + text(10, 3)
    target = FakeSlots(len(prompt), seed=5)
    placed = placed_of(store.find(prompt), prompt, target, store.store)
    assert placed.plan.num_reused == 150
    assert target.exact_stop == 25
    source, moved = slots.read(Span(40, 190)), target.read(Span(25, 175))
    for group, before, after in zip(GEOMETRY.groups, source, moved, strict=True):
        for place, plane in enumerate(group.planes):
            rotation = FakeModel.rotations[plane]
            expected = before[place] if rotation is None else rotate(before[place], rotation, -15)
            torch.testing.assert_close(after[place], expected)


def test_a_moved_chunk_that_is_gone_leaves_the_others() -> None:
    store, documents = Fixture(), [text(150, seed) for seed in range(2)]
    store.keep(documents[0])
    store.keep(documents[1])
    prompt = text(5, 9) + documents[0] + documents[1] + text(5, 8)
    plan = store.find(prompt)
    store.store.tiers.discard(plan.matches[0].key)
    placed = placed_of(plan, prompt, FakeSlots(len(prompt)), store.store)
    assert placed.lost == (plan.matches[0].key,)
    first, *others = plan.matches[1:]
    assert placed.plan.matches == (replace(first, follows=False), *others)


def test_approximate_chunks_are_found_by_their_words_alone() -> None:
    store, document, slots = Fixture(), text(100, 0), FakeSlots(200)
    slots.exact_stop = 50
    chunks = split(document, SIZE)
    names = [content_key(chunk.tokens, SPACE) for chunk in chunks]
    commit_approximate(slots, chunks, names, SPACE, store.store)
    assert all(match.kind is MatchKind.MOVED for match in store.find([*document, 5]).matches)
    assert store.find([*document, 5]).num_reused == 100
    exact = derive(chunks, SPACE)
    assert all(store.store.index.get(key.prefix) is None for key in exact)


def stored_at(store: ChunkStore, document: list[int], home: int, seed: int) -> FakeSlots:
    """A text that was computed on top of moved text from `home` on, and the rows it came from."""
    slots, stop = FakeSlots(home + len(document), seed), home + len(document)
    slots.exact_stop = 0
    chunk = Chunk(Span(home, stop), np.asarray(document, "<u4").tobytes())
    commit_approximate(slots, [chunk], [content_key(chunk.tokens, SPACE)], SPACE, store)
    return slots


def check_placed(store: ChunkStore, document: list[int], source: FakeSlots, home: int) -> None:
    """The document, found behind 25 other tokens, is the source's rows turned from `home`."""
    prompt = text(25, 77) + document + text(5, 78)
    chunks, target = split(prompt, SIZE), FakeSlots(len(prompt), seed=9)
    plan = find_moved(ReusePlan(len(prompt)), chunks, store.index, SPACE)
    placed = placed_of(plan, prompt, target, store).plan
    assert placed.num_reused == len(document)
    expected = source.read(Span(home, home + len(document)))[0][0]
    turned = rotate(expected, FakeModel.rotations[0], 25 - home)
    torch.testing.assert_close(target.read(Span(25, 25 + len(document)))[0][0], turned)


def test_a_copy_that_another_process_stored_from_elsewhere_is_turned_from_its_own_place() -> None:
    shared, document = FaultyTier(), text(100, 0)
    ours, theirs = store_of(below=[shared]), store_of(below=[shared])
    stored_at(ours, document, 500, seed=1)
    assert ours.tiers.flush(5)
    source = stored_at(theirs, document, 900, seed=2)  # replaces ours in the shared tier
    assert theirs.tiers.flush(5)
    (key,) = ours.tiers.memory._chunks
    ours.tiers.memory.discard([key])
    ours.tiers.load([key], ours.tiers.patience())  # nobody tells the index
    check_placed(ours, document, source, 900)
    for store in (ours, theirs):
        store.tiers.close()


def test_a_text_that_is_computed_again_while_its_tier_is_down_has_its_new_place() -> None:
    disk, document = FaultyDisk(), text(100, 0)
    store = store_of(below=[disk])
    stored_at(store, document, 500, seed=1)
    assert store.tiers.flush(5)
    store.tiers.memory.discard(list(store.tiers.memory._chunks))
    store.tiers._below[0]._fail(TierUnavailable("no answer in time"))
    source = stored_at(store, document, 900, seed=2)
    (key,) = store.tiers.memory._chunks
    entry = store.index.get(key)
    assert entry is not None and entry.home == 900
    check_placed(store, document, source, 900)
    store.tiers.close()


def test_a_text_that_is_stored_already_keeps_the_place_of_its_copy() -> None:
    store, document = store_of(), text(100, 0)
    source = stored_at(store, document, 500, seed=1)
    stored_at(store, document, 900, seed=2)
    check_placed(store, document, source, 500)


@pytest.mark.parametrize("shown", [SIZE, 10])  # 10: too few to be found before what follows them
def test_chunks_from_different_places_are_not_one_run(shown: int) -> None:
    """A chunk that was stored before keeps its home; what follows a copy of it is apart."""
    store, slots = Fixture(), FakeSlots(200)
    slots.exact_stop = 0
    first, last = text(SIZE, 0), text(100, 1)
    chunks = [
        Chunk(Span(c.span.start + 10, c.span.stop + 10), c.tokens)
        for c in split(first + first + last, SIZE)
    ]
    names = [content_key(chunk.tokens, SPACE) for chunk in chunks]
    commit_approximate(slots, chunks, names, SPACE, store.store)
    prompt = text(50, 2) + first[-shown:] + last + text(9, 3)
    plan = store.find(prompt)
    target = FakeSlots(len(prompt), seed=9)
    placed = placed_of(plan, prompt, target, store.store).plan
    homes = {m.key: store.store.index.get(m.key).home for m in placed.matches}
    for match in placed.matches:
        home = homes[match.key] + match.offset
        source = slots.read(Span(home, home + len(match.span)))
        expected = rotate(source[0][0], FakeModel.rotations[0], match.span.start - home)
        torch.testing.assert_close(target.read(match.span)[0][0], expected)
    assert placed.num_reused >= 100

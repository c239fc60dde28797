"""Who watches the index knows at each moment what can be found in it."""

from __future__ import annotations

import random
import threading

import pytest

from fakes import WordTokenizer, words
from kvboost import KVBoost
from kvboost.core import Entry, Namespace, PrefixKey, Provenance
from kvboost.tiers.index import ChunkIndex
from tiny_models import SUPPORTED, build

SPACE = Namespace(bytes(32))


def key(number: int) -> PrefixKey:
    return PrefixKey((number + 7).to_bytes(32, "little"))


def entry(number: int, parent: int | None = None) -> Entry:
    return Entry(
        tokens=number.to_bytes(8, "little"),
        provenance=Provenance.EXACT,
        prefix=key(number),
        content=None,
        parent=None if parent is None else key(parent),
        home=0,
        space=SPACE,
    )


class Watcher:
    def __init__(self) -> None:
        self.known: dict[bytes, tuple[bytes, bytes | None]] = {}

    def added(self, key: bytes, tokens: bytes, parent: bytes | None) -> None:
        assert key not in self.known
        self.known[key] = tokens, parent

    def removed(self, key: bytes) -> None:
        del self.known[key]


def test_a_watcher_is_told_of_what_is_here_comes_and_goes() -> None:
    index, watcher = ChunkIndex(), Watcher()
    index.add(entry(1))
    index.add(entry(2, parent=1))
    index.add(entry(3, parent=1))
    index.remove(key(3))
    index.watch(watcher)
    assert watcher.known == {
        key(1): (entry(1).tokens, None),
        key(2): (entry(2).tokens, key(1)),
    }
    index.add(entry(4, parent=2))
    assert watcher.known[key(4)] == (entry(4).tokens, key(2))
    index.remove(key(2))
    assert list(watcher.known) == [key(1), key(4)]


def test_what_is_known_is_not_told_again_nor_is_what_was_not_here() -> None:
    index, watcher = ChunkIndex(), Watcher()
    index.watch(watcher)
    index.add(entry(1))
    index.add(entry(1))
    index.remove(key(2))
    assert list(watcher.known) == [key(1)]


def test_several_may_watch() -> None:
    index, watchers = ChunkIndex(), [Watcher(), Watcher()]
    for watcher in watchers:
        index.watch(watcher)
    index.add(entry(1))
    assert [list(watcher.known) for watcher in watchers] == [[key(1)], [key(1)]]


def test_who_begins_to_watch_while_others_write_misses_nothing() -> None:
    index, watcher = ChunkIndex(), Watcher()

    def write(first: int) -> None:
        chance = random.Random(first)
        for number in range(first, first + 300):
            index.add(entry(number))
            if chance.random() < 0.5:
                index.remove(key(number))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    index.watch(watcher)
    for thread in threads:
        thread.join()
    here = {entry.key: (entry.tokens, entry.parent) for entry in index.entries(SPACE, 10**6)}
    assert watcher.known == here


@pytest.mark.tiny
def test_an_engine_tells_what_it_stores() -> None:
    watcher, prompt = Watcher(), words(64)
    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), chunk_size=16) as engine:
        engine.warm(prompt)
        engine.flush()
        engine.watch(watcher)
        said = b"".join(tokens for tokens, _ in watcher.known.values())
        assert said == b"".join(token.to_bytes(4, "little") for token in prompt)
        assert sum(parent in watcher.known for _, parent in watcher.known.values()) == 3

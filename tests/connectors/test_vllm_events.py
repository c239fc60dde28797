"""vLLM's events: from its bytes to what an engine holds, also when some are lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvboost.connectors.vllm.events import GROUP_TOKENS, Blocks, EventReader, decode
from kvboost.routing import anchors
from kvboost.routing.held import Held
from waiting import wait_until

SIZE = 16  # tokens in a block
BAD = 13  # a block that cannot be added
# Written by the classes of vLLM 0.32: two blocks, then a third one and the second one gone, then
# all gone.
STORED = bytes.fromhex(
    "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c42001"
    "01010101010101010101010101010101010101010101010101010101010101c42002020202020202020202020202"
    "02020202020202020202020202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69"
    "6473dc00206465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7fcc80cc81cc82cc83aa626c6f63"
    "6b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b"
    "65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f61747465"
    "6e74696f6e00"
)
CHANGED = bytes.fromhex(
    "93cb4004000000000000928aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42003"
    "03030303030303030303030303030303030303030303030303030303030303b1706172656e745f626c6f636b5f68"
    "617368c4200202020202020202020202020202020202020202020202020202020202020202a9746f6b656e5f6964"
    "73dc0010ce00011170ce00011171ce00011172ce00011173ce00011174ce00011175ce00011176ce00011177ce00"
    "011178ce00011179ce0001117ace0001117bce0001117cce0001117dce0001117ece0001117faa626c6f636b5f73"
    "697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800"
    "b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b"
    "52656d6f766564ac626c6f636b5f68617368657391c4200202020202020202020202020202020202020202020202"
    "020202020202020202a66d656469756da3475055a967726f75705f6964780000"
)
CLEARED = bytes.fromhex("93cb400c0000000000009181a474797065b0416c6c426c6f636b73436c6561726564c0")


class Told:
    """A `Held` that only notes."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, tuple[list[int], bytes | None]] = {}

    def added(self, key: bytes, tokens: bytes, parent: bytes | None = None) -> None:
        assert key not in self.chunks
        self.chunks[key] = np.frombuffer(tokens, "<u4").tolist(), parent

    def removed(self, key: bytes) -> None:
        del self.chunks[key]

    def cleared(self) -> None:
        self.chunks.clear()

    @property
    def tokens(self) -> list[int]:
        return sorted(token for tokens, _ in list(self.chunks.values()) for token in tokens)


def stored(first: int, tokens: list[int], before: int | None = None, **more: Any) -> dict[str, Any]:
    """Blocks named by numbers."""
    hashes = list(range(first, first + len(tokens) // SIZE))
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": before,
        "token_ids": tokens,
        "block_size": SIZE,
        "medium": "GPU",
    }
    return event | more


def removed(*blocks: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"} | more


def text_of_tokens(tokens: bytes) -> bytes:
    return b"".join(b"%d and " % token for token in np.frombuffer(tokens, "<u4").tolist())


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def names_of(tokens: list[int]) -> set[int]:
    return set(anchors.find(text_of_tokens(np.array(tokens, "<u4").tobytes())).tolist())


def test_vllms_bytes_are_read() -> None:
    pytest.importorskip("msgspec")
    told = Told()
    blocks = Blocks(told)  # type: ignore[arg-type]
    blocks.apply(decode(STORED))
    assert told.tokens == list(range(100, 132))
    blocks.apply(decode(CHANGED))
    assert told.tokens == [*range(100, 116), *range(70_000, 70_016)]
    blocks.apply(decode(CLEARED))
    assert told.tokens == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", b"\x91\x01", b"\x92\x01\x01"])
def test_other_bytes_are_no_events(payload: bytes) -> None:
    pytest.importorskip("msgspec")
    with pytest.raises(ValueError, match="not"):
        decode(payload)


def test_a_text_has_all_its_anchors_however_it_was_stored() -> None:
    held = Held(text_of_tokens)
    blocks = Blocks(held)
    tokens = words(40 * SIZE, 0)
    blocks.apply([stored(0, tokens[: 20 * SIZE])])
    for number in range(20, 40):  # as an answer grows
        part = tokens[number * SIZE : (number + 1) * SIZE]
        blocks.apply([stored(number, part, before=number - 1)])
    assert names_of(tokens) <= set(held.report().anchors.tolist())


def test_texts_that_fork_within_a_group_have_all_their_anchors() -> None:
    held = Held(text_of_tokens)
    blocks = Blocks(held)
    head, one, other = words(11 * SIZE, 1), words(20 * SIZE, 2), words(20 * SIZE, 3)
    blocks.apply([stored(0, head + one), stored(100, other, before=10)])
    found = set(held.report().anchors.tolist())
    assert names_of(head + one) <= found
    assert names_of(head + other) <= found


def test_of_a_group_only_the_removed_block_goes() -> None:
    told = Told()
    blocks = Blocks(told)  # type: ignore[arg-type]
    blocks.apply([stored(0, list(range(8 * SIZE)))])
    assert len(told.chunks) == 8 * SIZE // GROUP_TOKENS
    blocks.apply([removed(7)])
    assert told.tokens == list(range(7 * SIZE))
    blocks.apply([removed(2, 99)])
    assert told.tokens == [*range(2 * SIZE), *range(3 * SIZE, 7 * SIZE)]
    blocks.apply([removed(0, 1, 3, 4, 5, 6)])
    assert told.chunks == {}


def test_what_two_requests_stored_is_held_once() -> None:
    told = Told()
    blocks = Blocks(told)  # type: ignore[arg-type]
    blocks.apply([stored(0, list(range(4 * SIZE)))])
    blocks.apply([stored(2, list(range(2 * SIZE, 6 * SIZE)), before=1)])
    assert told.tokens == list(range(6 * SIZE))
    blocks.apply([stored(5, list(range(5 * SIZE, 6 * SIZE)), before=4)])
    assert told.tokens == list(range(6 * SIZE))


def test_each_memory_and_group_of_layers_is_apart() -> None:
    told = Told()
    blocks = Blocks(told)  # type: ignore[arg-type]
    one = list(range(SIZE))
    blocks.apply([stored(0, one), stored(0, one, medium="CPU"), stored(0, one, group_idx=1)])
    assert told.tokens == sorted(one * 3)
    blocks.apply([removed(0)])
    assert told.tokens == sorted(one * 2)
    blocks.apply([removed(0, medium="CPU"), removed(0, group_idx=1)])
    assert told.tokens == []


def test_what_says_nothing_of_a_text_is_left_out() -> None:
    told = Told()
    Blocks(told).apply(  # type: ignore[arg-type]
        [
            stored(0, list(range(SIZE)), kv_cache_spec_kind="sliding_window"),
            stored(1, [], block_hashes=[1]),
            stored(2, [], block_hashes=[2], block_size=0),
            stored(3, list(range(SIZE)), block_hashes=[3], block_size=0),
            {"type": "NewInSomeVersion"},
            ["BlockStored"],
        ]
    )
    assert told.chunks == {}


class Publisher:
    """The two sockets of vLLM's publisher, and what it keeps for replays."""

    def __init__(self, folder: Any) -> None:
        zmq = pytest.importorskip("zmq")
        self._encode = pytest.importorskip("msgspec").msgpack.encode
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self.endpoints = [f"ipc://{folder}/events", f"ipc://{folder}/replay"]
        self._events.bind(self.endpoints[0])
        self._replay.bind(self.endpoints[1])
        self._kept: list[tuple[bytes, bytes]] = []
        self.first_kept = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def wait_for_reader(self) -> None:
        assert self._events.poll(20_000)
        assert self._events.recv() == b"\x01"  # all topics

    def publish(self, number: int, *events: object, is_lost: bool = False) -> None:
        message = number.to_bytes(8, "big"), self._encode([0.5, list(events), 0])
        self._kept.append(message)
        if not is_lost:
            self._events.send_multipart((b"", *message))

    def _answer(self) -> None:
        while not self._is_closed.is_set():
            if self._replay.poll(20):
                client, empty, first = self._replay.recv_multipart()
                assert empty == b""
                least = max(int.from_bytes(first, "big"), self.first_kept)
                for number, payload in list(self._kept):
                    if int.from_bytes(number, "big") >= least:
                        self._replay.send_multipart((client, b"", b"", number, payload))
                self._replay.send_multipart((client, b"", b"", b"\xff" * 8, b""))

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path: Any) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()


def until(told: Told, tokens: list[int]) -> None:
    wait_until(lambda: told.tokens == tokens)


@contextmanager
def joined(told: Told, publisher: Publisher, *, replays: bool) -> Iterator[EventReader]:
    """A reader that gets what is published from now on."""
    endpoints = publisher.endpoints if replays else publisher.endpoints[:1]
    reader = EventReader(told, *endpoints)  # type: ignore[arg-type]
    try:
        publisher.wait_for_reader()
        yield reader
    finally:
        reader.close()


def block(number: int) -> dict[str, Any]:
    return stored(number, [number] * SIZE)


def test_lost_events_are_asked_for(publisher: Publisher) -> None:
    told = Told()
    publisher.publish(0, block(0), is_lost=True)
    with joined(told, publisher, replays=True):
        publisher.publish(1, block(1))
        until(told, [0] * SIZE + [1] * SIZE)
        publisher.publish(2, removed(0), is_lost=True)
        publisher.publish(3, block(3))
        until(told, [1] * SIZE + [3] * SIZE)


def test_without_replays_a_lost_event_makes_all_unknown(publisher: Publisher) -> None:
    told = Told()
    with joined(told, publisher, replays=False):
        publisher.publish(0, block(0))
        until(told, [0] * SIZE)
        publisher.publish(2, block(2))
        until(told, [2] * SIZE)


def test_what_is_kept_is_used_when_older_events_are_gone(publisher: Publisher) -> None:
    told = Told()
    publisher.first_kept = 2
    for number in range(4):
        publisher.publish(number, block(number), is_lost=True)
    with joined(told, publisher, replays=True):
        publisher.publish(4, block(4))
        until(told, [2] * SIZE + [3] * SIZE + [4] * SIZE)


def test_an_engine_that_starts_anew_holds_nothing_of_before(publisher: Publisher) -> None:
    told = Told()
    with joined(told, publisher, replays=False):
        publisher.publish(0, block(0))
        publisher.publish(1, block(1))
        until(told, [0] * SIZE + [1] * SIZE)
        publisher.publish(0, block(7))
        until(told, [7] * SIZE)


def test_a_reader_can_be_closed_twice(publisher: Publisher) -> None:
    with joined(Told(), publisher, replays=False) as reader:
        reader.close()


class Failing(Told):
    """Fails in a way that nobody foresaw."""

    def added(self, key: bytes, tokens: bytes, parent: bytes | None = None) -> None:
        super().added(key, tokens, parent)
        if tokens[0] == BAD:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("bad", [{"type": "BlockStored"}, {"type": "BlockRemoved"}, block(BAD)])
def test_a_message_that_fails_makes_all_unknown_and_the_reading_goes_on(
    publisher: Publisher, bad: dict[str, Any]
) -> None:
    told = Failing()
    with joined(told, publisher, replays=False):
        publisher.publish(0, block(5))
        until(told, [5] * SIZE)
        publisher.publish(1, block(6), bad)
        publisher.publish(2, block(1))
        until(told, [1] * SIZE)

"""Reads a vLLM engine's KV events into a `Held`, for the routing of requests.

Knows vLLM's events by their bytes alone, so it runs in any process that can reach the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvboost.core import TOKEN_BYTES
from kvboost.routing.held import Held

_log = logging.getLogger(__name__)

# Blocks that follow each other are held together, up to the length of a chunk: a block alone has
# some 60 bytes, less than a place needs, and would be read anew with each of the next ones. Where
# a text forks or a block leaves, a group is cut in two.
GROUP_TOKENS = 128
# Kinds of cache that keep blocks of the whole text, not only of its end.
WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")

POLL_MS = 200  # how soon `close` is noticed
REPLAY_MS = 2_000
_END = (-1).to_bytes(8, "big", signed=True)  # ends a replay


@dataclass(frozen=True, slots=True)
class _Group:
    blocks: list[bytes]
    tokens: bytes
    parent: bytes | None  # the last block of the group before it


class Blocks:
    """The blocks of one engine, followed by its events."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._lasts: dict[bytes, bytes] = {}  # block -> the last one of its group
        self._groups: dict[bytes, _Group] = {}  # by their last blocks

    def apply(self, events: Iterable[object]) -> None:
        """Apply events in vLLM's order; unknown ones are skipped."""
        for event in events:
            if not isinstance(event, Mapping):
                continue
            kind = event.get("type")
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for block in event["block_hashes"]:
                    self._remove(_name(event, block))
            elif kind == "AllBlocksCleared":
                self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._lasts.clear()
        self._groups.clear()
        self._held.cleared()

    def _store(self, event: Mapping[str, Any]) -> None:
        # Some offloading connectors do not say which tokens they stored, nor how many in a block.
        if not event["token_ids"] or event["block_size"] < 1:
            return
        size = TOKEN_BYTES * event["block_size"]
        tokens = np.array(event["token_ids"], "<u4").tobytes()
        blocks = [_name(event, block) for block in event["block_hashes"]]
        if event.get("kv_cache_spec_kind") not in WHOLE or len(tokens) != size * len(blocks):
            return
        before = event["parent_block_hash"]
        parent = None if before is None else _name(event, before)
        start = 0
        while start < len(blocks) and blocks[start] in self._lasts:  # another request had it too
            parent = blocks[start]
            start += 1
        if parent is not None:
            self._cut_after(parent)
        step = max(1, GROUP_TOKENS // event["block_size"])
        for first in range(start, len(blocks), step):
            group = blocks[first : first + step]
            for block in group:
                self._remove(block)
            said = tokens[size * first : size * (first + len(group))]
            self._hold(_Group(group, said, parent))
            parent = group[-1]

    def _hold(self, group: _Group) -> None:
        last = group.blocks[-1]
        self._groups[last] = group
        self._lasts.update(dict.fromkeys(group.blocks, last))
        self._held.added(last, group.tokens, group.parent)

    def _let_go(self, last: bytes) -> _Group:
        group = self._groups.pop(last)
        for block in group.blocks:
            del self._lasts[block]
        self._held.removed(last)
        return group

    def _cut_after(self, block: bytes) -> None:
        """Make a block the last one of its group."""
        last = self._lasts.get(block, block)
        if last != block:
            group = self._let_go(last)
            count = group.blocks.index(block) + 1
            stop = count * len(group.tokens) // len(group.blocks)
            self._hold(_Group(group.blocks[:count], group.tokens[:stop], group.parent))
            self._hold(_Group(group.blocks[count:], group.tokens[stop:], block))

    def _remove(self, block: bytes) -> None:
        if block not in self._lasts:
            return
        self._cut_after(block)
        group = self._let_go(block)
        if len(group.blocks) > 1:
            size = len(group.tokens) // len(group.blocks)
            self._hold(_Group(group.blocks[:-1], group.tokens[:-size], group.parent))


def _name(event: Mapping[str, Any], block: bytes | int) -> bytes:
    """A block's hash, with its memory and group of layers."""
    where = f"{event.get('medium')}/{event.get('group_idx')}/".encode()
    return where + (block if isinstance(block, bytes) else str(block).encode())


def decode(payload: bytes) -> list[object]:
    """The events of one message.

    Raises:
        ValueError: it is not one.
    """
    import msgspec  # noqa: PLC0415

    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"not msgpack: {error}") from error
    events = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
    if not isinstance(events, list):
        raise ValueError("not a batch of events")
    return events


class EventReader:
    """Follows an engine's events in a thread of its own, until `close`; needs pyzmq and msgspec."""

    def __init__(
        self, held: Held, endpoint: str, replay_endpoint: str | None = None, topic: str = ""
    ) -> None:
        """Connect to where vLLM's `--kv-events-config` publishes, and to its `replay_endpoint`.

        Events that were missed are asked for there. Without it all is forgotten when one is
        missing: what is known would be wrong from then on.
        """
        import zmq  # noqa: PLC0415

        self._blocks = Blocks(held)
        self._next = 0  # number of the next message
        self._is_closed = threading.Event()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._thread = threading.Thread(target=self._run, name="kvboost-vllm-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                if self._events.poll(POLL_MS):
                    self._take(self._events.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    def _take(self, message: list[bytes]) -> None:
        if len(message) != 3:
            return
        number = int.from_bytes(message[1], "big")
        if number < self._next:
            _log.info("vLLM's events start over: it is a new engine")
            self._blocks.clear()
            self._next = 0
        if number > self._next:
            self._catch_up(number)
        self._apply(message)

    def _catch_up(self, number: int) -> None:
        """Get the messages before `number` that were missed, as far as they are kept."""
        for message in self._replayed():
            each = int.from_bytes(message[1], "big")
            if self._next <= each < number:
                self._skip_to(each)
                self._apply(message)
        self._skip_to(number)

    def _skip_to(self, number: int) -> None:
        """Start over with message `number`, unless it is the next one."""
        if number > self._next:
            _log.info("events %d to %d of vLLM are lost", self._next, number - 1)
            self._blocks.clear()
            self._next = number

    def _replayed(self) -> list[list[bytes]]:
        """The engine's kept messages, from the next one on."""
        if self._replay_endpoint is None:
            return []
        import zmq  # noqa: PLC0415

        messages: list[list[bytes]] = []
        # A socket for each time: after one unanswered request a REQ socket takes no other.
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.connect(self._replay_endpoint)
            replay.send_multipart([b"", self._next.to_bytes(8, "big")])
            while replay.poll(REPLAY_MS):
                message = replay.recv_multipart()[1:]
                if len(message) != 3 or message[1] == _END:
                    break
                messages.append(message)
        return messages

    def _apply(self, message: list[bytes]) -> None:
        self._next += 1
        try:
            self._blocks.apply(decode(message[2]))
        except Exception:
            # Forgotten blocks are reported again; wrong ones would stay.
            _log.warning(
                "vLLM's events cannot be read: all its blocks are forgotten", exc_info=True
            )
            self._blocks.clear()

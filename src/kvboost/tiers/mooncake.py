"""Mooncake Store: memory of many machines, found through one master.

What was tried with version 0.3.13, and shapes this file: a call on a closed store crashes the
process; a call to a frozen master waits as long as an environment variable says; a store finds
back to a restarted master by itself, but each call to a dead one takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from typing import Any

from kvboost.core import FrameKey
from kvboost.errors import ConfigError, TierUnavailable, missing_packages
from kvboost.tiers.address import shown, size_bytes, split_url, take_options
from kvboost.tiers.base import Tier, TierStats

PACKAGE = "mooncake-transfer-engine-non-cuda"
DEFAULT_PORT = 50051
DEFAULT_PREFIX = "kvboost:"
DEFAULT_SEGMENT_BYTES = 1 << 30
MIN_SEGMENT_BYTES = 16 << 20
DEFAULT_BUFFER_BYTES = 32 << 20
_BATCH_BYTES = 4 << 20  # larger ones leave the processor's cache between the two copies

# Codes of the store. What is being written or has just left counts as not there.
_OK = 0
_NO_ROOM = -200
_NOT_THERE = {-600, -703, -704, -707, -710, -712}  # -600: its size is another by now
_EXISTS = -705
_GONE = -704

_SILENT = 4  # above the highest severity of its log
_SEVERITY = "_ZN3fLI17FLAGS_minloglevelE"


class MooncakeTier(Tier):
    """A store of frames at `mooncake://master[:port]`.

    Options of the URL: `segment_bytes` of memory that this process gives to the store (0: none),
    `buffer_bytes` for transfers in each direction, `host` under which others reach this process,
    `metadata` (a server of it instead of peer to peer), `protocol` (tcp, rdma), `devices` of RDMA
    and `prefix` of keys. An object does not change: what is put again under a key is not written.
    """

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        self._address = shown(url)
        parsers: dict[str, Callable[[str], Any]] = {
            "segment_bytes": _segment_bytes,
            "buffer_bytes": size_bytes,
            **dict.fromkeys(("host", "metadata", "protocol", "devices", "prefix"), str),
        }
        bare_url, self._options = take_options(url, parsers)
        parts = split_url(bare_url)
        if parts.scheme != "mooncake" or not parts.hostname:
            raise ConfigError(f"{self._address}: expected mooncake://master[:port]")
        self._master = (parts.hostname, parts.port or DEFAULT_PORT)
        self._prefix: str = self._options.get("prefix", DEFAULT_PREFIX)
        self._timeout_s = timeout_s
        self._new_store = _loaded(self._address, timeout_s)
        buffer_bytes = self._options.get("buffer_bytes", DEFAULT_BUFFER_BYTES)
        self._buffers = self._reading, self._writing = _Buffer(buffer_bytes), _Buffer(buffer_bytes)
        self._connecting = threading.Lock()
        self._store: Any = None
        self._is_doubtful = True  # whether the master may be dead
        self._is_closed = False
        with suppress(TierUnavailable), self._use(self._reading):
            pass  # connecting takes a second: not in the first request, if it can be helped

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """Batches go through the reading buffer; the frames are copies of their own."""
        frames: dict[FrameKey, memoryview] = {}
        with self._use(self._reading) as store:
            names = {self._name(key): key for key in keys}
            found = store.batch_is_exist(list(names))
            there = [name for name, code in zip(names, found, strict=True) if self._says_yes(code)]
            sizes = _sizes(store, there) if there else {}
            for batch in self._reading.batches(sizes):
                addresses = self._reading.addresses(batch.values())
                codes = store.batch_get_into(list(batch), addresses, list(batch.values()))
                offset = 0
                for (name, size), code in zip(batch.items(), codes, strict=True):
                    if code == size:
                        copy = bytes(self._reading.view[offset : offset + size])
                        frames[names[name]] = memoryview(copy)
                    elif code not in _NOT_THERE:
                        raise self._fault("read", code)
                    offset += size
        return frames

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Batches go through the writing buffer; returned is what the segments have no room for."""
        named = {self._name(key): key for key in frames}
        sizes = {name: frames[key].nbytes for name, key in named.items()}
        refused = [named[name] for name, size in sizes.items() if not self._writing.holds(size)]
        with self._use(self._writing) as store:
            for batch in self._writing.batches(sizes):
                offset = 0
                for name, size in batch.items():
                    self._writing.view[offset : offset + size] = frames[named[name]].cast("B")
                    offset += size
                addresses = self._writing.addresses(batch.values())
                codes = store.batch_put_from(list(batch), addresses, list(batch.values()))
                for name, code in zip(batch, codes, strict=True):
                    if code == _NO_ROOM:
                        refused.append(named[name])
                    elif code not in (_OK, _EXISTS):
                        raise self._fault("write", code)
        return refused

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Forget keys at once, even those that were read in the last seconds."""
        names = [self._name(key) for key in keys]
        with self._use(self._writing) as store:
            for code in store.batch_remove(names, force=True) if names else ():
                if code not in (_OK, _GONE):
                    raise self._fault("remove", code)

    def stats(self) -> TierStats:
        """Nothing is known here of what others have stored."""
        return TierStats(num_entries=0, size_bytes=0, budget_bytes=0)

    def close(self) -> None:
        """Leave the store, with the frames in the segment of this process.

        Where that would crash (a call still waits) or take long (the master is dead), it is left
        to the end of the process.
        """
        reading, writing = (buffer.alone(self._timeout_s) for buffer in self._buffers)
        with reading as no_reader, writing as no_writer, suppress(TierUnavailable):
            is_open, self._is_closed = not self._is_closed, True
            if is_open and self._store is not None and no_reader and no_writer:
                self._probe()
                self._store.close()

    def _name(self, key: FrameKey) -> str:
        return self._prefix + key.hex()

    def _says_yes(self, code: int) -> bool:
        if code not in (0, 1):
            raise self._fault("find", code)
        return code == 1

    def _fault(self, what: str, code: int) -> TierUnavailable:
        return TierUnavailable(f"{self._address}: could not {what}, code {code}")

    @contextmanager
    def _use(self, buffer: _Buffer) -> Iterator[Any]:
        """The store, while nobody else uses the buffer or closes the store."""
        with buffer.alone(self._timeout_s) as is_mine:
            if not is_mine:
                raise TierUnavailable(f"{self._address}: an earlier call is still waiting")
            if self._is_closed:
                raise TierUnavailable(f"{self._address}: closed")
            try:
                if self._is_doubtful:
                    self._probe()
                with self._connecting:
                    if self._store is None:
                        self._store = self._connect()
                self._is_doubtful = False
                yield self._store
            except TierUnavailable:
                self._is_doubtful = True
                raise

    def _probe(self) -> None:
        """Fail at once where the store would try for seconds."""
        try:
            socket.create_connection(self._master, self._timeout_s).close()
        except OSError as error:
            raise TierUnavailable(f"{self._address}: {error}") from error

    def _connect(self) -> Any:
        store, options = self._new_store(), self._options
        host, port = self._master
        code = store.setup(
            options.get("host") or _address_towards(self._master),
            options.get("metadata", "P2PHANDSHAKE"),
            options.get("segment_bytes", DEFAULT_SEGMENT_BYTES),
            0,  # of a buffer of its own, which only calls that are not made here use
            options.get("protocol", "tcp"),
            options.get("devices", ""),
            f"{host}:{port}",
        )
        for buffer in self._buffers:
            code = code or store.register_buffer(buffer.address, buffer.size_bytes)
        if code:
            raise self._fault("connect", code)
        return store


class _Buffer:
    """Memory that the store may read and write, for one call at a time."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, size_bytes)
        memory = mmap(-1, self.size_bytes)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._lock = threading.Lock()

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[bool]:
        """Whether nobody else uses it now, nor will until the end of the block."""
        is_mine = self._lock.acquire(timeout=timeout_s)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._lock.release()

    def holds(self, size_bytes: int) -> bool:
        """Whether a frame can pass; the store itself refuses empty ones."""
        return 0 < size_bytes <= self.size_bytes

    def batches(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """What passes at once, of those that pass at all."""
        batch: dict[str, int] = {}
        most_bytes = min(_BATCH_BYTES, self.size_bytes)
        for name, size in sizes.items():
            if not self.holds(size):
                continue
            if batch and sum(batch.values()) + size > most_bytes:
                yield batch
                batch = {}
            batch[name] = size
        if batch:
            yield batch

    def addresses(self, sizes: Iterable[int]) -> list[int]:
        """Addresses of frames that lie one after another."""
        addresses, cursor = [], self.address
        for size in sizes:
            addresses.append(cursor)
            cursor += size
        return addresses


def _sizes(store: Any, names: list[str]) -> dict[str, int]:
    replicas = store.batch_get_replica_desc(names)
    return {
        name: replicas[name][0].get_memory_descriptor().buffer_descriptor.size
        if replicas[name][0].is_memory_replica()
        else store.get_size(name)
        for name in names
        if replicas.get(name)
    }


def _segment_bytes(text: str) -> int:
    value = size_bytes(text)
    if 0 < value < MIN_SEGMENT_BYTES:
        raise ValueError(f"expected 0 or at least {MIN_SEGMENT_BYTES}")
    return value


def _address_towards(master: tuple[str, int]) -> str:
    """This machine's address as the master sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(master)  # sends nothing
        return str(route.getsockname()[0])


def _loaded(address: str, timeout_s: float) -> Callable[[], Any]:
    """The class of the store, with bounded waits and a silent log."""
    # It reads its limits from the environment when a store is made; what is set there stays.
    limit_ms = str(max(1, round(1000 * timeout_s)))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", limit_ms)
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", limit_ms)
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(max(1, round(timeout_s))))
    try:
        from mooncake import store  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{missing_packages(address, PACKAGE)} ({error})") from error
    if "MC_LOG_LEVEL" not in os.environ:
        # It writes every start and every fault to stderr, and reads no setting that silences it.
        with suppress(ValueError, OSError):
            ctypes.c_int32.in_dll(ctypes.CDLL(store.__file__), _SEVERITY).value = _SILENT
    return store.MooncakeDistributedStore  # type: ignore[no-any-return]

"""The index log: the location of each frame, in independent records of fixed size.

Later records win. One that is torn or damaged is skipped, and every other one still counts.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from kvboost.core import FrameKey, PrefixKey

_BODY = struct.Struct("<II Q Q 32s")  # kind, segment, offset, bytes, key
_RECORD_BYTES = _BODY.size + 8  # and a checksum
_PUT, _DROP, _FREE, _EPOCH = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Location:
    """Where a frame lies."""

    segment: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Put:
    """A frame was written."""

    key: FrameKey
    location: Location


@dataclass(frozen=True, slots=True)
class Drop:
    """A key was forgotten."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class Free:
    """A segment was emptied."""

    segment: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """A tenant had everything deleted."""

    key: FrameKey
    number: int


Change: TypeAlias = Put | Drop | Free | Epoch


class IndexLog:
    """Appends changes to a file. Written by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with closed_on_error(self._file):
            self.num_records = os.fstat(self._file).st_size // _RECORD_BYTES

    def append(self, changes: Iterable[Change]) -> None:
        """Write changes, which then survive this process."""
        records = b"".join(map(_encode, changes))
        # After a torn write the next record must start on its own border again.
        torn = os.fstat(self._file).st_size % _RECORD_BYTES
        _write_all(self._file, bytes(_RECORD_BYTES - torn if torn else 0) + records)
        self.num_records += len(records) // _RECORD_BYTES

    def rewrite(
        self, locations: Mapping[FrameKey, Location], epochs: Mapping[FrameKey, int]
    ) -> None:
        """Replace the log atomically by the shortest equivalent one."""
        fresh = self._path.with_suffix(".new")
        with suppress(FileNotFoundError):
            fresh.unlink()
        log = IndexLog(fresh)
        with closed_on_error(log._file):
            log.append(Epoch(key, number) for key, number in epochs.items())
            log.append(Put(key, location) for key, location in locations.items())
            os.fsync(log._file)
            fresh.replace(self._path)
        self.close()
        self._file, self.num_records = log._file, log.num_records

    def sync(self) -> None:
        """Make everything written survive a power cut."""
        os.fsync(self._file)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.num_records * _RECORD_BYTES

    def close(self) -> None:
        """Close the file."""
        close_file(self._file)


def close_file(file: int) -> None:
    """Close a file; an error is ignored, because the descriptor is gone anyway."""
    with suppress(OSError):
        os.close(file)


@contextmanager
def closed_on_error(file: int) -> Iterator[None]:
    """Close a file if the block fails."""
    try:
        yield
    except BaseException:
        close_file(file)
        raise


def open_own(path: Path | str, flags: int) -> int:
    """Open a file of ours, for us alone if it is new.

    Raises:
        PermissionError: it is a link, no plain file, or another user's.
    """
    safe = flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, safe, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise PermissionError(f"{path} is a link or no plain file") from None
        raise
    with closed_on_error(file):
        found, user = os.fstat(file), os.geteuid()
        is_own = found.st_uid == user or (user == 0 and not flags & (os.O_WRONLY | os.O_RDWR))
        if not (is_own and stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
            raise PermissionError(f"{path} is no plain file of this user")
        if flags & os.O_TRUNC:
            os.ftruncate(file, 0)
    return file


def replay(path: Path) -> Iterator[Change | None]:
    """The changes of a log, None for those that cannot be read; nothing if there is no log."""
    try:
        with FileIO(path, opener=open_own) as file:
            records = file.readall()
    except FileNotFoundError:
        return
    for start in range(0, len(records) - _RECORD_BYTES + 1, _RECORD_BYTES):
        yield _decode(records[start : start + _RECORD_BYTES])
    if len(records) % _RECORD_BYTES:
        yield None


def _encode(change: Change) -> bytes:
    match change:
        case Put(key, location):
            body = _BODY.pack(_PUT, location.segment, location.offset, location.num_bytes, key)
        case Drop(key):
            body = _BODY.pack(_DROP, 0, 0, 0, key)
        case Free(segment):
            body = _BODY.pack(_FREE, segment, 0, 0, bytes(32))
        case Epoch(key, number):
            body = _BODY.pack(_EPOCH, 0, number, 0, key)
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def _decode(record: bytes) -> Change | None:
    body = record[: _BODY.size]
    if xxh3_64_intdigest(body).to_bytes(8, "little") != record[_BODY.size :]:
        return None
    kind, segment, offset, num_bytes, key = _BODY.unpack(body)
    if kind == _PUT:
        return Put(PrefixKey(key), Location(segment, offset, num_bytes))
    if kind == _EPOCH:
        return Epoch(PrefixKey(key), offset)
    if kind == _DROP:
        return Drop(PrefixKey(key))
    return Free(segment) if kind == _FREE else None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]

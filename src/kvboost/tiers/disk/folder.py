"""The folder of a disk tier: its files, its lock, and what can be done without opening the tier."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from kvboost.codecs.frame import MAX_HEAD_BYTES, VERSION, FrameError, Head, read
from kvboost.core import FrameKey
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.tiers.disk.log import (
    Drop,
    Epoch,
    Free,
    Location,
    Put,
    close_file,
    closed_on_error,
    open_own,
    replay,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOCK_NAME = "kvboost.lock"
_locks: set[int] = set()  # files that this process has locked
SEGMENTS = f"segment-v{VERSION}-[0-9][0-9][0-9][0-9][0-9].kv"


def heads(folder: Path) -> Iterator[Head]:
    """The heads of the frames in a folder, even while another process uses it."""
    locations: dict[FrameKey, Location] = {}
    for change in replay(log_path(folder)):
        match change:
            case Put(key, location):
                locations[key] = location
            case Drop(key):
                locations.pop(key, None)
            case Epoch():
                pass
            case Free(number):
                locations = {
                    key: location
                    for key, location in locations.items()
                    if location.segment != number
                }
    for key, location in locations.items():
        with suppress(FrameError, FileNotFoundError):
            with FileIO(segment_path(folder, location.segment), opener=open_own) as file:
                file.seek(location.offset)
                head = read(memoryview(file.read(min(MAX_HEAD_BYTES, location.num_bytes))))
            if head.entry.key == key:
                yield head


def clear(folder: Path) -> None:
    """Remove everything a disk tier left in a folder.

    Raises:
        TierUnavailable: it is in use.
    """
    with unavailable_on_error():
        lock_file = take_lock(folder)
        try:
            for path in _files(folder):
                path.unlink()
        finally:
            release_lock(lock_file)


def remove_old_versions(folder: Path) -> None:
    """Remove segments with frames of other versions, which nothing can read or erase."""
    for path in _files(folder):
        if f"-v{VERSION}" not in path.name:
            path.unlink()


def log_path(folder: Path) -> Path:
    """Where the index log lies."""
    return folder / f"index-v{VERSION}.log"


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"segment-v{VERSION}-{number:05}.kv"


def make_folder(folder: Path) -> None:
    """Create a folder for this user alone, or check that it is safe.

    Raises:
        OSError: others own it or may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0):
        reason = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        reason = "is writable by every user"
    else:
        return
    raise PermissionError(f"{folder} {reason}: name a folder inside it, which is then created")


def take_lock(folder: Path) -> int:
    """Keep other processes out for as long as the file is open."""
    if fcntl is None:
        raise ConfigError(f"{folder}: the disk tier requires Unix file locks")
    file = open_own(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    with closed_on_error(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 32, 0).decode(errors="replace")
            raise TierUnavailable(
                f"{folder} is in use by process {owner or '?'}; to share a cache, use cache_url"
            ) from None
        with suppress(OSError):  # a full disk has no room for the name of the owner
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
    _locks.add(file)
    return file


def release_lock(file: int) -> None:
    """Release the lock, unless this process is a fork and has released it already."""
    if file in _locks:
        _locks.discard(file)
        close_file(file)


def _let_go() -> None:
    """In a child process, which would otherwise hold the lock for as long as it lives."""
    while _locks:
        close_file(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def unavailable_on_error() -> Iterator[None]:
    """Turn system errors into `TierUnavailable`."""
    try:
        yield
    except OSError as error:
        raise TierUnavailable(str(error)) from error


def _files(folder: Path) -> list[Path]:
    return [*folder.glob("segment-v*-*.kv"), *folder.glob("index-v*.*")]

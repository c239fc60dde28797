"""The folder of a disk tier: its files, its lock, and what can be done without opening the tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvboost.codecs.frame import MAX_HEAD_BYTES, FrameError, Head, read
from kvboost.core import FrameKey
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.tiers.disk.log import Drop, Epoch, Free, Place, Put, replay

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOCK_NAME = "kvboost.lock"
SEGMENTS = "segment-v1-[0-9][0-9][0-9][0-9][0-9].kv"


def heads(folder: Path) -> Iterator[Head]:
    """What the frames in a folder say of themselves, also while another process uses it."""
    places: dict[FrameKey, Place] = {}
    for change in replay(log_path(folder)):
        match change:
            case Put(key, place):
                places[key] = place
            case Drop(key):
                places.pop(key, None)
            case Epoch():
                pass
            case Free(number):
                places = {key: place for key, place in places.items() if place.segment != number}
    for key, place in places.items():
        with suppress(FrameError, FileNotFoundError):
            with segment_path(folder, place.segment).open("rb") as file:
                file.seek(place.offset)
                head = read(memoryview(file.read(min(MAX_HEAD_BYTES, place.num_bytes))))
            if head.entry.key == key:
                yield head


def clear(folder: Path) -> None:
    """Remove all that a disk tier left in a folder.

    Raises:
        TierUnavailable: it is in use.
    """
    with unavailable_on_error():
        lock_file = take_lock(folder)
        for path in [*folder.glob(SEGMENTS), *folder.glob("index-v1.*")]:
            path.unlink()
        os.close(lock_file)


def log_path(folder: Path) -> Path:
    """Where the index log lies."""
    return folder / "index-v1.log"


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"segment-v1-{number:05}.kv"


def take_lock(folder: Path) -> int:
    """Keep other processes out for as long as the file is open."""
    if fcntl is None:
        raise ConfigError(f"{folder}: the disk tier requires Unix file locks")
    file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(file, 32, 0).decode(errors="replace")
        os.close(file)
        raise TierUnavailable(
            f"{folder} is in use by process {owner or '?'}; to share a cache, use cache_url"
        ) from None
    with suppress(OSError):  # a full disk has no room for the name of the owner
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


@contextmanager
def unavailable_on_error() -> Iterator[None]:
    """Let an error of the system be one of the tier."""
    try:
        yield
    except OSError as error:
        raise TierUnavailable(str(error)) from error

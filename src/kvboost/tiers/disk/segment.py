"""A segment: a file of fixed size to which frames are appended, and from which they are read."""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from weakref import WeakSet

import numpy as np

from kvboost.codecs.frame import HEAD_BYTES, KEY_AT, MAGIC, allocate, owner_of, size_of
from kvboost.core import FrameKey, Owner, PrefixKey, Span
from kvboost.madvise import POPULATE_READ, madvise

BLOCK_BYTES = mmap.ALLOCATIONGRANULARITY  # frames start where they can be mapped
SCAN_BYTES = 4 << 20
SLICE_BYTES = 1 << 20  # brought in at once: whoever waits sees that a slow disk delivers
_UNREADABLE = {errno.EFAULT, getattr(errno, "EHWPOISON", 133)}


@dataclass
class Segment:
    """An open file, and what is known of its contents."""

    file: FileIO
    size_bytes: int
    end: int = 0  # where the next frame goes
    live_bytes: int = 0
    keys: dict[FrameKey, None] = field(default_factory=dict)
    readers: WeakSet[mmap.mmap] = field(default_factory=WeakSet)  # frames that are in use

    @classmethod
    def make(cls, path: Path, size_bytes: int) -> Segment:
        """A new file, which has all its room from the start where the system can do that."""
        file = FileIO(path, "w+", opener=_for_owner)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            else:
                file.truncate(size_bytes)
        except OSError:
            file.close()
            raise
        return cls(file, size_bytes)

    def map(self, offset: int, num_bytes: int) -> memoryview:
        """A view of the file, in which nothing is overwritten meanwhile; empty if it is too short.

        Pages are shared with the system's file cache: nothing is copied.
        """
        try:
            mapped = mmap.mmap(
                self.file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=offset
            )
        except ValueError:  # the file was cut short
            return memoryview(b"")
        self.readers.add(mapped)
        return memoryview(mapped)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """A copy of up to `num_bytes`; fewer if the file is cut short."""
        target, num_read = allocate(num_bytes), 0
        self.file.seek(offset)
        while num_read < num_bytes and (more := self.file.readinto(target[num_read:])):
            num_read += more
        return target[:num_read]

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`."""
        self.file.seek(offset)
        while data:
            data = data[self.file.write(data) :]

    def find(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> dict[Span, FrameKey]:
        """Where frames of some keys and owners lie, also if they were dropped before."""
        found: dict[Span, FrameKey] = {}
        for start in range(0, self.size_bytes, SCAN_BYTES):
            piece = os.pread(self.file.fileno(), SCAN_BYTES, start)
            for at in range(0, len(piece) - HEAD_BYTES, BLOCK_BYTES):
                if not piece.startswith(MAGIC, at):
                    continue
                head = memoryview(piece)[at : at + HEAD_BYTES]
                key = PrefixKey(bytes(head[KEY_AT : KEY_AT + 32]))
                if key in keys or owner_of(head) in owners:
                    stop = min(start + at + size_of(head), self.size_bytes)
                    found[Span(start + at, stop)] = key
        return found

    def wipe(self, spans: Iterable[Span]) -> None:
        """Overwrite parts of the file with zeros, for good."""
        for span in spans:
            for offset in range(span.start, span.stop, SLICE_BYTES):
                zeros = bytes(min(SLICE_BYTES, span.stop - offset))
                os.pwrite(self.file.fileno(), zeros, offset)
        os.fsync(self.file.fileno())


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def usual_size(paths: Sequence[Path]) -> int:
    """The size that most files have, or else the largest: some may have been cut short."""
    sizes = Counter(path.stat().st_size for path in paths)
    whole = [size for size in sizes if size % BLOCK_BYTES == 0]
    return max(whole, key=lambda size: (sizes[size], size), default=0)


def is_readable(view: memoryview, came: Callable[[int], None] = lambda _: None) -> bool:
    """Bring all pages in, without the GIL; `came` is told how many bytes came.

    Touching a page that the disk cannot deliver would end the process.
    """
    if not isinstance(view.obj, mmap.mmap):
        came(view.nbytes)
        return True
    address = np.frombuffer(view, np.uint8).ctypes.data
    for start in range(0, view.nbytes, SLICE_BYTES):
        num_bytes = min(SLICE_BYTES, view.nbytes - start)
        error = madvise(address + start, num_bytes, POPULATE_READ)
        if error in _UNREADABLE:
            return False
        if error not in (0, errno.EINVAL):  # Linux before 5.14 cannot tell
            raise OSError(error, os.strerror(error))
        came(num_bytes)
    return True


def in_blocks(num_bytes: int) -> int:
    """Bytes that a frame takes in a segment."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

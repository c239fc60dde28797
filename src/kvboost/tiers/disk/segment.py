"""A segment: a file of fixed size to which frames are appended, and from which they are mapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt

from kvboost.codecs.frame import HEAD_BYTES, owner_of
from kvboost.core import FrameKey, Owner, Span
from kvboost.madvise import POPULATE_READ, libc, madvise
from kvboost.tiers.disk.log import Location, open_own

BLOCK_BYTES = mmap.ALLOCATIONGRANULARITY  # frames start where they can be mapped
MOST_OPEN = 64  # files of one folder
SLICE_BYTES = 1 << 20  # read at once, so that waiting requests see that a slow disk delivers
_MAP_FAILED = ctypes.c_void_p(-1).value
_UNREADABLE = {errno.EFAULT, getattr(errno, "EHWPOISON", 133)}


class OpenFiles:
    """Files opened on demand; the most recently used stay open. Not thread-safe."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, FileIO] = OrderedDict()

    def __getitem__(self, path: Path) -> FileIO:
        file = self._files.pop(path, None) or FileIO(path, "r+", opener=open_own)
        self._files[path] = file
        if len(self._files) > MOST_OPEN:
            self.close(next(iter(self._files)))
        return file

    def close(self, *paths: Path) -> None:
        """Close some files, or all."""
        for path in paths or list(self._files):
            if path in self._files:
                self._files.pop(path).close()


@dataclass
class Segment:
    """A file, and what is known of its contents."""

    path: Path
    size_bytes: int
    files: OpenFiles
    end: int = 0  # where the next frame goes
    live_bytes: int = 0
    keys: dict[FrameKey, None] = field(default_factory=dict)
    _mapped: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None

    def make(self) -> None:
        """Create the file, pre-allocated where the system can do that."""
        with FileIO(self.path, "w+", opener=open_own) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, self.size_bytes)
            else:
                file.truncate(self.size_bytes)

    @property
    def is_read(self) -> bool:
        """Whether a frame of it is in use."""
        return self._mapped() is not None

    def map(self, offset: int, num_bytes: int) -> memoryview:
        """A view of the file, not overwritten while it is held; empty if the file is cut short.

        All views share one mapping of the file, and its pages with the system's file cache:
        nothing is copied.
        """
        try:
            file = self.files[self.path].fileno()
        except FileNotFoundError:
            return memoryview(b"")
        if os.fstat(file).st_size < offset + num_bytes:
            return memoryview(b"")
        mapped = self._mapped()
        if mapped is None:
            mapped = _map(file, self.size_bytes)
            self._mapped = ref(mapped)
        return mapped.data[offset : offset + num_bytes]

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """A copy of up to `num_bytes`; fewer if the file is cut short."""
        return memoryview(os.pread(self.files[self.path].fileno(), num_bytes, offset))

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`, to a new file if ours was deleted."""
        try:
            file = self.files[self.path].fileno()
        except FileNotFoundError:
            self.make()
            file = self.files[self.path].fileno()
        _write_all(file, offset, data)

    def owned_by(
        self, owners: Collection[Owner], locations: Mapping[FrameKey, Location]
    ) -> list[FrameKey]:
        """The keys of the frames that belong to some owners; all if the file was deleted."""
        if self._is_deleted:
            return list(locations)
        with FileIO(self.path, opener=open_own) as file:  # not ours, which others use and close
            heads = {
                key: os.pread(file.fileno(), HEAD_BYTES, location.offset)
                for key, location in locations.items()
            }
        return [key for key, head in heads.items() if owner_of(memoryview(head)) in owners]

    def leftovers(self, live: Iterable[Location], within: Sequence[Span]) -> list[Span]:
        """Parts outside of live frames in which there is anything."""
        if self._is_deleted:
            return []
        places = sorted((each.offset, each.offset + each.num_bytes) for each in live)
        with FileIO(self.path, opener=open_own) as file:
            slices = (
                (offset, os.pread(file.fileno(), min(SLICE_BYTES, gap.stop - offset), offset))
                for gap in _outside(places, within)
                for offset in range(gap.start, gap.stop, SLICE_BYTES)
            )
            return [
                Span(offset, offset + len(piece))
                for offset, piece in slices
                if piece.count(0) < len(piece)
            ]

    @property
    def _is_deleted(self) -> bool:
        """Whether somebody has deleted the file, rather than moved the folder away."""
        return self.path.parent.exists() and not self.path.exists()

    def wipe(self, spans: Sequence[Span]) -> None:
        """Overwrite parts of the file with zeros, for good."""
        if not spans:
            return
        with FileIO(self.path, "r+", opener=open_own) as file:
            for span in spans:
                _write_all(file.fileno(), span.start, memoryview(bytes(len(span))))
            os.fsync(file.fileno())


def _outside(places: Iterable[tuple[int, int]], spans: Sequence[Span]) -> Iterator[Span]:
    """The parts of spans between places; both are sorted."""
    end = 0
    for start, stop in (*places, (sys.maxsize, sys.maxsize)):
        for span in spans:
            first, last = max(span.start, end), min(span.stop, start)
            if first < last:
                yield Span(first, last)
        end = max(end, stop)


def _write_all(file: int, offset: int, data: memoryview) -> None:
    while data:
        num_written = os.pwrite(file, data, offset)
        data, offset = data[num_written:], offset + num_written


def _map(file: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """A private mapping of a file. Python's own would hold a file descriptor for as long."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc().mmap(None, num_bytes, access, mmap.MAP_PRIVATE, file, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    room = (ctypes.c_ubyte * num_bytes).from_address(address)
    mapped: npt.NDArray[np.uint8] = np.ctypeslib.as_array(room)
    finalize(mapped, libc().munmap, address, num_bytes).atexit = False
    return mapped


def usual_size(paths: Sequence[Path]) -> int:
    """The size that most files have, or else the largest: some may have been cut short."""
    sizes = Counter(path.stat().st_size for path in paths)
    whole = [size for size in sizes if size % BLOCK_BYTES == 0]
    return max(whole, key=lambda size: (sizes[size], size), default=0)


def is_readable(view: memoryview, came: Callable[[int], None] = lambda _: None) -> bool:
    """Read all pages, without the GIL; `came` is called with the bytes read.

    Touching a page that the disk cannot deliver would end the process.
    """
    if not view:
        return False
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

"""The disk tier: bounded, safe against a crash at any moment, for one process at a time."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvboost.codecs.frame import MAX_HEAD_BYTES, FrameError, Head, check, read
from kvboost.core import FrameKey, Owner, Span
from kvboost.errors import TierUnavailable
from kvboost.tiers.base import OwnTier, TierStats
from kvboost.tiers.disk.folder import (
    SEGMENTS,
    log_path,
    make_folder,
    release_lock,
    remove_old_versions,
    segment_path,
    take_lock,
    unavailable_on_error,
)
from kvboost.tiers.disk.log import Change, Drop, Epoch, Free, IndexLog, Location, Put, replay
from kvboost.tiers.disk.segment import (
    BLOCK_BYTES,
    OpenFiles,
    Segment,
    in_blocks,
    is_readable,
    usual_size,
)

NUM_SEGMENTS = 8  # in a small folder; a large one has more
LEAST_SEGMENTS = 3
LEAST_SEGMENT_BYTES = 64 << 10  # a smaller one was cut short
LARGEST_SEGMENT_BYTES = 256 << 20
LOG_SHARE = 16  # the log gets this fraction of the budget: 1 / 16
HEAD_GUESS_BYTES = 2048  # holds the head of a chunk of 256 tokens
MOST_MOVED_BYTES = 32 << 20  # when a segment is emptied: others wait meanwhile
NOTHING = memoryview(b"")  # in place of an unreadable frame
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

log = logging.getLogger(__name__)


class DiskTier(OwnTier):
    """Frames in a folder.

    They are appended to segment files, each of which has its full size from the start. When all
    are full, one is emptied: the one with the fewest live bytes if it is half dead, or else the
    oldest. What was used since it was written moves on, the rest leaves. One segment is always
    spare, so that nothing has left before it has arrived elsewhere.

    A frame is stored once its record is in the log, and outlives this process from then on. When
    the machine itself dies the system may lose the last seconds, which the check of each frame
    that is read finds out.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        """Open a folder, or make one.

        Raises:
            TierUnavailable: it is in use, or cannot be read and written.
        """
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._room_bytes = budget_bytes - budget_bytes // LOG_SHARE
        share_bytes = min(LARGEST_SEGMENT_BYTES, self._room_bytes // NUM_SEGMENTS)
        self._segment_bytes = share_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._lock = threading.Lock()
        self._locations: dict[FrameKey, Location] = {}
        self._used: set[FrameKey] = set()
        self._files = OpenFiles()
        self._segments: dict[int, Segment] = {}  # oldest first
        self._has_refused = False
        self.num_unreadable = 0  # records of the index, or frames that they lead to
        self._left: list[FrameKey] = []  # evicted, and not yet reported
        self._epochs: dict[FrameKey, int] = {}
        self._erasing: tuple[Collection[FrameKey], Collection[Owner]] | None = None
        self._unwiped: dict[int, Sequence[Span]] = {}  # by segment; of this erasure
        self._is_log_stuck = False  # it could not be shortened
        with unavailable_on_error():
            make_folder(folder)
            self._lock_file = take_lock(folder)
            with ExitStack() as undo:
                undo.callback(release_lock, self._lock_file)
                remove_old_versions(folder)
                self._log = IndexLog(log_path(folder))
                undo.callback(self._close_files)
                self._open_segments()
                for change in replay(log_path(folder)):
                    self._replay(change)
                self._shorten_log()
                undo.pop_all()

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """Views of the files, which do not change while they are held."""
        with self._lock, unavailable_on_error():
            held = {key: self._locations[key] for key in keys if key in self._locations}
            self._used.update(held)
            views = {
                key: self._segments[location.segment].map(location.offset, location.num_bytes)
                for key, location in held.items()
            }
        # Reading pages takes time; others may write meanwhile.
        with unavailable_on_error():
            return {
                key: view if is_readable(view, self._came) else NOTHING
                for key, view in views.items()
            }

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Append frames; each is stored or among the returned keys."""
        for key, frame in frames.items():
            with self._lock, unavailable_on_error():  # for each frame, so that readers get a turn
                if in_blocks(frame.nbytes) > self._segment_bytes:
                    self._refuse(key, frame.nbytes)
                    continue
                self._make_room(frame.nbytes)
                self._append(key, frame)
        with self._lock:
            self._shorten_log()
            left, self._left = self._left, []
        return [key for key in left if key not in self._locations]

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """Forget keys; their space is reused when their segment is emptied."""
        with self._lock, unavailable_on_error():
            self._drop([key for key in keys if key in self._locations])

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Forget frames, and overwrite all that is left of dropped ones, whoever owned them.

        Only the writing thread calls this, so that nothing is written while it looks. Readers wait
        for none of it.

        Raises:
            TierUnavailable: somebody reads from a file; what lies in others is erased.
        """
        if self._erasing != (keys, owners):
            self.discard(keys)
            for segment in list(self._segments.values()) if owners else ():
                self.discard(self._owned(segment, owners))
            self._unwiped = {each: [Span(0, self._segment_bytes)] for each in self._segments}
            self._erasing = (keys, owners)
        for number, spans in list(self._unwiped.items()):
            self._wipe(number, spans)
        with unavailable_on_error():
            self._log.sync()
        if self._unwiped:
            raise TierUnavailable(f"{self._folder}: {len(self._unwiped)} segments are being read")
        self._erasing = None

    def _owned(self, segment: Segment, owners: Collection[Owner]) -> list[FrameKey]:
        with unavailable_on_error():
            with self._lock:
                live = {key: self._locations[key] for key in segment.keys}
            return segment.owned_by(owners, live)

    def _wipe(self, number: int, spans: Sequence[Span]) -> None:
        """Overwrite what is left in a segment, unless somebody reads from it."""
        segment = self._segments[number]
        with unavailable_on_error():
            with self._lock:
                live, is_read = [self._locations[key] for key in segment.keys], segment.is_read
            leftovers = segment.leftovers(live, spans)
            if leftovers and is_read:
                self._unwiped[number] = leftovers  # and nothing that is dropped later
            else:
                segment.wipe(leftovers)
                del self._unwiped[number]

    def epoch(self, key: FrameKey) -> int:
        """The epoch in the log."""
        return self._epochs.get(key, 0)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Keep the epoch of a tenant in the log."""
        before = self.epoch(key)
        if before < epoch:
            with self._lock, unavailable_on_error():
                self._log.append([Epoch(key, epoch)])
                self._log.sync()
                self._epochs[key] = epoch
        return before

    def epochs(self) -> Mapping[FrameKey, int]:
        """The epochs in the log."""
        return self._epochs

    def holds(self, key: FrameKey) -> bool:
        """Whether `key` is here, without reading it."""
        return key in self._locations

    def heads(self) -> Iterator[Head]:
        """The heads of all frames, the latest first; damaged ones are dropped."""
        for key in reversed(list(self._locations)):
            head = self._head(key)
            if head is None or head.entry.key != key:
                self.discard([key])
            else:
                yield head

    def damaged(self) -> Iterator[FrameKey]:
        """The keys of frames that do not pass their check."""
        return (key for key in list(self._locations) if not self._is_sound(key))

    def compact(self) -> int:
        """Release the space of empty segments; returns the bytes freed."""
        with self._lock, unavailable_on_error():
            empty = self._empty()
            freed = sum(self._segments[number].size_bytes for number in empty)
            for number in empty:
                path = self._segments.pop(number).path
                self._files.close(path)
                path.unlink()
            self._log.rewrite(self._locations, self._epochs)
            return freed

    def stats(self) -> TierStats:
        """Bytes as they are on the disk: whole segments and the log."""
        size_bytes = sum(segment.size_bytes for segment in list(self._segments.values()))
        return TierStats(
            len(self._locations), size_bytes + self._log.size_bytes, self._budget_bytes
        )

    def close(self) -> None:
        """Close all files and let others open the folder."""
        with self._lock:
            self._close_files()
            release_lock(self._lock_file)

    def _came(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes

    def _close_files(self) -> None:
        self._files.close()
        self._segments.clear()
        self._locations.clear()
        self._log.close()

    def _open_segments(self) -> None:
        """Open the segments of the folder; those that the budget has no room for are removed."""
        paths = sorted(self._folder.glob(SEGMENTS))
        # A folder keeps the size of its segments, unless there would be too few of them.
        known_bytes = usual_size(paths)
        if LEAST_SEGMENT_BYTES <= known_bytes <= self._room_bytes // LEAST_SEGMENTS:
            self._segment_bytes = known_bytes
        most = self._room_bytes // self._segment_bytes
        for path in paths:
            if path.stat().st_size == self._segment_bytes and len(self._segments) < most:
                number = int(path.stem.rpartition("-")[2])
                self._segments[number] = Segment(path, self._segment_bytes, self._files)
            else:
                log.warning("removing %s: it does not fit the budget", path)
                path.unlink()

    def _replay(self, change: Change | None) -> None:
        match change:
            case None:
                self.num_unreadable += 1
            case Put(key, location):
                segment = self._segments.get(location.segment)
                if segment is None or location.offset + location.num_bytes > segment.size_bytes:
                    self.num_unreadable += 1
                    return
                if not segment.keys:
                    self._begin(location.segment)
                self._set(key, location)
            case Drop(key):
                self._forget(key)
            case Epoch(key, epoch):
                self._epochs[key] = epoch
            case Free(number):
                if number in self._segments:
                    self._vacate(number)

    def _set(self, key: FrameKey, location: Location) -> None:
        self._forget(key)
        segment = self._segments[location.segment]
        self._locations[key] = location
        segment.keys[key] = None
        segment.end = max(segment.end, in_blocks(location.offset + location.num_bytes))
        segment.live_bytes += in_blocks(location.num_bytes)

    def _drop(self, keys: Sequence[FrameKey]) -> None:
        """Forget keys, in the log first, or the next process would find other bytes there."""
        self._log.append(map(Drop, keys))
        for key in keys:
            self._forget(key)

    def _forget(self, key: FrameKey) -> None:
        self._used.discard(key)
        location = self._locations.pop(key, None)
        if location is not None:
            segment = self._segments[location.segment]
            del segment.keys[key]
            segment.live_bytes -= in_blocks(location.num_bytes)

    def _vacate(self, number: int) -> list[FrameKey]:
        """Forget everything in a segment; returns the keys."""
        segment = self._segments[number]
        gone = list(segment.keys)
        for key in gone:
            self._forget(key)
        segment.end = 0
        return gone

    def _begin(self, number: int) -> None:
        """Write to this empty segment from now on."""
        segment = self._segments.pop(number)
        segment.end = 0
        self._segments[number] = segment

    def _append(self, key: FrameKey, frame: memoryview) -> None:
        number, segment = next(reversed(self._segments.items()))
        assert segment.end + frame.nbytes <= segment.size_bytes
        location = Location(number, segment.end, frame.nbytes)
        segment.write(segment.end, frame)
        self._log.append([Put(key, location)])
        self._set(key, location)

    def _refuse(self, key: FrameKey, num_bytes: int) -> None:
        if not self._has_refused:
            self._has_refused = True
            log.warning(
                "%s: a chunk of %d bytes is not stored, because a segment has %d: "
                "raise max_disk_bytes to at least %d times a chunk",
                self._folder,
                num_bytes,
                self._segment_bytes,
                NUM_SEGMENTS + 1,
            )
        self._left.append(key)

    def _make_room(self, num_bytes: int) -> None:
        """Make room for a frame in the last segment."""
        if self._segments:
            last = next(reversed(self._segments.values()))
            if last.end + in_blocks(num_bytes) <= last.size_bytes:
                return
        while len(empty := self._empty()) < 2 and self._grow():
            pass
        if not self._segments:
            raise TierUnavailable(f"{self._folder}: no space for a segment")
        if not empty:  # there is no spare one: a smaller budget, a full disk, or readers in it
            unread = [number for number, each in self._segments.items() if not each.is_read]
            if not unread:
                raise TierUnavailable(f"{self._folder}: all segments are being read")
            self._free(unread[0])
            self._begin(unread[0])
            return
        self._begin(empty[0])
        if len(empty) == 1:
            self._empty_one(in_blocks(num_bytes))

    def _empty(self) -> list[int]:
        """Segments in which nothing is stored, or read."""
        return [
            number
            for number, segment in self._segments.items()
            if not segment.keys and not segment.is_read
        ]

    def _grow(self) -> bool:
        """Add a segment, if budget and disk allow it."""
        held = sum(segment.size_bytes for segment in self._segments.values())
        if held + self._segment_bytes > self._room_bytes:
            return False
        number = next(n for n in range(len(self._segments) + 1) if n not in self._segments)
        path = segment_path(self._folder, number)
        segment = Segment(path, self._segment_bytes, self._files)
        try:
            segment.make()
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in NO_SPACE:
                raise
            log.warning("%s: no space for another segment: %s", self._folder, error)
            return False
        self._segments[number] = segment
        return True

    def _empty_one(self, reserved_bytes: int) -> None:
        """Empty a segment: used frames move to the last one, which keeps `reserved_bytes` free."""
        *others, (_, target) = self._segments.items()
        full = [each for each in others if each[1].keys]
        if not full:
            return
        unread = [each for each in full if not each[1].is_read] or full
        number, victim = min(unread, key=lambda each: each[1].live_bytes)
        if victim.live_bytes > victim.size_bytes // 2:
            number, victim = unread[0]
        room_bytes = min(MOST_MOVED_BYTES, target.size_bytes // 2)
        room_bytes = min(room_bytes, target.size_bytes - reserved_bytes)
        for key in [key for key in victim.keys if key in self._used]:
            location = self._locations[key]
            room_bytes -= in_blocks(location.num_bytes)
            if room_bytes < 0:
                break
            self._append(key, victim.read(location.offset, location.num_bytes))
        self._free(number)

    def _free(self, number: int) -> None:
        """Empty a segment for good."""
        self._log.append([Free(number)])
        self._left += self._vacate(number)

    def _is_sound(self, key: FrameKey) -> bool:
        try:
            check(self.get([key])[key], key)
        except FrameError:
            return False
        return True

    def _head(self, key: FrameKey) -> Head | None:
        """A frame's head, or None if it cannot be read."""
        with self._lock:
            location = self._locations.get(key)
            if location is None:  # it has left meanwhile
                return None
            for num_bytes in (HEAD_GUESS_BYTES, MAX_HEAD_BYTES):
                segment = self._segments[location.segment]
                try:
                    found = segment.read(location.offset, min(num_bytes, location.num_bytes))
                    self._came(found.nbytes)
                    return read(found)
                except FrameError:
                    continue
                except OSError as error:
                    log.warning("%s: a frame cannot be read: %s", self._folder, error)
        return None

    def _shorten_log(self) -> None:
        if self._log.num_records > 2 * (len(self._locations) + len(self._epochs)) + 256:
            try:
                self._log.rewrite(self._locations, self._epochs)
            except OSError as error:
                if not self._is_log_stuck:
                    log.warning("%s: cannot compact the index log yet: %s", self._folder, error)
                self._is_log_stuck = True
            else:
                self._is_log_stuck = False

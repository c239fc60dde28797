"""The disk tier: what was acknowledged is there after any end of the process, and bounded."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_disk import small_disk
from kvboost.core import FrameKey, PrefixKey
from kvboost.errors import TierUnavailable
from kvboost.tiers.disk import log, segment
from kvboost.tiers.disk import tier as disk_tier
from kvboost.tiers.disk.folder import clear
from kvboost.tiers.disk.segment import BLOCK_BYTES
from kvboost.tiers.disk.tier import DiskTier

MIB = 2**20


def key_of(number: int) -> FrameKey:
    return PrefixKey(number.to_bytes(32, "little"))


def bytes_of(number: int, size: int = 30_000) -> bytes:
    return random.Random(number).randbytes(size)


def put(tier: DiskTier, *numbers: int, size: int = 30_000) -> list[FrameKey]:
    return tier.put({key_of(n): memoryview(bytes_of(n, size)) for n in numbers})


class Folder:
    """Opens tiers in one folder, and closes them at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.tier = path, None

    def open(self, budget_bytes: int = MIB) -> DiskTier:
        self.close()
        self.tier = DiskTier(self.path, budget_bytes)
        return self.tier

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.tier = None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "discard", "reopen", "compact"]),
        st.integers(0, 30),
        st.integers(1, 90_000),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
@settings(max_examples=40, deadline=None)
def test_it_is_a_bounded_map_across_processes(
    operations: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    tier, held = DiskTier(folder, MIB), {}
    for name, number, size in operations:
        key = key_of(number)
        if name == "put":
            held[key] = bytes_of(size, size)
            for gone in tier.put({key: memoryview(held[key])}):
                held.pop(gone, None)
        elif name == "discard":
            tier.discard([key])
            held.pop(key, None)
        elif name == "reopen":
            tier.close()
            tier = DiskTier(folder, MIB)
        elif name == "compact":
            tier.compact()
        got = tier.get([key])
        assert {k: bytes(frame) for k, frame in got.items()} == (
            {key: held[key]} if key in held else {}
        )
        assert tier.stats().num_entries == len(held)
        assert tier.stats().size_bytes <= MIB and on_disk(folder) <= MIB + BLOCK_BYTES
    tier.close()


def test_what_was_used_outlives_what_was_only_stored(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 0, 1, 2)
    for number in range(10, 100):
        tier.get([key_of(1)])
        put(tier, number)
    assert tier.holds(key_of(1)) and not tier.holds(key_of(0)) and not tier.holds(key_of(2))
    assert bytes(tier.get([key_of(1)])[key_of(1)]) == bytes_of(1)


def test_a_frame_that_fits_no_segment_is_refused(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 1)
    assert put(tier, 2, size=500_000) == [key_of(2)]
    assert tier.holds(key_of(1)) and not tier.holds(key_of(2))


def test_a_folder_serves_one_process_at_a_time(folder: Folder) -> None:
    folder.open()
    with pytest.raises(TierUnavailable, match=f"in use by process {os.getpid()}"):
        DiskTier(folder.path, MIB)
    with pytest.raises(TierUnavailable, match="in use"):
        clear(folder.path)
    folder.open().close()
    folder.tier = None


def test_a_smaller_budget_makes_the_folder_smaller(folder: Folder) -> None:
    tier = folder.open(4 * MIB)
    put(tier, *range(100))
    tier = folder.open()
    assert tier.stats().size_bytes <= MIB and on_disk(folder.path) <= MIB + BLOCK_BYTES
    put(tier, *range(200, 240))
    held = [number for number in range(300) if tier.holds(key_of(number))]
    assert held and all(
        bytes(tier.get([key_of(number)])[key_of(number)]) == bytes_of(number) for number in held
    )


def test_files_of_another_version_are_removed(folder: Folder) -> None:
    put(folder.open(), 1)
    folder.close()
    for path in folder.path.glob("*-v2*"):
        path.rename(path.with_name(path.name.replace("-v2", "-v1")))
    assert len(list(folder.path.glob("*-v1*"))) >= 2
    assert not folder.open().holds(key_of(1))
    assert not list(folder.path.glob("*-v1*"))


def test_damage_to_the_index_loses_only_the_damaged_records(folder: Folder) -> None:
    tier = folder.open(4 * MIB)
    put(tier, *range(50))
    folder.close()
    index = folder.path / "index-v2.log"
    records = bytearray(index.read_bytes())
    size = len(records) // 50
    records[10 * size + 5] ^= 255
    records[20 * size] ^= 1
    index.write_bytes(bytes(records) + b"torn")
    tier = folder.open(4 * MIB)
    held = [number for number in range(50) if tier.holds(key_of(number))]
    assert held == [number for number in range(50) if number not in (10, 20)]
    put(tier, 10)
    assert folder.open(4 * MIB).holds(key_of(10))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 5000, None])
def test_a_spoiled_index_is_an_empty_one(folder: Folder, damage: bytes | None) -> None:
    tier = folder.open()
    put(tier, *range(10))
    folder.close()
    index = folder.path / "index-v2.log"
    if damage is None:
        index.unlink()
    else:
        index.write_bytes(damage)
    tier = folder.open()
    assert tier.stats().num_entries == 0
    assert put(tier, *range(10)) == []
    assert bytes(tier.get([key_of(3)])[key_of(3)]) == bytes_of(3)


def test_what_is_being_read_is_not_overwritten(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 0)
    frame = tier.get([key_of(0)])[key_of(0)]
    for number in range(10, 200):
        put(tier, number)
    assert bytes(frame) == bytes_of(0)
    held = tier.get([key_of(n) for n in range(200)])  # every full segment has a reader now
    for number in range(200, 300):
        put(tier, number)
    assert all(bytes(held[key]) == bytes_of(int.from_bytes(key, "little")) for key in held)
    assert tier.holds(key_of(299)) and on_disk(folder.path) <= MIB + BLOCK_BYTES


def in_segments(folder: Folder, number: int) -> bool:
    """Whether a frame's bytes are in a file, wherever."""
    part = bytes_of(number)[-200:-100]
    return any(part in path.read_bytes() for path in folder.path.glob("segment-*"))


def test_an_erasure_that_waits_for_a_reader_spares_what_is_stored_meanwhile(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 0, 1)
    view = tier.get([key_of(1)])
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="being read"):
            tier.erase([key_of(0)], [])
        put(tier, 0)
    tier.discard([key_of(0)])  # later than the erasure, which need not wait for this one's bytes
    put(tier, 2)
    del view
    tier.erase([key_of(0)], [])
    assert tier.holds(key_of(2)) and tier._unwiped == {}


def test_an_erasure_is_not_done_while_the_folder_is_away(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 0)
    away = folder.path.with_name("away")
    folder.path.rename(away)
    with pytest.raises(TierUnavailable):
        tier.erase([key_of(0)], [])
    away.rename(folder.path)
    tier.erase([key_of(0)], [])
    assert not in_segments(folder, 0)


def test_an_erasure_writes_on_after_a_short_write(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, write = folder.open(), os.pwrite
    put(tier, 0)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, bytes(data)[:4096], at))
    tier.erase([key_of(0)], [])
    assert not in_segments(folder, 0)


def test_an_erasure_spares_a_frame_that_a_damaged_record_lies_in(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 0)
    tier._set(key_of(1), replace(tier._locations[key_of(0)], offset=4096, num_bytes=4000))
    tier.erase([key_of(2)], [])
    assert bytes(tier.get([key_of(0)])[key_of(0)]) == bytes_of(0)


def test_a_frame_of_most_of_a_segment_has_room_beside_what_moves(folder: Folder) -> None:
    tier = folder.open()
    segment_bytes = MIB * 15 // 16 // 8 // BLOCK_BYTES * BLOCK_BYTES
    for number in range(200):
        put(tier, number, size=10_000)
        tier.get([key_of(n) for n in range(max(0, number - 60), number + 1)])
        if number % 20 == 19:
            put(tier, 1000 + number, size=segment_bytes * 7 // 10)
        assert all(path.stat().st_size <= segment_bytes for path in folder.path.glob("segment-*"))
    held = {n for n in range(1200) if tier.holds(key_of(n))}
    tier = folder.open()
    assert {n for n in range(1200) if tier.holds(key_of(n))} == held and 1199 in held


def test_only_the_owner_may_read(folder: Folder) -> None:
    put(folder.open(), 1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.path.iterdir())


def test_clearing_leaves_nothing(folder: Folder) -> None:
    tier = folder.open()
    put(tier, 1)
    folder.close()
    clear(folder.path)
    assert [path.name for path in folder.path.iterdir()] == ["kvboost.lock"]
    assert folder.open().stats().num_entries == 0


@pytest.fixture
def mounted(folder: Folder) -> Iterator[Folder]:
    """A file system of 6 MiB."""
    with small_disk(folder.path, 6):
        yield folder
        folder.close()


def test_a_full_disk_is_used_as_far_as_it_goes(mounted: Folder) -> None:
    tier = mounted.open(64 * MIB)  # segments of 7.5 MiB: not one fits
    with pytest.raises(TierUnavailable, match="no space"):
        put(tier, 1)
    assert tier.get([key_of(1)]) == {}
    tier = mounted.open(12 * MIB)  # segments of 1.4 MiB: four of eight fit
    for number in range(400):
        put(tier, number)
    assert tier.holds(key_of(399)) and tier.stats().num_entries > 50
    (mounted.path / "filler").write_bytes(bytes(os.statvfs(mounted.path).f_bavail * 4096))
    with suppress(TierUnavailable):  # now not a byte is left; records take room too
        for number in range(400, 800):
            put(tier, number)
    held = [number for number in range(800) if tier.holds(key_of(number))]
    assert held and all(
        bytes(tier.get([key_of(number)])[key_of(number)]) == bytes_of(number) for number in held
    )


def test_a_read_only_folder_is_unavailable(mounted: Folder) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted.path)], check=True)
    with pytest.raises(TierUnavailable, match="Read-only"):
        DiskTier(mounted.path, MIB)


WRITER = """
import sys, random
from pathlib import Path
from kvboost.core import PrefixKey
from kvboost.tiers.disk.tier import DiskTier
folder, first, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = DiskTier(folder, budget)
print("ready", flush=True)
for number in range(first, first + 10**6):
    frame = random.Random(number).randbytes(20_000 + 7919 * number % 20_000)
    tier.get([PrefixKey(n.to_bytes(32, "little")) for n in range(max(0, number - 20), number, 3)])
    gone = tier.put({PrefixKey(number.to_bytes(32, "little")): memoryview(frame)})
    left = " ".join(str(int.from_bytes(key, "little")) for key in gone)
    print(number, left, flush=True)
"""


def crash_once(folder: Path, first: int, budget: int, rng: random.Random) -> tuple[int, set[int]]:
    """Let a process write until it is killed; what it acknowledged, and what it said has left."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(budget)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().splitlines(keepends=True)
    last, left = first - 1, set()
    for line in lines:
        if line.endswith("\n"):
            last, *gone = map(int, line.split())
            left |= set(gone)
    return last, left


@pytest.mark.parametrize("budget", [2048 * MIB, 2 * MIB])
def test_nothing_acknowledged_is_lost_by_a_crash(tmp_path: Path, budget: int) -> None:
    num_crashes = int(os.environ.get("KVBOOST_TEST_CRASHES", "8"))
    rng, first, expected = random.Random(budget), 0, set()
    for _ in range(num_crashes):
        last, left = crash_once(tmp_path, first, budget, rng)
        tier = DiskTier(tmp_path, budget)
        expected = (expected | set(range(first, last + 1))) - left
        held = {n for n in range(first + 10_000) if tier.holds(key_of(n))}
        # The one it was killed at may have made it, and may have emptied a segment unheard.
        assert held - expected <= {last + 1}
        assert len(expected - held) <= (12 if budget < 100 * MIB else 0)
        for number in [*range(first, last + 1), *rng.sample(sorted(held), min(50, len(held)))]:
            if number in held:
                expected_bytes = bytes_of(number, 20_000 + 7919 * number % 20_000)
                assert bytes(tier.get([key_of(number)])[key_of(number)]) == expected_bytes
        assert on_disk(tmp_path) <= budget + 2 * BLOCK_BYTES
        tier.close()
        expected, first = held, last + 2
    assert first > num_crashes


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")


MANY_SEGMENTS = """
import re, resource, sys
from pathlib import Path
from kvboost.core import PrefixKey
from kvboost.tiers.disk import tier as disk_tier

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

disk_tier.LARGEST_SEGMENT_BYTES = 1 << 20
tier = disk_tier.DiskTier(Path(sys.argv[1]), 256 << 20)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
keys = [PrefixKey(n.to_bytes(32, "little")) for n in range(1600)]
for number, key in enumerate(keys):
    assert tier.put({key: memoryview(bytes([number % 256]) * 130_000)}) == []
num_segments, before = len(list(Path(sys.argv[1]).glob("segment-*"))), status("RssAnon")
frames = tier.get(keys)
assert all(frames[key][-1] == number % 256 for number, key in enumerate(keys))
maps = sum("segment-v2-" in line for line in Path("/proc/self/maps").read_text().splitlines())
print(num_segments, maps, status("RssAnon") - before)
del frames
print(sum("segment-v2-" in line for line in Path("/proc/self/maps").read_text().splitlines()))
"""


@needs_proc
def test_a_folder_of_any_size_takes_few_files_and_a_map_for_each_segment(tmp_path: Path) -> None:
    """208 MB in 230 segments, with at most 100 files: all of it can be used at once."""
    command = [sys.executable, "-c", MANY_SEGMENTS, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    num_segments, num_maps, more_kb, maps_left = map(int, answer.stdout.split())
    assert num_segments > 200 and num_maps <= num_segments and not maps_left
    assert more_kb < 32 << 10  # of 208 MB that would be copied


@needs_proc
def test_a_disk_without_room_for_the_index_keeps_no_files_open(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder.open(), 1)
    folder.close()
    before = num_open_files()
    monkeypatch.setattr(log, "_write_all", refuse)
    for _ in range(3):
        tier = folder.open()
        assert tier.get([key_of(1)]) == {key_of(1): bytes_of(1)}
        with pytest.raises(TierUnavailable, match="No space"):
            put(tier, 2)
        with pytest.raises(TierUnavailable, match="No space"):
            tier.compact()
        folder.close()
    assert num_open_files() == before
    monkeypatch.undo()
    assert folder.open().get([key_of(1)]) == {key_of(1): bytes_of(1)}


def test_a_full_disk_does_not_lock_a_folder_for_good(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", refuse)
    folder.open()
    folder.close()
    monkeypatch.undo()
    assert put(folder.open(), 1) == []


@pytest.mark.parametrize("num_bytes", [1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_a_segment_that_was_cut_short_does_not_set_the_size_of_others(
    folder: Folder, num_bytes: int
) -> None:
    put(folder.open(), *range(6))
    folder.close()
    first, second, *_ = sorted(folder.path.glob("segment-*"))
    size_bytes = first.stat().st_size
    os.truncate(first, num_bytes)
    assert put(folder.open(), 7) == []
    assert second.stat().st_size == size_bytes
    assert folder.tier.get([key_of(7)]) == {key_of(7): bytes_of(7)}


def test_a_frame_whose_pages_cannot_be_read_is_an_empty_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut between the mapping and the first touch, as if its disk failed there."""
    tier = folder.open()
    put(tier, 1)
    is_readable = segment.is_readable

    def cut(view: memoryview, came: Callable[[int], None]) -> bool:
        for path in folder.path.glob("segment-*"):
            os.truncate(path, 0)
        return is_readable(view, came)

    monkeypatch.setattr(disk_tier, "is_readable", cut)
    with mmap.mmap(-1, BLOCK_BYTES) as page:
        try:
            page.madvise(segment.POPULATE_READ)
        except OSError:
            pytest.skip("this system cannot tell")
    assert tier.get([key_of(1)]) == {key_of(1): b""}

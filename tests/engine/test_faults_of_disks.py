"""Disks that are full, read-only, damaged or in use: every request is answered as without."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fuse_disk import small_disk
from kvboost.tiers.disk import log
from kvboost.tiers.disk.segment import Segment
from trials import NUM_NEW, POOL, trial

pytestmark = [pytest.mark.tiny, pytest.mark.alone]

DISK_BYTES = 8 << 20


@pytest.fixture(scope="module")
def calm_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What a request takes on a disk that works."""
    with trial("disk", disk_cache_dir=str(tmp_path_factory.mktemp("calm"))) as on:
        calm_s = on.run("disk without fault")
        assert on.stats()["hits"] > 0 and on.stats()["damaged"] == 0
        return calm_s


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_BYTES >> 20):
        yield tmp_path


def fill(folder: Path) -> None:
    with (folder / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_a_disk_that_is_smaller_than_the_budget(mounted: Path, calm_s: float) -> None:
    options = {"disk_cache_dir": str(mounted / "cache"), "max_disk_bytes": 8 * DISK_BYTES}
    with trial("disk", **options) as on:
        on.run("disk smaller than the budget", calm_s=calm_s)
        on.comes_back()


def test_a_disk_that_is_full_in_the_middle(mounted: Path, calm_s: float) -> None:
    folder = mounted / "cache"
    with trial("disk", disk_cache_dir=str(folder), max_disk_bytes=DISK_BYTES) as on:
        free = (mounted / "filling").unlink
        on.run("disk full for a while", partial(fill, mounted), free, calm_s)
        on.comes_back()


def test_a_disk_that_is_full_at_the_start(mounted: Path, calm_s: float) -> None:
    fill(mounted)
    with trial("disk", disk_cache_dir=str(mounted / "cache"), max_disk_bytes=DISK_BYTES) as on:
        free = (mounted / "filling").unlink
        on.run("disk full at the start", end=free, calm_s=calm_s)
        assert on.stats()["faults"] > 0 and on.stats()["dropped"] > 0
        on.comes_back()


def test_a_disk_that_is_read_only_at_the_start(mounted: Path, calm_s: float) -> None:
    remount(mounted, "ro")
    with trial("disk", disk_cache_dir=str(mounted / "cache"), max_disk_bytes=DISK_BYTES) as on:
        on.run("disk read-only at the start", end=partial(remount, mounted, "rw"), calm_s=calm_s)
        assert on.stats()["faults"] > 0
        on.comes_back()


def test_a_disk_that_turns_read_only(
    tmp_path: Path, calm_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system does this to a file system with errors, and refuses it to a mount in use."""

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    def begin() -> None:
        monkeypatch.setattr(Segment, "write", refuse)
        monkeypatch.setattr(log, "_write_all", refuse)

    with trial("disk", disk_cache_dir=str(tmp_path)) as on:
        on.run("disk read-only for a while", begin, monkeypatch.undo, calm_s)
        stats = on.stats()
        assert stats["faults"] > 0 and stats["dropped"] > 0
        on.comes_back()


def flip(path: Path, num_flips: int) -> None:
    dice, content = random.Random(num_flips), bytearray(path.read_bytes())
    for _ in range(num_flips):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def flip_segments(folder: Path) -> None:
    for path in folder.glob("segment-*"):
        flip(path, 400)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 5)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "index flipped": lambda folder: flip(folder / "index-v2.log", 40),
    "index cut": lambda folder: cut(folder / "index-v2.log"),
    "index deleted": lambda folder: (folder / "index-v2.log").unlink(),
    "segments flipped": flip_segments,
    "first segment cut": lambda folder: cut(min(folder.glob("segment-*"))),
    "first segment deleted": lambda folder: min(folder.glob("segment-*")).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_was_damaged_before_a_restart(
    tmp_path: Path, calm_s: float, damage: str
) -> None:
    options = {"disk_cache_dir": str(tmp_path), "max_disk_bytes": 64 << 20}
    with trial("disk", **options) as on:
        for prompt in POOL:
            on.engine.generate(prompt, NUM_NEW)
            on.engine.flush()
        num_stored = on.stats()["num_entries"]
    DAMAGES[damage](tmp_path)
    with trial("disk", **options) as on:
        num_left = on.stats()["num_entries"]
        on.run(f"disk with {damage} ({num_left} of {num_stored} left)", calm_s=calm_s)
        assert num_left < num_stored or on.stats()["damaged"] > 0
        on.comes_back()
        assert on.stats()["num_entries"] > num_stored  # what was lost was stored again


@pytest.mark.parametrize("what", ["deleted", "cut"])
def test_files_that_are_lost_while_they_are_open(tmp_path: Path, calm_s: float, what: str) -> None:
    def begin() -> None:
        # Pages that were mapped must not be cut: touching them then ends the process.
        on.engine.flush()
        for path in tmp_path.glob("segment-*"):
            path.unlink() if what == "deleted" else os.truncate(path, 5000)

    with trial("disk", disk_cache_dir=str(tmp_path), max_disk_bytes=DISK_BYTES) as on:
        on.run(f"disk with files {what}", begin, calm_s=calm_s)
        assert what == "deleted" or on.stats()["damaged"] > 0
        on.comes_back()
    with trial("disk", disk_cache_dir=str(tmp_path), max_disk_bytes=DISK_BYTES) as on:
        on.comes_back()


def test_a_folder_that_another_process_holds_for_a_while(tmp_path: Path, calm_s: float) -> None:
    hold = textwrap.dedent("""
        import sys
        from pathlib import Path
        from kvboost.tiers.disk.tier import DiskTier
        tier = DiskTier(Path(sys.argv[1]), 1 << 20)
        print("open", flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", hold, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == b"open\n"
        with trial("disk", disk_cache_dir=str(tmp_path)) as on:
            on.run("disk held by another process", end=holder.kill, calm_s=calm_s)
            assert on.stats()["faults"] > 0
            on.comes_back()

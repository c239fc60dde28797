"""Memory of frames: few maps, and back to the system when frames are dropped, but for a few."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.codecs.frame import allocate
from waiting import at_once

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")


def num_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def anonymous_kb() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@needs_proc
def test_frames_that_are_dropped_in_any_order_leave_few_maps_and_no_memory() -> None:
    maps_before, memory_before = num_maps(), anonymous_kb()
    frames = {number: allocate(16 << 10) for number in range(10_000)}
    for frame in frames.values():
        frame[:] = bytes([1]) * len(frame)
    for number in random.Random(0).sample(sorted(frames), 5_000):
        del frames[number]
    frame = None
    assert num_maps() - maps_before < 100
    assert anonymous_kb() - memory_before < 0.6 * 10_000 * 16 + (16 << 10)
    frames.clear()
    allocate(16 << 10)
    assert num_maps() - maps_before < 10
    assert anonymous_kb() - memory_before < 16 << 10


@needs_proc
def test_a_few_dropped_frames_keep_as_many_pages_as_the_next_ones_need() -> None:
    size = 9 << 20  # of slots of 16 MB
    before = anonymous_kb()
    frames = [allocate(size) for _ in range(10)]
    assert anonymous_kb() - before > 10 * 8 << 10
    frames.clear()
    assert 3 * 9 << 10 < anonymous_kb() - before < 5 * 9 << 10
    whole = [allocate(16 << 20) for _ in range(4)]
    assert anonymous_kb() - before < 5 * 16 << 10
    whole.clear()
    frames = [allocate(size) for _ in range(4)]
    assert anonymous_kb() - before < 5 * 9 << 10


def test_threads_have_frames_of_their_own() -> None:
    def work(number: int) -> None:
        held = []
        for step in range(300):
            frame = allocate(4096 + step)
            frame[:] = bytes([number]) * len(frame)
            held.append(frame)
            if len(held) > 10:
                assert set(held.pop(step % 10)) == {number}

    at_once(work, range(1, 6))


POOLS_AND_FORK = """
import os
from kvboost.madvise import reserve

memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
pools = [reserve(memory // 2 >> 12 << 12) for _ in range(3)]
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


@needs_proc
def test_a_process_whose_pools_could_fill_the_memory_can_still_fork() -> None:
    subprocess.run([sys.executable, "-c", POOLS_AND_FORK], check=True, timeout=60)

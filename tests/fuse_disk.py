"""Folders on small disks, and on one that can be slow or hang.

The latter is a FUSE file system in a process of its own: `python fuse_disk.py SOURCE MOUNT
BYTES_PER_S` serves until it is unmounted; stopped by a signal, it hangs every read and write, as a
dead disk or network file system does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system of that size on a folder."""
    size = f"size={megabytes}m,mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class FuseDisk:
    """The folder, and the process behind it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self._process = folder, process
        self._rescuer: subprocess.Popen[bytes] | None = None

    def hang(self) -> None:
        """Until `go_on`, or for 20 seconds: who holds the GIL meanwhile could not go on."""
        number = self._process.pid
        script = f"sleep 0.1; kill -STOP {number}; sleep 20; kill -CONT {number} 2>/dev/null"
        # Before it hangs: a new process closes our files, which hangs then, too.
        self._rescuer = subprocess.Popen(["sh", "-c", script])
        while Path(f"/proc/{number}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        if self._rescuer is not None:
            self._rescuer.kill()
            self._rescuer.wait()


@contextmanager
def fuse_disk(root: Path, bytes_per_s: float = 0) -> Iterator[FuseDisk]:
    """Mount a folder; 0 bytes a second are as many as it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no FUSE on this machine")
    pytest.importorskip("mfusepy")
    source, mount = root / "source", root / "mount"
    source.mkdir()
    mount.mkdir()
    command = [sys.executable, __file__, str(source), str(mount), str(bytes_per_s)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    disk = FuseDisk(mount, process)
    try:
        until = time.monotonic() + 20
        while not mount.is_mount():
            assert process.poll() is None and time.monotonic() < until, "no mount"
            time.sleep(0.02)
        yield disk
    finally:
        disk.go_on()
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False)
        process.terminate()
        process.wait(20)


def serve(source: str, mount: str, bytes_per_s: float) -> None:  # noqa: C901
    from mfusepy import FUSE, Operations  # noqa: PLC0415

    class Slow(Operations):
        """Passes calls on; reads take as long as the disk that it pretends to be."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            found = os.lstat(source + path)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
            times = {name: getattr(found, name + "_ns") for name in ("st_atime", "st_mtime")}
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(source + path)]

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(source + path, mode)

        def create(self, path: str, mode: int, fi: object = None) -> int:
            return os.open(source + path, os.O_RDWR | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(source + path, flags & ~os.O_APPEND)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            if bytes_per_s:
                time.sleep(size / bytes_per_s)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(source + path, length)

        def unlink(self, path: str) -> None:
            os.unlink(source + path)

        def rename(self, old: str, new: str) -> None:
            os.rename(source + old, source + new)

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(source + path, mode)

        def flush(self, path: str, fh: int) -> None:
            return

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            os.fsync(fh)

    FUSE(Slow(), mount, foreground=True, nothreads=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))

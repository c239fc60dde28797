"""Folders that others prepared, and servers that lie."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvboost.codecs.frame import FrameError, check
from kvboost.core import Owner, PrefixKey
from kvboost.errors import TierUnavailable
from kvboost.tiers.disk.folder import LOCK_NAME, SEGMENTS, log_path
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.redis import RedisTier

MIB = 1 << 20
KEY = PrefixKey(bytes(32))
PRECIOUS = b"what somebody else has written"


def open_tier(folder: Path) -> None:
    DiskTier(folder, 64 * MIB).close()


@pytest.mark.parametrize("name", [LOCK_NAME, log_path(Path()).name])
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_link_in_the_folder_is_not_followed(
    tmp_path: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "cache"
    precious.write_bytes(PRECIOUS)
    folder.mkdir(mode=0o700)
    link(precious, folder / name)
    with pytest.raises(TierUnavailable, match=r"is a link|no plain file"):
        open_tier(folder)
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_segment_that_is_a_link_is_neither_read_nor_written(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "cache"
    precious.write_bytes(PRECIOUS)
    tier = DiskTier(folder, 64 * MIB)
    tier.put({KEY: memoryview(bytes(MIB))})
    tier.close()
    for segment in folder.glob(SEGMENTS):
        segment.unlink()
        link(precious, segment)
    with suppress(TierUnavailable):
        tier = DiskTier(folder, 64 * MIB)
        for number in range(8):
            with suppress(TierUnavailable):
                tier.put({PrefixKey(bytes([number]) * 32): memoryview(bytes(MIB))})
            with suppress(TierUnavailable):
                assert PRECIOUS not in bytes(tier.get([KEY]).get(KEY, b""))
        tier.close()
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("name", [LOCK_NAME, log_path(Path()).name])
def test_a_pipe_in_the_folder_delays_nothing(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(TierUnavailable, match=r"no plain file"):
        open_tier(tmp_path)


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(TierUnavailable, match="writable by every user: name a folder inside it"):
        open_tier(folder)
    open_tier(folder / "own")
    assert (folder / "own").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_and_files_of_another_user_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(TierUnavailable, match="belongs to another user"):
        open_tier(folder)
    os.chown(folder, 0, -1)
    open_tier(folder)
    os.chown(log_path(folder), 12345, -1)
    with pytest.raises(TierUnavailable, match="no plain file of this user"):
        open_tier(folder)


class Liar:
    """Takes any command for a greeting, until one asks for a value."""

    def __init__(self, head: bytes, piece: bytes, pause_s: float = 0.0) -> None:
        self._head, self._piece, self._pause_s = head, piece, pause_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.num_sent = 0
        self.is_cut_off, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            while not re.search(b"GET|SCAN", command := client.recv(65536)):
                if not command:
                    return
                client.sendall(b"+OK\r\n" * command.count(b"*"))
            client.sendall(self._head)
            while not self._is_closed.wait(self._pause_s):
                client.sendall(self._piece)
                self.num_sent += len(self._piece)
        self.is_cut_off.set()

    def close(self) -> None:
        self._is_closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def liar() -> Iterator[Callable[..., Liar]]:
    made: list[Liar] = []

    def make(*arguments: object) -> Liar:
        made.append(Liar(*arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"$1099511627776\r\n", b"x" * 65536),
        (b"*2147483647\r\n", b":1\r\n" * 9999),
        (b"+", b"y" * 65536),
    ],
    ids=["a value", "a list", "a line"],
)
def test_a_reply_without_an_end_is_given_up(
    liar: Callable[..., Liar], head: bytes, piece: bytes
) -> None:
    server = liar(head, piece)
    tier = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=5, largest_bytes=MIB)
    with suppress(TierUnavailable):
        assert tier.get([KEY]) == {}
    assert server.is_cut_off.wait(30)
    assert server.num_sent < 64 * MIB
    tier.close()


def test_a_reply_that_comes_drop_by_drop_is_given_up(liar: Callable[..., Liar]) -> None:
    server = liar(b"$1048576\r\n", b"x", 0.02)
    tier = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=0.1, largest_bytes=MIB)
    with pytest.raises(TierUnavailable):
        tier.get([KEY])
    assert server.is_cut_off.wait(30)
    tier.close()


LIES = {
    "a long list without items": b"*2147483647\r\n",
    "lists in lists": b"*1\r\n" * 100_000 + b":1\r\n",
    "a negative length": b"$-2\r\n",
    "a number": b":5\r\n",
    "an error": b"-ERR go away \xff\xfe\r\n",
    "another type": b"-WRONGTYPE x\r\n",
    "another server": b"-MOVED 1 10.0.0.1:6379\r\n",
    "another protocol": b"HTTP/1.1 200 OK\r\n\r\nhello",
    "more replies than questions": b"$1\r\na\r\n" * 50,
    "a length that is none": b"$12x\r\n",
    "a length that is too long": b"$" + b"9" * 40 + b"\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_any_other_reply_is_a_fault_or_no_frame(liar: Callable[..., Liar], lie: str) -> None:
    server = liar(LIES[lie], b"", 0.05)
    tier = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=0.3, largest_bytes=MIB)
    tracemalloc.start()
    with suppress(TierUnavailable):
        for found in tier.get([KEY]).values():
            with pytest.raises(FrameError):
                check(found, KEY)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2 * MIB
    tier.close()


def test_names_are_no_numbers(liar: Callable[..., Liar]) -> None:
    server = liar(b"*2\r\n$1\r\n0\r\n*1\r\n:2000000000\r\n", b"", 0.05)
    tier = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=0.3)
    with pytest.raises(TierUnavailable, match="expected bytes"):
        tier.erase([], [Owner(bytes(16))])
    tier.close()


def test_a_list_of_large_values_is_given_up(liar: Callable[..., Liar]) -> None:
    server = liar(b"*65536\r\n", b"$%d\r\n%b\r\n" % (MIB, bytes(MIB)), 0.0)
    tier = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=30, largest_bytes=MIB)
    tracemalloc.start()
    with suppress(TierUnavailable):
        assert tier.get([KEY]) == {}
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert server.is_cut_off.wait(30)
    assert most_bytes < 24 * MIB
    tier.close()


FORKED = """
import os, sys
from pathlib import Path
from kvboost.tiers.disk.tier import DiskTier

def tier():
    return DiskTier(Path(sys.argv[1]), 64 << 20)

parent = tier()
(reading, writing), (is_begun, begins) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.write(begins, b"!")
    os.read(reading, 1)  # until the parent has ended
    os._exit(0)
os.read(is_begun, 1)
parent.close()
tier().close()
"""


def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, tmp_path], check=True, timeout=60)

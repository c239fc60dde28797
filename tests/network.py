"""A network between this machine's processes and one namespace, which delays and loses packets.

Two TUN devices, one of them in the namespace, and a thread that carries packets from one to the
other: TCP above it is the kernel's own, with its retransmissions and timeouts.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers import find_program

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 1 << 16
HERE, THERE = "10.77.31.1", "10.77.31.2"


class Link:
    """Carries packets; `delay_s` (one way) and `loss` (share of packets) may change at any time."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self._ends = ends
        self._chance = random.Random(1)
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def clear(self) -> None:
        self.delay_s, self.loss = 0.0, 0.0

    def close(self) -> None:
        self._is_over = True
        self._thread.join()

    def _carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()  # when, whereto, what
        other = {self._ends[0]: self._ends[1], self._ends[1]: self._ends[0]}
        while not self._is_over:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, end, packet = waiting.popleft()
                os.write(end, packet)
            pause_s = min(0.1, waiting[0][0] - now) if waiting else 0.1
            for end in select.select(self._ends, [], [], max(0.0, pause_s))[0]:
                packet = os.read(end, PACKET_BYTES)
                if self._chance.random() >= self.loss:
                    waiting.append((time.monotonic() + self.delay_s, other[end], packet))


@contextmanager
def linked_namespace(name: str) -> Iterator[Link]:
    """A namespace where `THERE` is, as seen from this one, which is `HERE` for it."""
    find_program("ip")
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    _ip("netns", "add", name)
    ends: list[int] = []
    try:
        for device, address, peer, place in (
            ("kvb-here", HERE, THERE, []),
            ("kvb-there", THERE, HERE, ["-n", name]),
        ):
            ends.append(_tun(device))
            if place:
                _ip("link", "set", device, "netns", name)
            _ip(*place, "address", "add", address, "peer", peer, "dev", device)
            _ip(*place, "link", "set", device, "up")
        link = Link((ends[0], ends[1]))
        yield link
        link.close()
    finally:
        for end in ends:
            os.close(end)
        _ip("netns", "delete", name)


def _tun(device: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

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
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address

import pytest

from servers import find_program

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 1 << 16
NETWORK, NUM_PAIRS = IPv4Address("10.77.0.0"), 1 << 14  # of four addresses each


class Link:
    """Carries packets; `delay_s` (one way) and `loss` (share of packets) may change at any time."""

    def __init__(self, ends: tuple[int, int], namespace: str, here: str, there: str) -> None:
        self.namespace = namespace
        self.here, self.there = here, there  # addresses of this side and in the namespace
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
def linked_namespace() -> Iterator[Link]:
    """A namespace at the other end of a link; where none can be made, the test is skipped."""
    find_program("ip")
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    with ExitStack() as stack:
        try:
            link = _set_up(stack)
        except (OSError, subprocess.CalledProcessError) as error:
            if "CI" in os.environ:
                raise
            pytest.skip(f"no namespace with a TUN device: {error}")
        yield link


def _set_up(stack: ExitStack) -> Link:
    """Named by this process, so that runs beside it and left-overs of others do not collide."""
    name = f"kvboost-{os.getpid()}"
    first = NETWORK + 4 * (os.getpid() % NUM_PAIRS)
    here, there = str(IPv4Address(first + 1)), str(IPv4Address(first + 2))
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)
    ends = []
    for device, address, peer, place in (
        (f"kvh{os.getpid()}", here, there, []),
        (f"kvt{os.getpid()}", there, here, ["-n", name]),
    ):
        end = os.open("/dev/net/tun", os.O_RDWR)
        stack.callback(os.close, end)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        if place:
            _ip("link", "set", device, "netns", name)
        _ip(*place, "address", "add", address, "peer", peer, "dev", device)
        _ip(*place, "link", "set", device, "up")
        ends.append(end)
    link = Link((ends[0], ends[1]), name, here, there)
    stack.callback(link.close)
    return link


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

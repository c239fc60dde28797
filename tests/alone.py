"""Tests marked `alone` while others run in a second process: they have the machine to themselves.

A plugin of pytest. Every test holds a lock that others may hold beside it, one that is `alone`
holds it by itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOM = Path(__file__).parent
DOOR = Path(__file__)


@contextmanager
def held(path: Path, how: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


@contextmanager
def entered(*, is_alone: bool) -> Iterator[None]:
    """Who waits for an empty room holds its door, so that nobody comes in between."""
    with ExitStack() as stack:
        with held(DOOR, fcntl.LOCK_EX):
            stack.enter_context(held(ROOM, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH))
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the timeout of the test begins
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with entered(is_alone=item.get_closest_marker("alone") is not None):
        return (yield)

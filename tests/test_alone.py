"""Who is alone in the room of tests."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import alone
from alone import entered


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one in which this test is."""
    (tmp_path / "door").touch()
    monkeypatch.setattr(alone, "ROOM", tmp_path)
    monkeypatch.setattr(alone, "DOOR", tmp_path / "door")


def start(seen: list[str], name: str, *, is_alone: bool) -> threading.Thread:
    def run() -> None:
        with entered(is_alone=is_alone):
            seen.append(name)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_others_enter_together() -> None:
    seen: list[str] = []
    with entered(is_alone=False):
        start(seen, "another", is_alone=False).join()
        assert seen == ["another"]


def test_who_wants_to_be_alone_waits_and_is_not_overtaken() -> None:
    seen: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(entered(is_alone=False))
        first = start(seen, "alone", is_alone=True)
        time.sleep(0.2)
        second = start(seen, "later", is_alone=False)
        time.sleep(0.2)
        assert seen == []
    first.join()
    second.join()
    assert seen == ["alone", "later"]


def test_waiting_is_not_on_the_clock_of_a_timeout(pytestconfig: pytest.Config) -> None:
    hook = pytestconfig.pluginmanager.hook.pytest_runtest_protocol
    wrappers = [each for each in hook.get_hookimpls() if each.wrapper or each.hookwrapper]
    assert [each.plugin_name for each in wrappers[-1:]] == ["alone"]  # called last to first
    assert "timeout" in [each.plugin_name for each in wrappers]

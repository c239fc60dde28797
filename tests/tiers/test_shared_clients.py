"""Clients of shared tiers without their servers: URLs, packages, and what goes over the line."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import random_frames
from kvboost.config import Options
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.tiers.base import Tier
from kvboost.tiers.mooncake import MooncakeTier
from kvboost.tiers.redis import RedisTier, _wire
from kvboost.tiers.urls import SCHEMES


@pytest.mark.parametrize(
    ("kind", "url", "reason"),
    [
        (RedisTier, "redis://h?ttl_s=0", "ttl_s=0"),
        (RedisTier, "redis://h?ttl_s=soon", "ttl_s=soon"),
        (RedisTier, "redis://h?tll_s=3", "tll_s"),
        (RedisTier, "redis://:secretword/x@h:1", "escaped"),
        (RedisTier, "http://h:1", "expected redis://"),
        (MooncakeTier, "mooncake://h?segment_bytes=1000000", "at least 16777216"),
        (MooncakeTier, "mooncake://h?buffer_bytes=-1", "buffer_bytes=-1"),
        (MooncakeTier, "mooncake://h?segment=1", "segment"),
        (MooncakeTier, "mooncake:///x", "expected mooncake://"),
        (MooncakeTier, "redis://h", "expected mooncake://"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason(kind: type[Tier], url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        kind(url)
    assert "secretword" not in str(caught.value)


def test_the_help_of_the_option_has_every_scheme() -> None:
    texts = {each.name: each.metadata["help"] for each in fields(Options)}
    shown = set(re.findall(r"(\w+)://", texts["cache_url"]))
    assert shown == {*SCHEMES} - {"memory"}  # which is always there


@pytest.mark.parametrize(
    ("kind", "package", "told"),
    [(RedisTier, "redis", "redis hiredis"), (MooncakeTier, "mooncake", "mooncake")],
)
def test_a_missing_client_is_named(
    kind: type[Tier], package: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {told}"):
        kind(f"{package}://localhost")


def test_the_clients_are_loaded_only_when_a_tier_is_made() -> None:
    code = "import sys, kvboost.tiers.redis, kvboost.tiers.mooncake;"
    code += "assert not {'redis', 'hiredis', 'mooncake'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.lists(st.binary(max_size=30_000), min_size=1, max_size=4), max_size=6))
@settings(max_examples=50)
def test_commands_are_written_as_the_protocol_wants(commands: list[list[bytes]]) -> None:
    expected = b"".join(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in command)
        for command in commands
    )
    assert b"".join(_wire(map(tuple, commands))) == expected


def test_after_a_fault_the_connection_is_not_used_again() -> None:
    def answer(connection: socket.socket, answers: list[bytes]) -> None:
        while answers and (question := connection.recv(1 << 16)):
            connection.sendall(b"+OK\r\n" * question.count(b"SETINFO"))
            if b"GET" in question:
                connection.sendall(answers.pop(0))

    def serve() -> None:
        for answers in ([b"-ERR no\r\n", b"$5\r\nstale\r\n"], [b"$5\r\nright\r\n"]):
            connection, _ = listener.accept()
            with connection:
                answer(connection, answers)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        tier = RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}", 5)
        first, second, third = random_frames(3, 0)
        with pytest.raises(TierUnavailable, match="no"):
            tier.get([first, second])
        assert tier.get([third]) == {third: b"right"}
        tier.close()
        thread.join()

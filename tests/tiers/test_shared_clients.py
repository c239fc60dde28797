"""Clients of shared tiers without their servers: URLs, packages, and what goes over the line."""

from __future__ import annotations

import gc
import io
import itertools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import random_frames
from kvboost.config import Options
from kvboost.errors import ConfigError, TierUnavailable
from kvboost.tiers.base import Tier
from kvboost.tiers.mooncake import MooncakeTier
from kvboost.tiers.redis import RedisTier, _Replies, _wire
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
    [(RedisTier, "redis", "redis"), (MooncakeTier, "mooncake", "mooncake")],
)
def test_a_missing_client_is_named(
    kind: type[Tier], package: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {told}"):
        kind(f"{package}://localhost")


def test_the_clients_are_loaded_only_when_a_tier_is_made() -> None:
    code = "import sys, kvboost.tiers.redis, kvboost.tiers.mooncake;"
    code += "assert not {'redis', 'mooncake'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.lists(st.binary(max_size=30_000), min_size=1, max_size=4), max_size=6))
@settings(max_examples=50)
def test_commands_are_written_as_the_protocol_wants(commands: list[list[bytes]]) -> None:
    expected = b"".join(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in command)
        for command in commands
    )
    assert b"".join(_wire(map(tuple, commands))) == expected


REPLIES = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.from_regex(rb"[^\r\n]{0,40}", fullmatch=True)  # a line
    | st.binary(max_size=200).map(bytearray),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=8,
)


def as_sent(reply: object) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"+%b\r\n" % reply
        case bytearray():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(as_sent, reply))
    raise TypeError(reply)


def depth(reply: object) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


@given(
    st.lists(REPLIES.filter(lambda reply: depth(reply) < 3), min_size=1, max_size=4),
    st.lists(st.integers(1, 50), min_size=1),
)
def test_replies_are_read_however_they_are_cut(replies: list[object], sizes: list[int]) -> None:
    sent = io.BytesIO(b"".join(map(as_sent, replies)))
    lengths = itertools.cycle(sizes)
    sock = Mock()
    sock.recv_into = lambda buffer: sent.readinto(memoryview(buffer)[: next(lengths)])
    parser = _Replies(200, 5, lambda _: None)
    parser.on_connect(Mock(_sock=sock))
    assert [parser.read_response() for _ in replies] == replies


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that answers the first command after the greeting with `reply`."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while question := connection.recv(1 << 16):
                greetings = question.count(b"SETINFO")
                connection.sendall(b"+OK\r\n" * greetings or reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        gc.collect()  # ends the connection of a tier that was dropped
        thread.join(5)


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


@pytest.mark.parametrize("reply", [b"-LOADING dataset\r\n", b"-NOAUTH first\r\n", b"+OK\r\n"])
def test_a_deletion_without_an_answer_is_not_done(reply: bytes) -> None:
    with answering(reply) as url, pytest.raises(TierUnavailable):
        RedisTier(url, 5).erase([*random_frames(1, 0)], [])


def test_a_value_larger_than_any_frame_of_ours_is_a_miss() -> None:
    key, *_ = random_frames(1, 0)
    with answering(b"$2000000\r\n") as url:
        assert RedisTier(url, 5, largest_bytes=10**6).get([key]) == {}


def test_a_large_value_tells_that_it_is_coming() -> None:
    key, *_ = random_frames(1, 0)
    with answering(b"$300000\r\n" + bytes(300_000) + b"\r\n") as url:
        tier = RedisTier(url, 5)
        assert tier.get([key])[key].nbytes == 300_000
        assert tier.bytes_read > 100_000


def test_large_frames_are_sent_in_parts() -> None:
    frame = memoryview(bytes(range(250)) * 4000)
    pieces = _wire([(b"SET", b"key", frame)])
    assert max(memoryview(piece).nbytes for piece in pieces) <= 256 << 10
    assert b"".join(pieces).endswith(bytes(frame) + b"\r\n")

"""A replica's application run in its process: streams pass, and a client that left is seen."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from fake_serving import Stand
from kvboost.config import Options
from kvboost.fleet.messages import Forwarded, Head
from kvboost.fleet.replica import respond, with_own_folder
from waiting import in_a_loop, wait_until

HEADERS = ((b"host", b"localhost:8000"), (b"content-type", b"application/json"))


def forwarded(body: Any, path: str = "/v1/completions") -> Forwarded:
    return Forwarded("POST", path, b"", HEADERS, json.dumps(body).encode())


@pytest.fixture
def stand() -> Stand:
    return Stand()


async def collected(stand: Stand, request: Forwarded) -> tuple[Head, bytes]:
    head, *pieces = [each async for each in respond(stand.app, request)]
    assert isinstance(head, Head)
    return head, b"".join(pieces)


@in_a_loop
async def test_a_whole_answer_has_its_status_and_headers(stand: Stand) -> None:
    head, body = await collected(stand, forwarded({"prompt": "Hi"}))
    assert head.status == 200
    assert dict(head.headers)[b"content-length"] == str(len(body)).encode()
    assert json.loads(body)["choices"][0]["text"] == "Hello world"


@in_a_loop
async def test_a_stream_comes_piece_by_piece(stand: Stand) -> None:
    stand.engine.num_free = 1
    stand.engine.steps.clear()
    stream = respond(stand.app, forwarded({"prompt": "Hi", "stream": True}))
    head, first = await anext(stream), await anext(stream)
    assert isinstance(head, Head) and b"Hel" in first  # the rest is not computed yet
    stand.engine.steps.set()
    assert (await _last(stream)).endswith(b"data: [DONE]\n\n")


async def _last(stream: Any) -> bytes:
    return b"".join([piece async for piece in stream])


@in_a_loop
async def test_method_path_query_and_host_are_those_of_the_client(stand: Stand) -> None:
    asked = Forwarded("GET", "/v1/cache", b"limit=0", HEADERS, b"")
    head, body = await collected(stand, asked)
    assert (head.status, json.loads(body)["error"]["param"]) == (400, "limit")
    elsewhere = Forwarded("GET", "/health", b"", ((b"host", b"evil.example"),), b"")
    head, body = await collected(stand, elsewhere)
    assert (head.status, json.loads(body)["error"]["code"]) == (403, "wrong_host")


@pytest.mark.parametrize("is_stream", [True, False])
@in_a_loop
async def test_a_call_that_is_cancelled_stops_the_computing(stand: Stand, is_stream: bool) -> None:
    stand.engine.steps.clear()
    asked = forwarded({"prompt": "Hi", "stream": is_stream})
    reading = asyncio.ensure_future(_last(respond(stand.app, asked)))
    await asyncio.to_thread(wait_until, lambda: bool(stand.engine.tickets))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await _assert_stopped(stand)


@in_a_loop
async def test_a_stream_that_is_closed_stops_the_computing(stand: Stand) -> None:
    stand.engine.num_free = 1
    stand.engine.steps.clear()
    stream = respond(stand.app, forwarded({"prompt": "Hi", "stream": True}))
    await anext(stream)
    await stream.aclose()
    await _assert_stopped(stand)


async def _assert_stopped(stand: Stand) -> None:
    await asyncio.to_thread(wait_until, lambda: stand.engine.tickets[0].is_cancelled)
    await asyncio.to_thread(wait_until, lambda: bool(stand.telemetry.records))
    assert stand.telemetry.records[0].finish_reason == "cancelled"


@in_a_loop
async def test_a_client_that_reads_slowly_slows_the_application_down() -> None:
    num_sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for num_sent in range(1, 1001):  # noqa: B007
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    stream = respond(endless, forwarded({}))
    assert isinstance(await anext(stream), Head) and await anext(stream) == b"x"
    await asyncio.sleep(0.05)
    assert num_sent < 10
    await stream.aclose()
    for _ in range(100):
        await asyncio.sleep(0.01)
    assert num_sent == 1000  # nobody waits for what nobody reads


@in_a_loop
async def test_what_the_application_raises_too_late_to_tell_is_raised() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    stream = respond(broken, forwarded({}))
    assert await anext(stream) == Head(200, ())
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)


def test_each_replica_of_a_machine_has_a_folder_of_its_own() -> None:
    options = Options(disk_cache_dir="/kv", chunk_size=64)
    assert with_own_folder(options, 1) == Options(disk_cache_dir="/kv/1", chunk_size=64)
    assert with_own_folder(Options(), 1) == Options()


def test_what_was_parsed_for_the_router_is_not_sent() -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [1]}
    request = Forwarded("POST", "/v1/chat/completions", b"", HEADERS, b"{...}", asked)
    sent = copy.copy(request)  # as it is serialized
    assert sent == Forwarded("POST", "/v1/chat/completions", b"", HEADERS, b"{...}")
    assert not sent.asked

"""The ingress on fake replicas: what it passes on, and what clients see when replicas die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from kvboost.fleet import ingress
from kvboost.fleet.ingress import Front
from kvboost.fleet.messages import Forwarded, Head
from kvboost.server.options import ServerOptions
from waiting import in_a_loop

JSON = Head(200, ((b"content-type", b"application/json"), (b"x-request-id", b"a")))
SSE = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
WHOLE = ["r1", JSON, b'{"a": 1}']
DIED = ActorDiedError()
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
LOST = [
    DIED,
    ActorUnavailableError("gone", None),
    WorkerCrashedError(),
    RequestCancelledError("r"),
    asyncio.CancelledError(),
]


class FakeStream:
    """A replica's response: what it is made of, and where it breaks; "stall" never comes."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = iter(items)
        self.is_cancelled = False

    async def __anext__(self) -> Any:
        item = next(self._items, None)
        if item is None:
            raise StopAsyncIteration
        if item == "stall":
            await asyncio.Event().wait()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeReplicas:
    """A handle: each call gets the next of the responses."""

    def __init__(self, *responses: Sequence[Any]) -> None:
        self._left = [FakeStream(items) for items in responses]
        self.calls: list[Forwarded] = []
        self.streams: list[FakeStream] = []

    @property
    def answer(self) -> FakeReplicas:
        return self

    def remote(self, request: Forwarded) -> FakeStream:
        self.calls.append(request)
        self.streams.append(self._left.pop(0))
        return self.streams[-1]


def ask(
    replicas: FakeReplicas,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    client: tuple[str, int] = ("127.0.0.1", 5),
    options: dict[str, Any] | None = None,
    **request: Any,
) -> httpx.Response:
    async def call() -> httpx.Response:
        front = Front(replicas, ServerOptions(model="m", **(options or {})))
        transport = httpx.ASGITransport(front, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as web:
            return await web.request(method, path, **request)

    return asyncio.run(asyncio.wait_for(call(), 20))


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_request_is_passed_on_whole_and_its_answer_back() -> None:
    replicas = FakeReplicas(WHOLE)
    reply = ask(replicas, json=CHAT, params={"a": "b c"}, headers={"authorization": "Bearer k"})
    assert (reply.status_code, reply.json()) == (200, {"a": 1})
    assert reply.headers["x-kvboost-replica"] == "r1"
    assert "x-request-id" not in reply.headers  # the proxy's
    (sent,) = replicas.calls
    assert (sent.method, sent.path, sent.query) == ("POST", "/v1/chat/completions", b"a=b+c")
    assert json.loads(sent.body) == CHAT
    assert (b"authorization", b"Bearer k") in sent.headers
    assert (b"host", b"localhost") in sent.headers
    assert not replicas.streams[0].is_cancelled


def test_the_prompt_is_read_for_the_router() -> None:
    replicas = FakeReplicas(WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
    bodies = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    ask(replicas, json=CHAT)
    for path, body in bodies.items():
        ask(replicas, path=path, json=body)
    ask(replicas, path="/v1/warm", json={"prompt": "Hi"})
    ask(replicas, content=b"[" * 100_000)
    assert [each.asked for each in replicas.calls] == [CHAT, *bodies.values(), {}, {}]


def test_an_answer_without_a_body_is_passed_on() -> None:
    reply = ask(FakeReplicas(["r1", Head(204, ())]), "OPTIONS")
    assert (reply.status_code, reply.content) == (204, b"")


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("said", [[], ["r0"], ["r0", JSON]], ids=len)
def test_another_replica_is_asked_when_one_is_lost(lost: BaseException, said: list[Any]) -> None:
    replicas = FakeReplicas([*said, lost], WHOLE)
    reply = ask(replicas, json=CHAT)
    assert (reply.json(), reply.headers["x-kvboost-replica"]) == ({"a": 1}, "r1")
    assert replicas.calls[0] == replicas.calls[1]


def test_a_replica_that_says_nothing_is_lost() -> None:
    assert ask(FakeReplicas([], ["r0"], WHOLE), json=CHAT).json() == {"a": 1}


def test_when_all_are_lost_the_client_may_ask_again() -> None:
    replicas = FakeReplicas([DIED], [DIED], [DeploymentUnavailableError("d")], WHOLE)
    reply = ask(replicas, json=CHAT)
    assert code(reply) == (503, "no_replica")
    assert reply.headers["retry-after"] == "1"
    assert len(replicas.calls) == 3


def test_a_request_that_kills_replicas_is_not_handed_to_all_of_them() -> None:
    replicas = FakeReplicas([DIED], ["r0", DIED], ["r1", JSON, DIED], WHOLE)
    assert code(ask(replicas, json=CHAT)) == (503, "no_replica")
    replicas = FakeReplicas(["r0", DIED], ["r1", DIED], WHOLE)
    assert code(ask(replicas, json=CHAT)) == (503, "no_replica")
    assert len(replicas.calls) == 2


def test_when_none_is_free_in_time_the_client_may_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "MOST_WAIT_S", 0.05)
    replicas = FakeReplicas(["stall"], WHOLE)
    reply = ask(replicas, json=CHAT)
    assert code(reply) == (503, "no_replica")
    assert replicas.streams[0].is_cancelled


@pytest.mark.parametrize("said", [[], ["r0"], ["r0", SSE]], ids=len)
def test_a_replica_that_is_stuck_is_not_waited_for_without_end(
    said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "GRACE_S", 0.05)
    replicas = FakeReplicas([*said, "stall"])
    reply = ask(replicas, json=CHAT, options={"request_deadline_s": 0.05})
    assert code(reply) == (504, "deadline_exceeded")
    assert replicas.streams[0].is_cancelled


def chunk(name: str, text: str) -> bytes:
    said = {"id": name, "created": len(name), "choices": [{"delta": {"content": text}}]}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
def test_another_replica_goes_on_with_a_stream(lost: BaseException) -> None:
    first = ["r0", SSE, chunk("a", "Hel"), chunk("a", "lo")[:-4], lost]
    whole = b"".join([chunk("bb", "Hel"), chunk("bb", "lo"), chunk("bb", "!"), b"data: [DONE]\n\n"])
    second = ["r1", SSE, *(whole[start : start + 50] for start in range(0, len(whole), 50))]
    replicas = FakeReplicas(first, second)
    reply = ask(replicas, json=CHAT)
    expected = [chunk("a", text).decode() for text in ("Hel", "lo", "!")]
    assert reply.text == "".join(expected) + "data: [DONE]\n\n"
    assert reply.headers["x-kvboost-replica"] == "r0"
    assert replicas.calls[0] == replicas.calls[1]


@pytest.mark.parametrize(
    "second",
    [["r1", SSE, chunk("b", "Good"), b"data: [DONE]\n\n"], ["r1", JSON, b"{}"], ["r1", DIED]],
    ids=["another answer", "no stream", "dead too"],
)
def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error(second: list[Any]) -> None:
    replicas = FakeReplicas(["r0", SSE, chunk("a", "Hel"), DIED], second)
    reply = ask(replicas, json=CHAT)
    assert reply.status_code == 200
    assert reply.text.startswith(chunk("a", "Hel").decode() + "event: error\ndata: ")
    told = json.loads(reply.text.rpartition("data: ")[2])
    assert told["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 2


def test_a_body_that_breaks_is_broken_off() -> None:
    with pytest.raises(Exception, match="is lost"):
        ask(FakeReplicas(["r0", JSON, b"{", DIED]), json=CHAT)


def test_a_fault_of_the_application_is_told_and_not_tried_again() -> None:
    fault = RayTaskError("answer", "Traceback", ValueError("broken"))
    replicas = FakeReplicas(["r0", fault], WHOLE)
    reply = ask(replicas, json=CHAT, headers={"x-request-id": "req-7"})
    assert code(reply) == (500, "internal_error")
    assert "req-7" in reply.json()["error"]["message"]
    assert len(replicas.calls) == 1
    late = ask(FakeReplicas(["r0", SSE, b"data: 1\n\n", fault]), json=CHAT)
    assert "internal_error" in late.text


def test_bodies_are_bounded_whatever_their_headers_say() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 10

    replicas = FakeReplicas(WHOLE)
    options = {"max_body_bytes": 100}
    assert code(ask(replicas, content=b"x" * 101, options=options)) == (413, "body_too_large")
    assert code(ask(replicas, content=pieces(), options=options)) == (413, "body_too_large")
    assert not replicas.calls
    assert ask(replicas, content=b"x" * 100, options=options).status_code == 200


def test_without_keys_other_machines_are_served_only_on_demand() -> None:
    there = ("10.0.0.7", 5)
    assert code(ask(FakeReplicas(), json=CHAT, client=there)) == (403, "wrong_client")
    assert ask(FakeReplicas(WHOLE), json=CHAT, client=("::1", 5)).status_code == 200
    reply = ask(FakeReplicas(WHOLE), json=CHAT, client=there, options={"allow_anonymous": True})
    assert reply.status_code == 200
    assert "x-kvboost-replica" not in reply.headers


def test_who_has_no_key_gets_nothing_passed_on(tmp_path: Path) -> None:
    options = {"api_keys": str(tmp_path / "keys.toml")}
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nsha256 = "{sha256(b"mine").hexdigest()}"\ntenant = "t"\n'
        f'[[keys]]\nsha256 = "{sha256(b"boss").hexdigest()}"\ntenant = "t"\nadmin = true\n'
    )
    replicas = FakeReplicas(WHOLE, WHOLE, WHOLE)

    def asked(key: str, path: str = "/v1/chat/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        there = ("10.0.0.7", 5)
        return ask(replicas, path=path, json=CHAT, headers=headers, client=there, options=options)

    assert code(asked("wrong")) == (401, "invalid_api_key")
    assert not replicas.calls
    assert "x-kvboost-replica" not in asked("mine").headers
    assert asked("boss").headers["x-kvboost-replica"] == "r1"
    assert asked("wrong", "/health").status_code == 200


@pytest.mark.parametrize("said", [[], ["r0"], ["r0", SSE, b"data: 1\n\n"]], ids=len)
@pytest.mark.parametrize("is_cancelled", [True, False])
@in_a_loop
async def test_a_client_that_leaves_stops_the_replica(said: list[Any], is_cancelled: bool) -> None:
    replicas = FakeReplicas([*said, "stall"])
    front = Front(replicas, ServerOptions(model="m"))
    waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    scope |= {"headers": [], "client": ("127.0.0.1", 5)}
    waiting.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
    answering = asyncio.ensure_future(front(scope, waiting.get, send))
    await asyncio.sleep(0.05)
    if is_cancelled:  # as Ray's proxy does
        answering.cancel()
    else:
        waiting.put_nowait({"type": "http.disconnect"})
    await asyncio.wait({answering}, timeout=5)
    assert answering.done() and replicas.streams[0].is_cancelled
    assert len(sent) == (2 if len(said) == 3 else 0)


@in_a_loop
async def test_a_client_that_leaves_while_it_sends_is_not_passed_on() -> None:
    front = Front(FakeReplicas(), ServerOptions(model="m"))
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "more_body": True}]

    async def receive() -> Any:
        return messages.pop()

    scope = {"type": "http", "path": "/", "headers": [], "client": ("127.0.0.1", 5)}
    await front(scope, receive, None)  # type: ignore[arg-type]


@in_a_loop
async def test_ray_serve_may_start_and_end_it() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await Front(FakeReplicas(), ServerOptions(model="m"))({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@in_a_loop
async def test_a_prefix_that_ray_serves_it_under_is_not_passed_on() -> None:
    replicas = FakeReplicas(WHOLE)
    scope = {"type": "http", "method": "GET", "path": "/llm/v1/models", "root_path": "/llm"}
    scope |= {"headers": [], "client": ("127.0.0.1", 5)}

    async def receive() -> Any:
        if replicas.calls:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    await Front(replicas, ServerOptions(model="m"))(scope, receive, send)
    assert replicas.calls[0].path == "/v1/models"

"""A server without a model: an engine that says what it is told to, and requests to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import uvicorn

from kvboost.core import MatchKind, Sampling, Span
from kvboost.engine.batch.ticket import Ticket
from kvboost.engine.contents import Deletion
from kvboost.engine.results import (
    Completion,
    Delta,
    Phases,
    ReuseReport,
    SpanReport,
    TokenLogprob,
    WarmResult,
)
from kvboost.errors import ConfigError, DeadlineExceeded, QueueFull
from kvboost.server.app import make_app
from kvboost.server.edge import Limits, protocol
from kvboost.server.keys import KeyRing
from kvboost.server.options import ServerOptions
from kvboost.server.plans import Served
from kvboost.server.serve import DrainingServer

WAIT_S = 20.0
MODEL = Served("fake", vocab_size=300, context_tokens=1000, most_answers=40, adapters=("terse",))


class CharTokenizer:
    """A token for each character of ASCII; `rendered` is what the last template was given."""

    chat_template = "chars"

    def __init__(self) -> None:
        self.rendered: dict[str, Any] = {}

    def __call__(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> Any:
        start = [1] if add_special_tokens else []
        tokens = [*start, *(min(ord(char), 255) for char in text)]
        return type("Encoding", (), {"input_ids": tokens})()

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token) for token in tokens]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(256)}

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        self.rendered, messages = variables, conversation
        if messages[0]["content"] == "refuse":
            raise ValueError("roles must alternate")
        text = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return self(text).__dict__ | {"input_ids": self(text).input_ids} if tokenize else text


class FakeEngine:
    """Answers with `pieces`, one each step, on a thread for each answer; `steps` holds it up."""

    def __init__(self) -> None:
        self.tokenizer = CharTokenizer()
        self.pieces = ["Hel", "lo", " world"]
        self.fault: Exception | None = None  # after the first piece
        self.max_running = 100
        self.num_free = 0  # pieces that `steps` does not hold up
        self.steps = threading.Event()
        self.steps.set()
        self.calls: list[dict[str, Any]] = []
        self.tickets: list[Ticket] = []
        self.warmed: list[Any] = []
        self.is_closed = False
        self.busy_s = 0.0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        documents: Sequence[str] = (),
        reuse: str | None = None,
        tenant: str = "",
        adapter: str | None = None,
        deadline_s: float | None = None,
        listener: Any = None,
    ) -> Ticket:
        if sum(not ticket.future.done() for ticket in self.tickets) >= self.max_running:
            raise QueueFull("the queue is full")
        ticket = Ticket(threading.Event())
        self.tickets.append(ticket)
        call = {"prompt": list(prompt), "sampling": sampling, "reuse": reuse, "tenant": tenant}
        call["adapter"] = adapter
        self.calls.append(call)
        run = (ticket, prompt, sampling, deadline_s, listener)
        threading.Thread(target=self._run, args=run, daemon=True).start()
        return ticket

    @property
    def sampling(self) -> Sampling:
        return self.calls[-1]["sampling"]

    def batch_stats(self) -> dict[str, Any]:
        return {"num_running": 0, "num_waiting": 0}

    def cache_stats(self) -> dict[str, Any]:
        return {"hot_chunks": 3}

    def warm(self, content: Any, **arguments: Any) -> WarmResult:
        if arguments["ttl_s"] is not None and not arguments["pin"]:
            raise ConfigError("ttl_s needs pin")
        self.warmed.append((content, arguments))
        return WarmResult(1, 10, 10, 0, 1.5)

    @property
    def contents(self) -> FakeEngine:
        return self

    def chunks(self, tenant: str, limit: int) -> list[dict[str, Any]]:
        return [{"key": "ab", "tenant": tenant}][:limit]

    def arrangement(self, order: str, tenant: str, adapter: str | None) -> None:
        """Documents stay where they are; the real one is tested behind the API."""

    def pin(self, tokens: list[int], *, tenant: str, ttl_s: float | None) -> int:
        self.calls.append({"pinned": tokens, "tenant": tenant, "ttl_s": ttl_s})
        return 2

    def delete(self, tokens: list[int] | None, *, tenant: str) -> Deletion:
        self.calls.append({"deleted": tokens, "tenant": tenant})
        return Deletion(3, ("redis",))

    def close(self) -> None:
        self.is_closed = True

    def _run(
        self, ticket: Ticket, prompt: Any, sampling: Sampling, deadline_s: Any, listener: Any
    ) -> None:
        said: list[TokenLogprob] = []
        ends_at = time.monotonic() + min(deadline_s, WAIT_S)
        for number, piece in enumerate(self.pieces[: sampling.max_new_tokens]):
            is_free = number < self.num_free
            while not (is_free or self.steps.wait(0.005) or ticket.is_cancelled):
                if time.monotonic() > ends_at:
                    ticket.future.set_exception(DeadlineExceeded("not done in time"))
                    return
            if ticket.is_cancelled:
                ticket.future.set_exception(CancelledError())
                return
            if self.fault is not None and number == 1:
                ticket.future.set_exception(self.fault)
                return
            top = ((1, "a", -0.25), (2, "b", float("-inf")))[: sampling.top_logprobs or 0]
            said.append(TokenLogprob(number, piece, -0.5 - len(self.tickets) % 7, top))
            shown = () if sampling.top_logprobs is None else (said[-1],)
            listener(Delta(piece, (number,), shown))
        ticket.future.set_result(answer(said, sampling, len(prompt), len(self.pieces)))


def answer(
    said: Sequence[TokenLogprob], sampling: Sampling, num_prompt: int, num_pieces: int
) -> Completion:
    spans = (SpanReport(Span(0, 4), MatchKind.EXACT), SpanReport(Span(4, 6), MatchKind.MISS))
    return Completion(
        text="".join(each.text for each in said),
        token_ids=tuple(each.token for each in said),
        finish_reason="stop" if len(said) == num_pieces else "length",
        prompt_tokens=num_prompt,
        cached_tokens=4,
        reuse=ReuseReport(spans),
        phases=Phases(queue=0.002),
        logprobs=() if sampling.top_logprobs is None else tuple(said),
    )


class FakeTelemetry:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def observe(self, record: Any) -> None:
        self.records.append(record)

    def summary(self) -> dict[str, Any]:
        return {"per_s": 1.0}

    def render(self) -> tuple[bytes, str]:
        return b"up 1\n", "text/plain; version=1"


class FakeGrammars:
    """Grammars are what they were made of."""

    def json_schema(self, schema: Any) -> Any:
        if schema == {"type": "impossible"}:
            raise ConfigError("schema cannot be compiled: type 'impossible'")
        return ("schema", schema)

    def tool_call(self, tools: Any, name: str | None) -> Any:
        return ("tool", [tool["function"]["name"] for tool in tools], name)


class Stand:
    """An application with all of its fakes."""

    def __init__(self, keys: Sequence[dict[str, Any]] = (), clock: Any = None, **options: Any):
        self.engine, self.telemetry = FakeEngine(), FakeTelemetry()
        self.options = ServerOptions(**{"model": "models/fake"} | options)
        ring = KeyRing(keys) if clock is None else KeyRing(keys, clock)
        self.app = make_app(
            self.engine, self.options, self.telemetry, FakeGrammars(), model=MODEL, keys=ring
        )

    @contextmanager
    def listening(self) -> Iterator[str]:
        """The URL of a real server; ends as after SIGTERM."""
        bound = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            self.app,
            http=protocol(Limits.of(self.options)),
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=int(self.options.drain_s) + 1,
        )
        self.server = DrainingServer(
            config,
            self.app.state.running,
            self.options.drain_s,
            greeting="",
            close=self.engine.close,
        )
        thread = threading.Thread(target=self.server.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            self.engine.steps.set()
            self.server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()

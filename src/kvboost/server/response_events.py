"""Replies in the format of OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.engine.results import Completion, Delta
from kvboost.server.replies import ChatReply, Json, event
from kvboost.server.responses import ResponsesBody


class ResponseReply(ChatReply):
    """The shape of /v1/responses: items that grow by the choices of a chat."""

    def __init__(self, model: str, body: ResponsesBody) -> None:
        super().__init__(model, body.chat)
        self._head = _head(model, body)
        self._status = "in_progress"
        self._output: list[Json] = []  # items that are complete
        self._message: Json | None = None  # the item that is being written
        self._num_events = 0

    def whole(self, kept: Sequence[tuple[int, Completion]], account: Json) -> Json:
        """What the last event of a stream would hold."""
        ((index, answer),) = kept
        pieces = self.piece(index, Delta(answer.text, answer.token_ids))
        for choice in (*pieces, *self.ending(index, answer)):
            list(self._take(choice))
        return self._response(account)

    def begin(self, num_answers: int) -> Iterator[bytes]:
        """An empty response, twice as OpenAI has it."""
        for kind in ("created", "in_progress"):
            yield _sent(self._event(kind, response=self._response()))

    def events(self, choice: Json) -> Iterator[bytes]:
        """The steps by which items grow."""
        return map(_sent, self._take(choice))

    def end(self, account: Json) -> Iterator[bytes]:
        """The whole response."""
        yield _sent(self._event(self._status, response=self._response(account)))

    def fail(self, error: Json) -> bytes:
        """The response so far, and what went wrong."""
        self._status = "failed"
        shown = {"code": "server_error", "message": error["error"]["message"]}
        return _sent(self._event("failed", response={**self._response(), "error": shown}))

    def _take(self, choice: Json) -> Iterator[Json]:
        delta, reason = choice["delta"], choice["finish_reason"]
        if delta.get("content"):
            yield from self._write(delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._close("completed")
            yield from self._call(call)
        if reason is not None:
            self._status = "incomplete" if reason == "length" else "completed"
            if not self._output:  # an answer without a word is an empty message
                yield from self._open()
            yield from self._close(self._status)

    def _open(self) -> Iterator[Json]:
        if self._message is None:
            self._message = {
                "id": _id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            yield self._event("output_item.added", item=self._message)
            part = _part()
            yield self._event("content_part.added", **self._place, content_index=0, part=part)
            self._message["content"].append(part)

    def _write(self, text: str) -> Iterator[Json]:
        yield from self._open()
        assert self._message is not None
        self._message["content"][0]["text"] += text
        place = {**self._place, "content_index": 0}
        yield self._event("output_text.delta", **place, delta=text, logprobs=[])

    def _close(self, status: str) -> Iterator[Json]:
        if self._message is None:
            return
        item = {**self._message, "status": status}
        (part,) = item["content"]
        place = {**self._place, "content_index": 0}
        yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
        yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", item=item)
        self._output.append(item)
        self._message = None

    def _call(self, call: Json) -> Iterator[Json]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": name,
            "arguments": "",
        }
        yield self._event("output_item.added", item=item)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        whole = {**place, "name": name, "arguments": arguments}
        yield self._event("function_call_arguments.done", **whole)
        item = {**item, "status": "completed", "arguments": arguments}
        yield self._event("output_item.done", item=item)
        self._output.append(item)

    @property
    def _place(self) -> Json:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self._output)}

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        if "item" in fields:
            fields["output_index"] = len(self._output)
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _response(self, account: Json | None = None) -> Json:
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": None if account is None else _usage(account["usage"]),
            "kvboost": None if account is None else account["kvboost"],
        }


def _head(model: str, body: ResponsesBody) -> Json:
    """The fields that a response repeats from its request."""
    given = body.text.format if body.text else None
    effort = body.reasoning.effort if body.reasoning else None
    choice = body.tool_choice or "auto"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": given.model_dump(by_alias=True) if given else {"type": "text"}},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }


def _usage(usage: Json) -> Json:
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        # What a request adds to the cache is not counted by request.
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _part() -> Json:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _sent(data: Json) -> bytes:
    return event(data, data["type"])


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

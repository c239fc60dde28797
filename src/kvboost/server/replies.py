"""Replies in OpenAI's formats, whole or streamed."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.core import MatchKind
from kvboost.engine.results import Completion, Delta, TokenLogprob
from kvboost.server.bodies import ChatBody, CompletionBody
from kvboost.server.tools import ToolCall, ToolReader

Json = dict[str, Any]
PART = "\N{REPLACEMENT CHARACTER}"  # what tokenizers make of a part of a character
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have


class Reply(ABC):
    """The response to one request, whole or as the events of a stream; answers are its choices."""

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(self, model: str, *, has_usage: bool) -> None:
        """`has_usage` says that a stream ends with the usage."""
        self.model = model
        self._has_usage = has_usage
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, kept: Sequence[tuple[int, Completion]], account: Json) -> Json:
        """The response; `kept` are the answers with their numbers, `account` is what ends it."""
        choices = [self.choice(index, answer) for index, answer in kept]
        return {**self._head, "object": self.kind, "choices": choices, **account}

    def begin(self, num_answers: int) -> Iterator[bytes]:
        """The first events of a stream."""
        for choice in self.opening(num_answers):
            yield from self.events(choice)

    def events(self, choice: Json) -> Iterator[bytes]:
        """The events of a choice: one chunk."""
        yield self._chunk([choice], **({"usage": None} if self._has_usage else {}))

    def end(self, account: Json) -> Iterator[bytes]:
        """The last events of a stream: the usage, if requested, and the end mark."""
        if self._has_usage:
            yield self._chunk([], **account)
        yield DONE

    def fail(self, error: Json) -> bytes:
        """The event that ends a stream with OpenAI's error body, without an end mark."""
        return event(error, "error")

    def finish_reason(self, index: int, answer: Completion) -> str:
        """Why an answer ended, in OpenAI's words."""
        return answer.finish_reason

    @abstractmethod
    def opening(self, num_answers: int) -> Iterator[Json]:
        """The start of a stream, as choices."""

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> Iterator[Json]:
        """New output of an answer, as choices."""

    @abstractmethod
    def ending(self, index: int, answer: Completion) -> Iterator[Json]:
        """The end of an answer, as choices."""

    @abstractmethod
    def choice(self, index: int, answer: Completion) -> Json:
        """A whole answer."""

    def _chunk(self, choices: list[Json], **more: Any) -> bytes:
        return event({**self._head, "object": self.chunk_kind, "choices": choices, **more})


class CompletionReply(Reply):
    """The shape of /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, model: str, body: CompletionBody, echoes: Sequence[str]) -> None:
        """`echoes` is what comes before each answer."""
        super().__init__(model, has_usage=body.has_usage)
        self._echoes = echoes
        self._has_logprobs = body.logprobs is not None
        self._said = [len(echo) for echo in echoes]  # characters sent of each answer

    def opening(self, num_answers: int) -> Iterator[Json]:
        """The prompts, where they are to be echoed."""
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._choice(index, echo, (), None)

    def choice(self, index: int, answer: Completion) -> Json:
        """A whole answer."""
        text = self._echoes[index] + answer.text
        return self._choice(index, text, answer.logprobs, answer.finish_reason)

    def piece(self, index: int, delta: Delta) -> Iterator[Json]:
        """New text."""
        if delta.text or delta.logprobs:
            yield self._choice(index, delta.text, delta.logprobs, None)

    def ending(self, index: int, answer: Completion) -> Iterator[Json]:
        """No text, and the reason."""
        yield self._choice(index, "", (), answer.finish_reason)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> Json:
        shown = None
        if self._has_logprobs and (logprobs or text):
            offsets = []
            for each in logprobs:
                offsets.append(self._said[index])
                self._said[index] += len(each.text)
            shown = {
                "tokens": [each.text for each in logprobs],
                "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in logprobs],
                "top_logprobs": [
                    {
                        text: max(logprob, LEAST_LOGPROB)
                        for _, text, logprob in (*each.top, (each.token, each.text, each.logprob))
                    }
                    for each in logprobs
                ],
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


class ChatReply(Reply):
    """The shape of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, model: str, body: ChatBody) -> None:
        super().__init__(model, has_usage=body.has_usage)
        self._has_logprobs = bool(body.logprobs)
        self._has_tools = bool(body.active_tools)
        self._is_parallel = body.parallel_tool_calls is not False
        self._readers: dict[int, ToolReader] = {}
        self._num_calls: dict[int, int] = {}
        self._num_told: dict[int, int] = {}  # calls, of a stream

    def opening(self, num_answers: int) -> Iterator[Json]:
        """The role of the speaker."""
        for index in range(num_answers):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def choice(self, index: int, answer: Completion) -> Json:
        """A whole answer."""
        found = [*self._read(index, answer.text), *self._rest(index)]
        text = "".join(each for each in found if isinstance(each, str))
        calls = [_call(each) for each in found if isinstance(each, ToolCall)]
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": self.finish_reason(index, answer),
        }

    def piece(self, index: int, delta: Delta) -> Iterator[Json]:
        """New text, and calls that are complete."""
        found = self._read(index, delta.text)
        if not found and delta.logprobs:
            found = [""]
        for number, each in enumerate(found):
            logprobs = self._logprobs(delta.logprobs) if number == 0 else None
            yield self._said(index, each, logprobs)

    def ending(self, index: int, answer: Completion) -> Iterator[Json]:
        """The text held back, and the reason."""
        for each in self._rest(index):
            yield self._said(index, each, None)
        yield self._delta(index, {}, self.finish_reason(index, answer))

    def finish_reason(self, index: int, answer: Completion) -> str:
        """`tool_calls` where there are some."""
        return "tool_calls" if self._num_calls.get(index) else answer.finish_reason

    def _read(self, index: int, text: str) -> list[str | ToolCall]:
        if not self._has_tools:
            return [text] if text else []
        reader = self._readers.setdefault(index, ToolReader())
        return self._counted(index, reader.feed(text))

    def _rest(self, index: int) -> list[str | ToolCall]:
        reader = self._readers.pop(index, None)
        return [] if reader is None else self._counted(index, reader.finish())

    def _counted(self, index: int, found: Sequence[str | ToolCall]) -> list[str | ToolCall]:
        kept: list[str | ToolCall] = []
        for each in found:
            if isinstance(each, ToolCall):
                if self._num_calls.get(index) and not self._is_parallel:
                    continue
                self._num_calls[index] = self._num_calls.get(index, 0) + 1
            kept.append(each)
        return kept

    def _said(self, index: int, said: str | ToolCall, logprobs: Json | None) -> Json:
        if isinstance(said, str):
            return {**self._delta(index, {"content": said}), "logprobs": logprobs}
        call = {"index": self._num_told.setdefault(index, 0), **_call(said)}
        self._num_told[index] += 1
        return {**self._delta(index, {"tool_calls": [call]}), "logprobs": logprobs}

    def _delta(self, index: int, delta: Json, reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not self._has_logprobs:
            return None
        content = [
            {
                **_likely(each.text, each.logprob),
                "top_logprobs": [_likely(text, logprob) for _, text, logprob in each.top],
            }
            for each in logprobs
        ]
        return {"content": content, "refusal": None}


def event(data: Json, name: str = "") -> bytes:
    """Data as a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def account(
    firsts: Sequence[Completion],
    answers: Sequence[Completion],
    document_orders: Sequence[Sequence[int]],
) -> Json:
    """Usage and the report of reuse; `firsts` are the first answers to each prompt."""
    reports = [_report(each) for each in firsts]
    for report, order in zip(reports, document_orders, strict=True):
        report["document_order"] = list(order) or None
    prompt_tokens = sum(each.prompt_tokens for each in firsts)
    new_tokens = sum(len(each.token_ids) for each in answers)
    cached_tokens = sum(each.cached_tokens for each in firsts)
    return {
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
        "kvboost": {"prompts": reports},
    }


def headers(firsts: Sequence[Completion]) -> dict[str, str]:
    """The report of reuse in short."""
    counts = {
        "Cached": sum(each.cached_tokens for each in firsts),
        "Exact": sum(each.reuse.tokens(MatchKind.EXACT) for each in firsts),
        "Moved": sum(each.reuse.tokens(MatchKind.MOVED) for each in firsts),
        "Repaired": sum(each.reuse.repaired_tokens for each in firsts),
    }
    shown = {f"X-KVBoost-{name}-Tokens": str(count) for name, count in counts.items()}
    queue_ms = 1e3 * max(each.phases.queue for each in firsts)
    return {**shown, "X-KVBoost-Queue-Ms": f"{queue_ms:.1f}"}


def _report(answer: Completion) -> Json:
    reuse, phases = answer.reuse, answer.phases
    report: Json = {"cached_tokens": answer.cached_tokens}
    for kind in MatchKind:
        report[f"{kind.value}_tokens"] = reuse.tokens(kind)
        report[f"{kind.value}_spans"] = sum(each.kind is kind for each in reuse.spans)
    report["repaired_tokens"] = reuse.repaired_tokens
    for name in ("predicted_ms", "full_ms", "actual_ms"):
        value = getattr(reuse, name)
        report[name] = None if value is None else round(value, 3)
    for name in ("queue", "lookup", "load", "prefill", "decode"):
        report[f"{name}_ms"] = round(1e3 * getattr(phases, name), 3)
    return {**report, "note": reuse.note}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _likely(text: str, logprob: float) -> Json:
    # Null, as OpenAI has it, where a token is a part of a character: its bytes are not known here.
    token_bytes = None if PART in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": token_bytes}

"""What the OpenAPI document says of responses. Nothing is made from it: tests hold us to it."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from kvboost.engine.results import WarmResult

Reason = Literal["stop", "length", "tool_calls"]


class Documented(BaseModel):
    """A part of a response; there are no fields besides those that are named."""

    model_config = ConfigDict(extra="forbid")


class Error(Documented):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Documented):
    """OpenAI's error body."""

    error: Error


class Status(Documented):
    """How the server is."""

    status: str


class ModelCard(Documented):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | None


class ModelList(Documented):
    """The models."""

    object: Literal["list"]
    data: list[ModelCard]


class PromptDetails(Documented):
    """What became of the prompt tokens."""

    cached_tokens: int


class Usage(Documented):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Reuse(Documented):
    """What was reused for one prompt, and times."""

    cached_tokens: int
    exact_tokens: int
    exact_spans: int
    moved_tokens: int
    moved_spans: int
    miss_tokens: int
    miss_spans: int
    repaired_tokens: int
    predicted_ms: float | None
    full_ms: float | None
    actual_ms: float | None
    queue_ms: float
    lookup_ms: float
    load_ms: float
    prefill_ms: float
    decode_ms: float
    note: str


class Reuses(Documented):
    """What was reused, for each prompt."""

    prompts: list[Reuse]


class Completion(Documented):
    """The part that both kinds of answers share."""

    id: str
    created: int
    model: str
    usage: Usage
    kvboost: Reuses


class TextLogprobs(Documented):
    """Tokens of a text, how likely they were, and where they stand."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Documented):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class TextCompletion(Completion):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Likely(Documented):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class Said(Likely):
    """A token that came, and what else could have come."""

    top_logprobs: list[Likely]


class ChatLogprobs(Documented):
    """How likely the tokens of a message were."""

    content: list[Said]
    refusal: None


class CalledFunction(Documented):
    """A function and what it is to be called with, as JSON."""

    name: str
    arguments: str


class ToolCall(Documented):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Documented):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Documented):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(Completion):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Stats(Documented):
    """The batch, the cache and the requests of the last minute."""

    model: str
    version: str
    requests: dict[str, Any]
    batch: dict[str, Any]
    engine: dict[str, Any]


class Chunk(Documented):
    """A stored chunk."""

    key: str
    kind: str
    num_tokens: int
    position: int
    is_in_memory: bool
    text: str


class Chunks(Documented):
    """Stored chunks."""

    object: Literal["list"]
    data: list[Chunk]


class Pinned(Documented):
    """How many chunks were pinned."""

    num_pinned: int


class Deleted(Documented):
    """How many chunks were deleted, and the tiers in which some bytes are still to go."""

    num_deleted: int
    pending: list[str]


SUCCESSES: dict[str, Any] = {
    "/health": Status,
    "/ready": Status,
    "/v1/models": ModelList,
    "/v1/models/{name:path}": ModelCard,
    "/v1/completions": TextCompletion,
    "/v1/chat/completions": ChatCompletion,
    "/metrics": str,
    "/v1/stats": Stats,
    "/v1/warm": WarmResult,
    "/v1/cache": Chunks,
    "/v1/cache/pin": Pinned,
    "/v1/cache/delete": Deleted,
}
STATUSES = {
    400: "a parameter is wrong or cannot be applied",
    401: "no API key, or a wrong one",
    403: "the API key is not an administrator's, or the host name is not this machine's",
    404: "no such path or model",
    405: "no such method",
    413: "the body is too large",
    429: "over the limits of the API key",
    500: "a fault of the server",
    503: "the queue is full, or the server shuts down",
    504: "not done within the deadline",
}
STREAMS = ("/v1/completions", "/v1/chat/completions")
EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["message", "error"]},
        "data": {"type": "string", "description": "a chunk or an error as JSON, or [DONE]"},
    },
    "required": ["data"],
}


def responses(path: str) -> dict[int | str, dict[str, Any]]:
    """What a path answers with."""
    told: dict[int | str, dict[str, Any]] = {200: {"model": SUCCESSES[path]}}
    if path in STREAMS:
        told[200]["content"] = {"text/event-stream": {"itemSchema": EVENT}}  # with stream=true
    for status, text in STATUSES.items():
        told[status] = {"model": ErrorBody, "description": text}
    told["default"] = {"description": "keeps FastAPI's own 422 out"}
    return told


class DocumentedApp(FastAPI):
    """An application whose document names every status: there is no "default" for the rest."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("default", None)
        return document

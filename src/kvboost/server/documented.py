"""What the OpenAPI document says of responses. Tests compare it with what the server sends."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from kvboost.engine.results import WarmResult

Reason = Literal["stop", "length", "tool_calls"]


class Documented(BaseModel):
    """A part of a response, with all of its fields."""

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
    """The state of the server."""

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
    """How many prompt tokens came from the cache."""

    cached_tokens: int


class Usage(Documented):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Reuse(Documented):
    """What was reused for one prompt, and where the time went."""

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
    document_order: list[int] | None


class Reuses(Documented):
    """What was reused, for each prompt."""

    prompts: list[Reuse]


class Completion(Documented):
    """What both kinds of completions share."""

    id: str
    created: int
    model: str
    usage: Usage
    kvboost: Reuses


class TextLogprobs(Documented):
    """Tokens of a text with log probabilities and offsets."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Documented):
    """One completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class TextCompletion(Completion):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Likely(Documented):
    """A possible token."""

    token: str
    logprob: float
    bytes: list[int] | None


class Said(Likely):
    """An output token and its alternatives."""

    top_logprobs: list[Likely]


class ChatLogprobs(Documented):
    """Log probabilities of a message's tokens."""

    content: list[Said]
    refusal: None


class CalledFunction(Documented):
    """A function and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Documented):
    """A function call by the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Documented):
    """The model's message."""

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


class OutputText(Documented):
    """Text of the model's message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Documented):
    """A message as an output item."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(Documented):
    """A function call as an output item."""

    type: Literal["function_call"]
    id: str
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class InputDetails(Documented):
    """How many input tokens came from the cache; writes are not counted by request."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(Documented):
    """Reasoning is part of the text and not counted by itself."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Documented):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Documented):
    """Why a response failed; in a stream only."""

    code: str
    message: str


class Incomplete(Documented):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(Documented):
    """The answer of /v1/responses, with what its request asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None
    kvboost: Reuses | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    truncation: Literal["disabled"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None


class Tokens(Documented):
    """The tokens of a prompt or a chat."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Documented):
    """The text of tokens."""

    prompt: str


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
    """How many chunks were deleted, and the tiers with deletions still pending."""

    num_deleted: int
    pending: list[str]


SUCCESSES: dict[str, Any] = {
    "/": str,
    "/health": Status,
    "/ready": Status,
    "/v1/models": ModelList,
    "/v1/models/{name:path}": ModelCard,
    "/v1/completions": TextCompletion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": Response,
    "/tokenize": Tokens,
    "/detokenize": Detokenized,
    "/metrics": str,
    "/v1/stats": Stats,
    "/v1/warm": WarmResult,
    "/v1/cache": Chunks,
    "/v1/cache/pin": Pinned,
    "/v1/cache/delete": Deleted,
}
STATUSES = {
    400: "a parameter is invalid or not supported",
    401: "the API key is missing or invalid",
    403: "the path needs an admin API key, or a server without keys was called from elsewhere",
    404: "no such path or model",
    405: "the path has no such method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the body is not said to be JSON",
    429: "over the rate limit of the API key",
    431: "the head of the request is too large",
    500: "internal error",
    503: "the queue is full, or the server is shutting down",
    504: "the deadline has passed",
}
CHUNK = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["message", "error"]},
        "data": {"type": "string", "description": "a chunk or an error as JSON, or `[DONE]`"},
    },
    "required": ["data"],
}
EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "pattern": "^response[.]"},
        "data": {"type": "string", "description": "an event of OpenAI's Responses API as JSON"},
    },
    "required": ["event", "data"],
}
STREAMS = {"/v1/completions": CHUNK, "/v1/chat/completions": CHUNK, "/v1/responses": EVENT}


def responses(path: str) -> dict[int | str, dict[str, Any]]:
    """What a path answers with."""
    told: dict[int | str, dict[str, Any]] = {200: {"model": SUCCESSES[path]}}
    if path in STREAMS:
        told[200]["content"] = {"text/event-stream": {"itemSchema": STREAMS[path]}}
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

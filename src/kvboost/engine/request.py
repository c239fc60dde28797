"""A request as the engine sees it: tokens, arguments, and what it may reuse."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

from kvboost.build import Parts
from kvboost.config import check_reuse, option_names
from kvboost.core import ReuseMode
from kvboost.engine.prefill import Prefetched, Terms
from kvboost.engine.results import GenerationMode
from kvboost.errors import ConfigError
from kvboost.models.adapters import Adapter
from kvboost.models.hf import HFModel

log = logging.getLogger(__name__)

DocumentOrder: TypeAlias = Literal["given", "any"]

DEFAULT_NEW_TOKENS = 64
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # in the order of messages
REFUSED = {
    "attention_mask": "prompts are not padded",
    "cache_implementation": "KVBoost brings its own cache",
    "input_ids": "the prompt is the first argument",
    "inputs": "the prompt is the first argument",
    "inputs_embeds": "reuse needs token ids",
    "past_key_values": "KVBoost brings its own cache",
    "position_ids": "rows of a prompt have the positions of its tokens",
    "token_healing": "it changes the prompt after the lookup",
}


@dataclass(frozen=True)
class Request:
    """What to generate from. `started_at` is the caller's clock: when the call came in."""

    tokens: list[int]
    reuse: ReuseMode
    tenant: str
    adapter: Adapter
    arguments: dict[str, Any]  # for Transformers' generate()
    started_at: float = field(default_factory=time.perf_counter)
    ready_at: float = field(default_factory=time.perf_counter)  # when its tokens were there
    loading: Future[Prefetched] | None = None  # the prompt's chunks in tiers below memory
    cancelled: threading.Event = field(default_factory=threading.Event)
    document_order: tuple[int, ...] = ()  # of arranged documents

    @property
    def brought(self) -> Prefetched | None:
        """What was loaded for it; None if nothing was requested or loading failed."""
        if self.loading is None:
            return None
        try:
            return self.loading.result()
        except Exception:
            log.exception("loading stored K/V failed; computing the prompt instead")
            return None

    def stop_loading(self) -> None:
        """Release what was loaded."""
        if self.loading is None or self.loading.cancel() or not self.loading.done():
            return
        if self.loading.exception() is None:
            self.loading.result().release()


class CallArguments(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `chat`, for type checkers and editors.

    Any other argument of Transformers' `generate()` works too; for a type checker, pass it in
    `generation_config`.
    """

    documents: Sequence[str]
    order: DocumentOrder
    mode: GenerationMode | None
    reuse: ReuseMode | None
    tenant: str
    adapter: str | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    num_beams: int
    num_return_sequences: int
    min_new_tokens: int
    max_length: int
    stop_strings: str | list[str]
    eos_token_id: int | list[int]
    pad_token_id: int
    generation_config: Any
    logits_processor: Any
    stopping_criteria: Any
    prefix_allowed_tokens_fn: Any
    assistant_model: Any
    prompt_lookup_num_tokens: int


def check_arguments(
    arguments: dict[str, Any], max_new_tokens: int | None, model: HFModel
) -> dict[str, Any]:
    """Arguments for Transformers' generate(), with our defaults.

    Raises:
        ConfigError: one that a request cannot have.
    """
    for name, reason in REFUSED.items():
        if name in arguments or (name == "token_healing" and model.setting(name, arguments)):
            raise ConfigError(f"{name!r} cannot be used: {reason}")
    for name in option_names():
        if name in arguments:
            raise ConfigError(f"{name!r} is an option of the engine, not of a request")
    if max_new_tokens is not None:
        arguments["max_new_tokens"] = max_new_tokens
    _decide_sampling(arguments)
    if "generation_config" not in arguments:
        arguments.setdefault("do_sample", False)
        if "max_length" not in arguments:
            arguments.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    return arguments


def _decide_sampling(arguments: dict[str, Any]) -> None:
    """Sample where an argument asks for it: Transformers would ignore it without `do_sample`."""
    given = {name: arguments[name] for name in SAMPLING if arguments.get(name) is not None}
    if not given:
        return
    samples, wanted = given.get("temperature") != 0, arguments.get("do_sample")
    if wanted is not None and wanted is not samples:
        name, value = next(iter(given.items()))
        meaning = "samples" if samples else "is greedy"
        raise ConfigError(f"do_sample={wanted} and {name}={value}, which {meaning}: give one")
    arguments["do_sample"] = samples
    if not samples:
        for name in given:
            del arguments[name]


def chosen_reuse(
    mode: GenerationMode | None, reuse: ReuseMode | None, default: ReuseMode
) -> ReuseMode:
    """The reuse mode, given under either of its two names."""
    if mode is not None and reuse is not None:
        raise ConfigError(f"mode={mode} and reuse={reuse!r} mean the same: give one")
    return check_reuse((mode.reuse if mode is not None else reuse) or default)


def reuse_refusal(request: Request, model: HFModel, num_tokens: int) -> str:
    """Why this request must not use the store, or an empty string."""
    if model.refusal:
        return model.refusal
    if request.reuse == "off":
        return "reuse is off"
    if model.is_alone(num_tokens):
        return (
            f"the rotary embedding changes beyond {model.position_limit} positions and "
            f"this request may reach {num_tokens}"
        )
    return ""


def terms_of(request: Request, parts: Parts, *, is_refused: bool) -> tuple[Terms, str]:
    """What the request may reuse, and a note of the guardrail."""
    if is_refused:
        return Terms("off", request.tenant), ""
    if request.reuse != "auto":
        return Terms(request.reuse, request.tenant), ""
    if not parts.model.rotations:
        return Terms("exact", request.tenant), parts.model.rotation_refusal
    allowed = parts.guard.terms(parts.workload(request.tenant))
    if not allowed.allows_moved:
        return Terms("exact", request.tenant), allowed.note
    return Terms("auto", request.tenant, allowed.ratio), allowed.note

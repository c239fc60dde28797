"""One request, as the engine sees it: tokens, limits, and how to tell the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kvboost.config import check_reuse, option_names
from kvboost.core import ReuseMode
from kvboost.engine.prefill import Frames
from kvboost.engine.results import GenerationMode
from kvboost.errors import ConfigError
from kvboost.models.adapters import Adapter

log = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 64
REFUSED = {
    "attention_mask": "a prompt has no padding here",
    "cache_implementation": "KVBoost brings its own cache",
    "input_ids": "the prompt is the first argument",
    "inputs": "the prompt is the first argument",
    "inputs_embeds": "K/V is found by token ids",
    "past_key_values": "KVBoost brings its own cache",
    "token_healing": "it changes the prompt after its K/V was found",
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
    emit: Callable[[str], None] | None = None  # gets the text as it comes
    loading: Future[Frames] | None = None  # of what tiers below memory have of the prompt
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def brought(self) -> Frames | None:
        """The frames that were loaded for it; None: nothing was asked for."""
        if self.loading is None:
            return None
        try:
            return self.loading.result()
        except Exception:
            log.exception("loading failed, going on without")
            return {}

    def stop_loading(self) -> None:
        """Let go of what was loaded: files stay mapped until then."""
        if self.loading is None or self.loading.cancel() or not self.loading.done():
            return
        if self.loading.exception() is None:
            self.loading.result().clear()

    def streamed(self, emit: Callable[[str], None], cancelled: threading.Event) -> Request:
        """The same request with a listener and a way to stop it."""
        return replace(self, emit=emit, cancelled=cancelled)


def check_arguments(arguments: dict[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """Arguments for Transformers' generate(), with our defaults.

    Raises:
        ConfigError: one that a request cannot have.
    """
    for name, reason in REFUSED.items():
        if name in arguments:
            raise ConfigError(f"{name!r} cannot be given: {reason}")
    for name in option_names():
        if name in arguments:
            raise ConfigError(f"{name!r} is set when the engine is made, not per request")
    if max_new_tokens is not None:
        arguments["max_new_tokens"] = max_new_tokens
    if "generation_config" not in arguments:
        arguments.setdefault("do_sample", False)
        if "max_length" not in arguments:
            arguments.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    return arguments


def chosen_reuse(
    mode: GenerationMode | None, reuse: ReuseMode | None, default: ReuseMode
) -> ReuseMode:
    """What a request may reuse, by either of the two names for it."""
    if mode is not None and reuse is not None:
        raise ConfigError(f"mode={mode} and reuse={reuse!r} say the same: give one")
    return check_reuse((mode.reuse if mode is not None else reuse) or default)

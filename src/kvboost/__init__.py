"""KVBoost: language models that do not read again what they have read before.

An engine is a Transformers model with a store of the K/V that it has computed. What a prompt has in
common with an earlier one is taken from there, and only the rest is computed:

    >>> from kvboost import KVBoost
    >>> engine = KVBoost.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")  # or a folder
    >>> manual = 8 * " In winter the pump is kept in the cellar."
    >>> warmed = engine.warm(manual)  # before it is needed; or nothing, prompts are kept as well
    >>> result = engine.generate(manual + " Where is the pump?", max_new_tokens=8)
    >>> result.cached_tokens, result.prompt_tokens
    (88, 93)

Where each part of the prompt came from, what it took and what was expected:

    >>> print(result.reuse)
    88 tokens exact, 0 moved (0 of them computed again), 5 computed, predicted ...

`explain` says so without running the model, and `verify_correctness` checks on your own prompts
that answers stay the same. With `reuse="auto"`, for an engine or a call, text is also found at
other places than before: that is approximate, and measured.

The same as a stream, as a conversation, and for several prompts together:

    >>> "".join(engine.stream("The capital of France is", max_new_tokens=2))
    ' Paris.'
    >>> reply = engine.chat([{"role": "user", "content": "Who are you?"}], max_new_tokens=8)
    >>> prompts = ["The capital of France is", "The capital of Italy is"]
    >>> [each.output_text for each in engine.generate_batch(prompts, max_new_tokens=2)]
    [' Paris.', ' Rome.']

How likely the model finds continuations of a prompt:

    >>> paris, rome = engine.score("The capital of France is", [" Paris", " Rome"]).scores
    >>> paris.logprob > rome.logprob
    True
    >>> engine.close()

What there is by name:

- `KVBoost` is the engine, `CPUPagedEngine` the same with running requests in a pool of fixed size.
- `GenerationResult`, `ReuseReport`, `TextStream`, `WarmResult` and `CorrectnessReport` are what its
  calls return.
- `Sampling` says how `submit` chooses tokens, `GenerationMode` has other names for `reuse`.
- `KVBoostError` is the base of `ConfigError`, `UnsupportedModel` and `CacheError`.
- `get_flash_attn_tier`, `flash_attention_available`, `install_flash_attention` and
  `uninstall_flash_attention` give a model our attention without an engine.

`kvboost serve --model NAME` is a server with OpenAI's API on top of it, `kvboost --help` the rest
of the command line. `kvboost.config.Options` has all options.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.core import Sampling
    from kvboost.engine.engine import KVBoost
    from kvboost.engine.paged import CPUPagedEngine
    from kvboost.engine.results import (
        CorrectnessReport,
        GenerationMode,
        GenerationResult,
        ReuseReport,
        WarmResult,
    )
    from kvboost.engine.stream import TextStream
    from kvboost.errors import CacheError, ConfigError, KVBoostError, UnsupportedModel
    from kvboost.models.install import (
        flash_attention_available,
        get_flash_attn_tier,
        install_flash_attention,
        uninstall_flash_attention,
    )

__version__ = "0.1.0"

# Resolved on first use, so that `import kvboost` does not load torch.
_HOMES = {
    "KVBoost": "kvboost.engine.engine",
    "CPUPagedEngine": "kvboost.engine.paged",
    "CorrectnessReport": "kvboost.engine.results",
    "GenerationMode": "kvboost.engine.results",
    "GenerationResult": "kvboost.engine.results",
    "ReuseReport": "kvboost.engine.results",
    "Sampling": "kvboost.core",
    "WarmResult": "kvboost.engine.results",
    "TextStream": "kvboost.engine.stream",
    "CacheError": "kvboost.errors",
    "ConfigError": "kvboost.errors",
    "KVBoostError": "kvboost.errors",
    "UnsupportedModel": "kvboost.errors",
    "flash_attention_available": "kvboost.models.install",
    "get_flash_attn_tier": "kvboost.models.install",
    "install_flash_attention": "kvboost.models.install",
    "uninstall_flash_attention": "kvboost.models.install",
}

__all__ = [
    "CPUPagedEngine",
    "CacheError",
    "ConfigError",
    "CorrectnessReport",
    "GenerationMode",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "ReuseReport",
    "Sampling",
    "TextStream",
    "UnsupportedModel",
    "WarmResult",
    "flash_attention_available",
    "get_flash_attn_tier",
    "install_flash_attention",
    "uninstall_flash_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

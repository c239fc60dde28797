"""KVBoost: KV-cache reuse for Transformers models.

An engine is a Transformers model with a cache of the K/V it has computed. Text that a prompt shares
with earlier prompts comes from the cache, and only the rest is computed:

    >>> from kvboost import KVBoost
    >>> engine = KVBoost.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")  # or a folder
    >>> manual = 8 * " In winter the pump is kept in the cellar."
    >>> warmed = engine.warm(manual)  # optional: prompts are stored as well
    >>> result = engine.generate(manual + " Where is the pump?", max_new_tokens=8)
    >>> result.cached_tokens, result.prompt_tokens
    (88, 93)

The result reports what was reused and how long prefill took:

    >>> print(result.reuse)
    88 tokens exact, 0 moved (0 of them computed again), 5 computed, predicted ...

`explain` predicts this without running the model, and `verify_correctness` compares outputs with a
full prefill on your own prompts. With `reuse="auto"`, as an option or per request, moved text is
reused too: an approximation, checked by audits.

Streams, conversations and batches:

    >>> "".join(engine.stream("The capital of France is", max_new_tokens=2))
    ' Paris.'
    >>> reply = engine.chat([{"role": "user", "content": "Who are you?"}], max_new_tokens=8)
    >>> prompts = ["The capital of France is", "The capital of Italy is"]
    >>> [each.output_text for each in engine.generate_batch(prompts, max_new_tokens=2)]
    [' Paris.', ' Rome.']

Log probabilities of continuations:

    >>> paris, rome = engine.score("The capital of France is", [" Paris", " Rome"]).scores
    >>> paris.logprob > rome.logprob
    True
    >>> engine.close()

Public names:

- `KVBoost` is the engine; `CPUPagedEngine` keeps running requests in a block pool of fixed size.
- `GenerationResult`, `ReuseReport`, `TextStream`, `WarmResult` and `CorrectnessReport` are returned
  by its methods.
- `Sampling` configures `submit`; `GenerationMode` has alternative names for `reuse`.
- `KVBoostError` is the base class of `ConfigError`, `UnsupportedModel` and `CacheError`.
- `get_flash_attn_tier`, `flash_attention_available`, `install_flash_attention` and
  `uninstall_flash_attention` use KVBoost's attention without an engine.

`kvboost.config.Options` lists all options. `kvboost serve --model NAME` starts a server with the
OpenAI API; `kvboost --help` lists the other commands.
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

"""The exception tree.

KVBoostError
├── ConfigError        a wrong option or argument, with its name, value and what is allowed
├── UnsupportedModel   the model's K/V cannot be reused, with the reason
├── QueueFull          too many requests are waiting; try again later
├── DeadlineExceeded   a request was not done by its deadline
└── CacheError         a fault of the cache: counted as a miss, never fails a request
    └── TierUnavailable    a tier cannot be read or written now
"""


class KVBoostError(Exception):
    """Base class of KVBoost's own errors.

    Example:
        >>> from kvboost import KVBoostError
        >>> try:
        ...     engine.generate("")
        ... except KVBoostError as error:
        ...     print(error)
        the prompt is empty
    """


class ConfigError(KVBoostError, ValueError):
    """An option or argument is unknown or has a wrong value; also a ValueError.

    Example:
        >>> engine.generate("The capital of France is", adapter="tone")
        Traceback (most recent call last):
        kvboost.errors.ConfigError: unknown adapter 'tone' (none is loaded)
    """


class UnsupportedModel(KVBoostError):
    """The model's K/V cannot be reused correctly; raised when the engine is created.

    With `strict=False` the model runs without reuse instead.

    Example:
        A model with a recurrent state instead of K/V:

        >>> from kvboost import KVBoost, UnsupportedModel
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
        >>> try:
        ...     KVBoost(MambaForCausalLM(config), tokenizer)
        ... except UnsupportedModel as error:
        ...     print(error)
        MambaForCausalLM (mamba): layer 0 keeps a recurrent state, not K/V
    """


class QueueFull(KVBoostError):
    """Too many requests are waiting; try again later."""


class DeadlineExceeded(KVBoostError):
    """A request was not done by its deadline."""


class CacheError(KVBoostError):
    """A fault of the cache, counted as a miss; requests never fail with it.

    Raise it from your own tier or codec.

    Example:
        >>> from kvboost import CacheError
        >>> from kvboost.codecs.frame import read
        >>> try:
        ...     read(memoryview(b"not what was stored"))
        ... except CacheError as error:
        ...     print(error)
        19 bytes are not a frame
    """


class TierUnavailable(CacheError):
    """A tier cannot be read or written now."""


def missing_packages(what: str, packages: str) -> str:
    """What to say where packages of an extra are not installed.

    The extra itself is not named: on PyPI, this project's name is another project's.
    """
    return f"{what} needs packages that are not installed: pip install {packages}"


def reason_of(error: Exception) -> str:
    """An error as one line; with its type unless it is ours (`KeyError(4)` alone says "4")."""
    return str(error) if isinstance(error, KVBoostError) else f"{type(error).__name__}: {error}"

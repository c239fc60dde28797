"""The exception tree.

KVBoostError
├── ConfigError        a wrong option: the message shows its name, its value and what is allowed
├── UnsupportedModel   this model's K/V cannot be reused; the message says why
├── QueueFull          too many requests wait; try again later
├── DeadlineExceeded   a request was not done in the time that it had
└── CacheError         a cache fault: never fails a request, it becomes a miss and a counter
    └── TierUnavailable    a tier cannot be read or written now
"""


class KVBoostError(Exception):
    """Base of everything that KVBoost raises on purpose.

    Example:
        >>> from kvboost import KVBoostError
        >>> try:
        ...     engine.generate("")
        ... except KVBoostError as error:
        ...     print(error)
        the prompt is empty
    """


class ConfigError(KVBoostError, ValueError):
    """An option or argument has a wrong name or value; also a ValueError.

    Example:
        >>> engine.generate("The capital of France is", adapter="tone")
        Traceback (most recent call last):
        kvboost.errors.ConfigError: unknown adapter 'tone' (none is loaded)
    """


class UnsupportedModel(KVBoostError):
    """K/V reuse cannot be right for this model, so it is refused when the model is loaded.

    With `strict=False` such a model runs, without reuse.

    Example:
        A model that has a state instead of K/V:

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
    """Too many requests wait already; the same request may be taken later."""


class DeadlineExceeded(KVBoostError):
    """A request was not done in the time that its caller gave it."""


class CacheError(KVBoostError):
    """A fault of the cache; whoever asked treats it as a miss.

    Requests never end with it. A tier or codec of your own raises it.

    Example:
        >>> from kvboost import CacheError
        >>> from kvboost.codecs.frame import read
        >>> try:
        ...     read(memoryview(b"not what was stored"))
        ... except CacheError as error:
        ...     print(error)
        19 bytes are no frame
    """


class TierUnavailable(CacheError):
    """A tier cannot be read or written now."""


def missing_packages(what: str, packages: str) -> str:
    """What to say where packages of an extra are not installed.

    The extra itself is not named: on PyPI, this project's name is another project's.
    """
    return f"{what} needs packages that are not installed: pip install {packages}"


def reason_of(error: Exception) -> str:
    """An error in a line: ours say enough, of others the type counts (`KeyError(4)` says "4")."""
    return str(error) if isinstance(error, KVBoostError) else f"{type(error).__name__}: {error}"

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
    """Base of everything that KVBoost raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """An option has a wrong name or value."""


class UnsupportedModel(KVBoostError):
    """K/V reuse cannot be right for this model, so it is refused when the model is loaded."""


class QueueFull(KVBoostError):
    """Too many requests wait already; the same request may be taken later."""


class DeadlineExceeded(KVBoostError):
    """A request was not done in the time that its caller gave it."""


class CacheError(KVBoostError):
    """A fault of the cache; whoever asked treats it as a miss."""


class TierUnavailable(CacheError):
    """A tier cannot be read or written now."""

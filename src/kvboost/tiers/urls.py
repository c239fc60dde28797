"""URLs -> tiers below memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvboost.errors import ConfigError
from kvboost.tiers.address import split_url
from kvboost.tiers.base import Tier
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.sealed import SealedTier
from kvboost.tiers.stack import Opener

# Imported when they are asked for: their clients are extras.
SHARED = {
    "redis": ("kvboost.tiers.redis", "RedisTier"),
    "rediss": ("kvboost.tiers.redis", "RedisTier"),
    "unix": ("kvboost.tiers.redis", "RedisTier"),
    "mooncake": ("kvboost.tiers.mooncake", "MooncakeTier"),
}
SCHEMES = ("memory", "file", *SHARED)


def openers(
    urls: str,
    budget_bytes: int,
    timeout_s: float,
    largest_bytes: int,
    secret: str | None = None,
) -> list[Opener]:
    """An opener for each of the URLs, which are separated by blanks.

    `budget_bytes` is for disk tiers; `timeout_s` is for the sockets of shared ones,
    `largest_bytes`, of a frame, for what these may return, and `secret` for signing it.

    Raises:
        ConfigError: a URL is not understood.
    """
    found: list[Opener] = []
    for url in urls.split():
        scheme = split_url(url).scheme
        if url.partition("?")[0].count("://") > 1:
            raise ConfigError("cache_url: separate several URLs by spaces")
        if scheme == "file":
            found.append(Opener("disk", partial(DiskTier, folder_of(url), budget_bytes)))
        elif scheme in SHARED:
            name = SHARED[scheme][0].rpartition(".")[2]
            make = partial(_open_shared, url, timeout_s, largest_bytes, secret)
            found.append(Opener(name, make))
        elif url != "memory://":  # always the top tier
            raise ConfigError(
                f"cache_url: {scheme or url.split('@')[-1]!r} is not one of "
                f"{', '.join(f'{each}://' for each in SCHEMES)}"
            )
    names = [opener.name for opener in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"cache_url: expected each kind of tier once, got {', '.join(names)}")
    return found


def folder_of(url: str) -> Path:
    """The folder of a file:// URL; anything else is a folder already.

    Raises:
        ConfigError: the URL names a host.
    """
    parts = split_url(url)
    if parts.scheme != "file":
        if "://" in url:
            raise ConfigError(
                f"{parts.scheme}://... is not a folder: expected a path or file:///path"
            )
        return Path(url)
    if parts.query:
        raise ConfigError(f"file:// has no option {parts.query!r}; its budget is max_disk_bytes")
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url}: expected three slashes: file:///{parts.netloc}{parts.path}")
    return Path(unquote(parts.path))


def _open_shared(url: str, timeout_s: float, largest_bytes: int, secret: str | None) -> Tier:
    module, name = SHARED[split_url(url).scheme]
    tier: Callable[..., Any] = getattr(import_module(module), name)
    # Mooncake reads through a buffer of fixed size.
    limits = {"largest_bytes": largest_bytes} if name == "RedisTier" else {}
    opened = tier(url, timeout_s=timeout_s, **limits)
    assert isinstance(opened, Tier)
    return SealedTier(opened, secret) if secret else opened

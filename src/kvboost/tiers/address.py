"""URLs of shared tiers: their options, and a form without the password for messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from kvboost.errors import ConfigError


def split_url(url: str) -> SplitResult:
    """The parts of a URL.

    Raises:
        ConfigError: it is not one; the message has nothing of it, for it may hold a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # is a number that a port can have
    except ValueError:
        scheme = url.partition(":")[0]
        raise ConfigError(
            f"{scheme}://... is not a URL: special characters in a password must be escaped"
        ) from None
    return parts


def shown(url: str) -> str:
    """Scheme and host of a URL: what a message may show."""
    parts = split_url(url)
    # A password with an unescaped / ? or # ends the host too early: then show nothing of it.
    is_cut = "@" in parts.path + parts.query + parts.fragment
    return f"{parts.scheme}://{'...' if is_cut else parts.netloc.rpartition('@')[2] or parts.path}"


def take_options(
    url: str, parsers: Mapping[str, Callable[[str], Any]], passed_on: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """The URL without the options that `parsers` read, and their values.

    Raises:
        ConfigError: for a value that its parser refuses, and for options that nobody knows.
    """
    parts = split_url(url)
    taken, left = {}, []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in parsers:
            try:
                taken[name] = parsers[name](value)
            except ValueError as error:
                raise ConfigError(f"{name}={value} of {shown(url)}: {error}") from error
        elif name in passed_on:
            left.append((name, value))
        else:
            known = ", ".join([*parsers, *passed_on])
            raise ConfigError(f"{shown(url)} has no option {name!r}: expected one of {known}")
    bare = url.partition("?")[0]
    return f"{bare}?{urlencode(left)}" if left else bare, taken


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("expected a number of seconds above 0")
    return value


def size_bytes(text: str) -> int:
    """A number of bytes."""
    value = int(text)
    if value < 0:
        raise ValueError("expected a number of bytes")
    return value

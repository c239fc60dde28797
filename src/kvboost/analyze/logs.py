"""Reads logs of requests: hash traces in Mooncake's format, or bodies sent to an OpenAI server.

A prompt becomes names: of its blocks, each naming everything from the start, and of its pieces,
which are the same at any position. No text is kept.
"""

from __future__ import annotations

import gzip
import json
import math
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from xxhash import xxh64_intdigest

from kvboost.analyze.choices import BYTES_PER_TOKEN
from kvboost.errors import ConfigError
from kvboost.routing.anchors import SEPARATOR, located
from kvboost.routing.prompts import text_of

TRACE_BLOCK_TOKENS = 512  # of every hash trace that Mooncake published
TEXT_BLOCK_TOKENS = 128  # the engine's chunk_size by default
FEW_BROKEN = 3
BROKEN_RATIO = 0.01
STANDARD_INPUT = 0
READ_BYTES = 1 << 18
LATEST = 1e20  # of times, in whatever unit
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # ids count up from 0; names are spread over all numbers

Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A prompt, by the names of its parts."""

    at_s: float  # since the first request; never falls
    num_tokens: int
    blocks: Names  # each names all text from the start to its end
    block_tokens: int  # in each block but the last, which has the rest
    pieces: Names | None  # None: the log does not tell
    piece_tokens: npt.NDArray[np.float32] | None  # they sum to num_tokens


def read(
    path: Path | None,
    *,
    block_tokens: int | None = None,
    bytes_per_token: float = BYTES_PER_TOKEN,
    on_broken: Callable[[int, str], None] = lambda number, reason: None,
) -> Iterator[LoggedRequest]:
    """The requests of a log, one by one; `path=None` reads standard input.

    `block_tokens=None` takes 512 for hash traces and 128 for texts. `on_broken` is told the number
    of each line that is left out, and why.

    Raises:
        ConfigError: the first line cannot be read, or more than a few and 1 % of all.
    """
    parser = _Parser(block_tokens, bytes_per_token)
    num_lines = num_broken = 0
    with _opened(path) as stream:
        while lines := stream.readlines(READ_BYTES):
            quick = parser.parse_all(lines)
            if quick is not None:
                yield from quick
                num_lines += len(lines)
                continue
            for line in lines:
                num_lines += 1
                try:
                    if not line.isspace():
                        yield parser.parse(line)
                except (ValueError, RecursionError) as error:
                    num_broken += 1
                    _check(error, num_lines, num_broken, parser)
                    on_broken(num_lines, _reason(error))


def merged(blocks: Names, times: int) -> Names:
    """The names of larger blocks: each names all before its end, so the last one will do."""
    has_rest = len(blocks) % times != 0
    return np.concatenate([blocks[times - 1 :: times], blocks[len(blocks) - has_rest :]])


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO]:
    with open(path or STANDARD_INPUT, "rb", closefd=path is not None) as stream:
        try:
            is_packed = stream.peek(2)[:2] == b"\x1f\x8b"
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_packed else stream
        except (EOFError, zlib.error) as error:
            raise ConfigError(f"{path or 'standard input'}: damaged gzip file: {error}") from error


def _check(error: Exception, number: int, num_broken: int, parser: _Parser) -> None:
    """Raise if a broken line is one too many."""
    if isinstance(error, ConfigError):
        raise error
    if not parser.has_begun:
        raise ConfigError(f"line {number}: {_reason(error)}") from error
    if num_broken > max(FEW_BROKEN, BROKEN_RATIO * number):
        raise ConfigError(
            f"line {number}: {_reason(error)}; {num_broken} lines are broken, "
            f"more than {BROKEN_RATIO:.0%} so far"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return str(error)


class _Parser:
    """Turns lines into requests. The first one decides what kind of log it is."""

    def __init__(self, block_tokens: int | None, bytes_per_token: float) -> None:
        self._block_tokens = block_tokens
        self._bytes_per_token = bytes_per_token
        self._is_trace: bool | None = None
        self._first_s: float | None = None  # the first time that a line has
        self._last_s = 0.0

    @property
    def has_begun(self) -> bool:
        return self._is_trace is not None

    def parse(self, line: bytes) -> LoggedRequest:
        """Raises ValueError with what is wrong."""
        entry = json.loads(line.rstrip())  # an error then tells its column in the line
        if not isinstance(entry, dict):
            raise ValueError("expected an object with hash_ids, messages or prompt")
        at_s = _time_s(entry)
        is_trace = "hash_ids" in entry
        if self._is_trace not in (None, is_trace):
            kind = "a hash trace" if self._is_trace else "texts"
            raise ValueError(f"the first line was one of {kind}, this one is not")
        request = self._trace(entry, at_s) if is_trace else self._text(entry, at_s)
        self._is_trace = is_trace
        return request

    def parse_all(self, lines: list[bytes]) -> Iterator[LoggedRequest] | None:
        """Many lines of a trace, several times as fast; None: they want to be read one by one."""
        if not self._is_trace or self._first_s is None:
            return None
        try:
            entries = json.loads(b"[%b]" % b",".join(lines))
            ids = [entry["hash_ids"] for entry in entries]
            num_tokens = np.array([entry["input_length"] for entry in entries])
            times_s = np.array([entry["timestamp"] for entry in entries]) * 1e-3
            flat = np.array(list(chain.from_iterable(ids)))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not (
            len(entries) == len(lines)
            and {flat.dtype, num_tokens.dtype} == {np.dtype(np.int64)}
            and flat.ndim == times_s.ndim == 1
            and min(flat.min(), num_tokens.min()) >= 0
            and np.isfinite(times_s).all()
            and list(map(len, ids)) == (-(-num_tokens // TRACE_BLOCK_TOKENS)).tolist()
        ):
            return None
        return self._many(flat.astype(np.uint64) * _SPREAD, num_tokens, times_s - self._first_s)

    def _many(
        self, blocks: Names, num_tokens: npt.NDArray[np.int64], times_s: npt.NDArray[np.float64]
    ) -> Iterator[LoggedRequest]:
        stops = np.cumsum(-(-num_tokens // TRACE_BLOCK_TOKENS)).tolist()
        since_s = np.maximum.accumulate(np.append(self._last_s, times_s))[1:]
        self._last_s = float(since_s[-1])
        start = 0
        for stop, tokens, at_s in zip(stops, num_tokens.tolist(), since_s.tolist(), strict=True):
            yield self._traced(at_s, tokens, blocks[start:stop])
            start = stop

    def _since_first(self, at_s: float | None) -> float:
        if at_s is not None:
            self._first_s = at_s if self._first_s is None else self._first_s
            self._last_s = max(self._last_s, at_s - self._first_s)
        return self._last_s

    def _trace(self, entry: Mapping[str, Any], at_s: float | None) -> LoggedRequest:
        ids, num_tokens = entry["hash_ids"], entry.get("input_length")
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"input_length={num_tokens!r}: expected a number of tokens")
        if type(ids) is not list or not set(map(type, ids)) <= {int}:
            raise ValueError("hash_ids: expected a list of whole numbers")
        if ids and not (min(ids) >= 0 and max(ids) < 2**64):
            raise ValueError("hash_ids: expected numbers from 0 to 2^64 - 1")
        if len(ids) != -(-num_tokens // TRACE_BLOCK_TOKENS):
            raise ValueError(
                f"{len(ids)} hash_ids for input_length={num_tokens}: expected one for each "
                f"{TRACE_BLOCK_TOKENS} tokens"
            )
        if self._block_tokens and self._block_tokens % TRACE_BLOCK_TOKENS:
            raise ConfigError(
                f"a hash trace has blocks of {TRACE_BLOCK_TOKENS} tokens: "
                "block_tokens must be multiples of that"
            )
        blocks = np.array(ids, np.uint64) * _SPREAD
        return self._traced(self._since_first(at_s), num_tokens, blocks)

    def _traced(self, at_s: float, num_tokens: int, blocks: Names) -> LoggedRequest:
        block_tokens = self._block_tokens or TRACE_BLOCK_TOKENS
        if block_tokens > TRACE_BLOCK_TOKENS:
            blocks = merged(blocks, block_tokens // TRACE_BLOCK_TOKENS)
        return LoggedRequest(at_s, num_tokens, blocks, block_tokens, None, None)

    def _text(self, entry: Mapping[str, Any], at_s: float | None) -> LoggedRequest:
        body = entry["body"] if isinstance(entry.get("body"), dict) else entry
        if "messages" not in body and "prompt" not in body:
            raise ValueError("expected hash_ids, messages or prompt")
        text = text_of(body)
        num_tokens = math.ceil(len(text) / self._bytes_per_token)
        block_tokens = self._block_tokens or TEXT_BLOCK_TOKENS
        cuts = _cuts(text)
        pieces = np.fromiter(
            (xxh64_intdigest(text[a:b].removesuffix(SEPARATOR)) for a, b in pairwise(cuts)),
            np.uint64,
        )
        piece_tokens = np.diff(cuts) * (num_tokens / max(1, len(text)))
        return LoggedRequest(
            self._since_first(at_s),
            num_tokens,
            _chained(text, num_tokens, block_tokens, self._bytes_per_token),
            block_tokens,
            pieces,
            piece_tokens.astype(np.float32),
        )


def _time_s(entry: Mapping[str, Any]) -> float | None:
    """`timestamp` counts milliseconds, as in Mooncake's traces, and `created` seconds."""
    for name, unit_s in (("timestamp", 1e-3), ("created", 1.0)):
        value = entry.get(name)
        if value is not None:
            if type(value) not in (int, float) or not abs(value) < LATEST:
                raise ValueError(f"{name}={reprlib.repr(value)}: expected a number")
            return float(value) * unit_s
    return None


def _cuts(text: bytes) -> list[int]:
    """Where a text is cut into pieces: where its parts begin, and at its anchors."""
    if not text:
        return [0]
    starts = [0]
    while (found := text.find(SEPARATOR, starts[-1])) >= 0:
        starts.append(found + len(SEPARATOR))
    cuts: list[int] = np.union1d(starts, located(text)[0]).tolist()
    return [*cuts, len(text)]


def _chained(text: bytes, num_tokens: int, block_tokens: int, bytes_per_token: float) -> Names:
    num_blocks = -(-num_tokens // block_tokens)
    cuts = [int(block * block_tokens * bytes_per_token) for block in range(num_blocks)]
    names, name = np.empty(num_blocks, np.uint64), 0
    for block, (start, stop) in enumerate(pairwise([*cuts, len(text)])):
        name = xxh64_intdigest(text[start:stop], name)
        names[block] = name
    return names

"""Valkey or Redis: frames shared by all processes that use the server; pipelined both ways.

The `redis` client connects and logs in. Commands and replies are put together and parsed here: the
client would copy every frame twice, and believe any length that a server sends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Any, TypeAlias

from kvboost.codecs.frame import OWNER_AT, OWNER_BYTES
from kvboost.core import FrameKey, Owner, PrefixKey
from kvboost.errors import ConfigError, TierUnavailable, missing_packages
from kvboost.tiers.address import seconds, shown, take_options
from kvboost.tiers.base import Tier, TierStats

if TYPE_CHECKING:
    from redis import ConnectionPool

Command: TypeAlias = "tuple[bytes | memoryview, ...]"

DEFAULT_PREFIX = "kvboost:"
LARGEST_BYTES = 512 << 20  # that a server stores under a key
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
# What may be under way at once. The server holds answers in memory until they are read.
_IN_FLIGHT_BYTES = 8 << 20
_MAX_IN_FLIGHT = 64
_KEYS_PER_UNLINK = 1024
_RAISE = b"""
local before = tonumber(redis.call('GET', KEYS[1]) or '0')
if before < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return before
"""
_READ_BYTES = 64 << 10
_SENT_BYTES = 256 << 10
_LONGEST_LINE = 4096
_MOST_ITEMS = 1 << 16  # of a list: SCAN returns about as many as it is asked for
_MOST_LISTS = 2  # in one another
_LISTED_BYTES = 16 << 20  # of short strings, beside a value
_LEAST_BYTES_PER_S = 1 << 20  # below, a reply is given up
_JOINED_BYTES = 16 << 10  # a smaller piece is copied to its neighbours: a system call costs more


class RedisTier(Tier):
    """A server's memory: `redis://`, `rediss://` (TLS) or `unix://`.

    Options of the URL: `ttl_s` (what is not used for so long is forgotten) and `prefix` of keys,
    beside `db` and the `ssl_` options of the client.
    """

    def __init__(
        self, url: str, timeout_s: float = 1.0, largest_bytes: int = LARGEST_BYTES
    ) -> None:
        """`largest_bytes`: of a frame; a reply with more is refused."""
        self._address = shown(url)
        parsers: dict[str, Callable[[str], Any]] = {"ttl_s": seconds, "prefix": str}
        bare_url, options = take_options(url, parsers, ("db", *_TLS_OPTIONS))
        self._prefix: bytes = options.get("prefix", DEFAULT_PREFIX).encode()
        ttl_s = options.get("ttl_s")
        self._expiry = () if ttl_s is None else (b"PX", b"%d" % max(1, round(1000 * ttl_s)))
        try:
            from redis import ConnectionPool, exceptions  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(missing_packages(self._address, "redis")) from error
        self._no_room = exceptions.OutOfMemoryError
        self._refusal = exceptions.ResponseError
        try:
            self._pool: ConnectionPool = ConnectionPool.from_url(
                bare_url,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                parser_class=partial(_Replies, largest_bytes, timeout_s, self._came),
            )
        except ValueError:  # its text may hold a part of the password
            raise ConfigError(
                f"{self._address}: expected redis://, rediss:// or unix:// with"
                " [user:password@]host[:port], special characters in the password escaped"
            ) from None

    def get(self, keys: Sequence[FrameKey]) -> dict[FrameKey, memoryview]:
        """Ask ahead, as far as the size of the answers allows; use puts the expiry off."""
        name = b"GETEX" if self._expiry else b"GET"
        questions = ((name, self._prefix + key, *self._expiry) for key in keys)
        frames: dict[FrameKey, memoryview] = {}
        num_asked, num_ahead, largest_bytes = 0, 2, 1
        with suppress(_TooLarge), self._connection() as connection:
            for num_answered, key in enumerate(keys):
                if num_asked - num_answered <= num_ahead // 2:
                    asked = list(islice(questions, num_answered + num_ahead - num_asked))
                    num_asked += len(asked)
                    connection.send_packed_command(_wire(asked))
                answer = self._value(connection)
                if isinstance(answer, bytes | bytearray):
                    frames[key] = memoryview(answer)
                    largest_bytes = max(largest_bytes, len(answer))
                elif answer is not None:
                    raise TypeError(f"expected a frame from Redis, got {type(answer)}")
                room = max(2, _IN_FLIGHT_BYTES // largest_bytes)
                num_ahead = min(num_ahead + 1, room, _MAX_IN_FLIGHT)
        return frames

    def put(self, frames: Mapping[FrameKey, memoryview]) -> list[FrameKey]:
        """Send batches of frames; those that the server has no memory for are returned."""
        refused: list[FrameKey] = []
        with self._connection() as connection:
            for batch in _batches(frames):
                connection.send_packed_command(
                    _wire(
                        (b"SET", self._prefix + key, frame, *self._expiry) for key, frame in batch
                    )
                )
                refused += [key for key, _ in batch if not self._was_kept(connection)]
        return refused

    def discard(self, keys: Iterable[FrameKey]) -> None:
        """The server frees the memory later."""
        names = iter([self._prefix + key for key in keys])
        while some := list(islice(names, _KEYS_PER_UNLINK)):
            with self._connection() as connection:
                connection.send_packed_command(_wire([(b"UNLINK", *some)]))
                if not isinstance(answer := connection.read_response(), int):
                    raise TypeError(f"expected a number from Redis, got {type(answer)}")

    def erase(self, keys: Collection[FrameKey], owners: Collection[Owner]) -> None:
        """Look at the owner of every frame that the server has."""
        self.discard(keys)
        if not owners:
            return
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", self._prefix) + b"*"
        cursor = b"0"
        while True:
            with self._connection() as connection:
                scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _KEYS_PER_UNLINK)
                connection.send_packed_command(_wire([scan]))
                cursor, found = connection.read_response()
                names = [_bytes(name) for name in found]
                first, last = b"%d" % OWNER_AT, b"%d" % (OWNER_AT + OWNER_BYTES - 1)
                asked = [(b"GETRANGE", name, first, last) for name in names]
                connection.send_packed_command(_wire(asked))
                whose = [_bytes(self._value(connection)) for _ in names]
            gone = [name for name, each in zip(names, whose, strict=True) if each in owners]
            self.discard(PrefixKey(name[len(self._prefix) :]) for name in gone)
            if cursor == b"0":
                return

    def epoch(self, key: FrameKey) -> int:
        """Never expires, and is not put off by reading."""
        with self._connection() as connection:
            connection.send_packed_command(_wire([(b"GET", self._prefix + key)]))
            return int(connection.read_response() or 0)

    def raise_epoch(self, key: FrameKey, epoch: int) -> int:
        """Atomic, also if other processes do the same."""
        command = (b"EVAL", _RAISE, b"1", self._prefix + key, b"%d" % epoch)
        with self._connection() as connection:
            connection.send_packed_command(_wire([command]))
            return int(connection.read_response())

    def stats(self) -> TierStats:
        """Nothing is known here of what others have stored."""
        return TierStats(num_entries=0, size_bytes=0, budget_bytes=0)

    def close(self) -> None:
        """Calls that are under way fail."""
        self._pool.disconnect()

    def _came(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes

    def _value(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except self._refusal as error:
            if str(error).startswith("WRONGTYPE"):
                return b""  # foreign data: the caller finds that it is no frame
            raise

    def _was_kept(self, connection: Any) -> bool:
        try:
            answer = connection.read_response()
        except self._no_room:
            return False
        if answer != b"OK":
            raise TypeError(f"expected OK from Redis, got {type(answer)}")
        return True

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection of one's own, which is dropped after any fault.

        What is left of its answers could else be taken for those of the next call.
        """
        connection: Any = None
        try:
            connection = self._pool.get_connection()
            yield connection
        # The client fails in many ways on answers that were broken on their way.
        except BaseException as error:
            if connection is not None:
                connection.disconnect()
            if isinstance(error, Exception) and not isinstance(error, _TooLarge):
                reason = f"{type(error).__name__}: {error}"
                raise TierUnavailable(f"{self._address}: {reason}") from error
            raise
        finally:
            if connection is not None:
                self._pool.release(connection)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes from Redis, got {type(value)}")
    return bytes(value)


def _batches(
    frames: Mapping[FrameKey, memoryview],
) -> Iterator[list[tuple[FrameKey, memoryview]]]:
    batch: list[tuple[FrameKey, memoryview]] = []
    size_bytes = 0
    for key, frame in frames.items():
        if batch and (size_bytes + frame.nbytes > _IN_FLIGHT_BYTES or len(batch) == _MAX_IN_FLIGHT):
            yield batch
            batch, size_bytes = [], 0
        batch.append((key, frame))
        size_bytes += frame.nbytes
    if batch:
        yield batch


def _wire(commands: Iterable[Command]) -> list[bytearray | bytes | memoryview]:
    """Commands in the server's protocol, in pieces; large arguments are not copied."""
    pieces: list[bytearray | bytes | memoryview] = []
    joined = bytearray()
    for command in commands:
        joined += b"*%d\r\n" % len(command)
        for argument in command:
            size_bytes = memoryview(argument).nbytes
            joined += b"$%d\r\n" % size_bytes
            if size_bytes > _JOINED_BYTES:  # in parts: the time limit of a call is for one
                parts = range(0, size_bytes, _SENT_BYTES)
                view = memoryview(argument).cast("B")
                pieces += (joined, *(view[start : start + _SENT_BYTES] for start in parts))
                joined = bytearray()
            else:
                joined += argument
            joined += b"\r\n"
    return [*pieces, joined] if joined else pieces


class _TooLarge(TierUnavailable):
    """A value that is no frame of ours, but of a process with larger chunks: a miss."""


class _Replies:
    """Parses a server's replies; none may be longer, deeper or slower than allowed.

    Stands where the client would put hiredis, which allocates a list as long as the server says.
    """

    def __init__(
        self, most_bytes: int, timeout_s: float, came: Callable[[int], None], **_: Any
    ) -> None:
        """`came` is told of bytes of large values as they arrive."""
        self._most_bytes, self._came = most_bytes, came
        self._most_s = timeout_s + most_bytes / _LEAST_BYTES_PER_S
        self._until, self._left_bytes = 0.0, 0  # of a reply
        self._sock: Any = None
        self._unread = bytearray()

    def on_connect(self, connection: Any) -> None:
        """Begin with an empty buffer."""
        self._sock, self._unread = connection._sock, bytearray()  # noqa: SLF001  (as hiredis)

    def on_disconnect(self) -> None:
        """What was not read is dropped."""
        self._sock, self._unread = None, bytearray()

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is anything to read, the end of the connection included."""
        with DefaultSelector() as selector:
            selector.register(self._sock, EVENT_READ)
            return bool(self._unread or selector.select(timeout))

    def read_response(self, *_: Any, **__: Any) -> Any:
        """The next reply; errors are returned, but for those that end the connection."""
        self._until = time.monotonic() + self._most_s
        self._left_bytes = self._most_bytes + _LISTED_BYTES
        return self._reply(_MOST_LISTS)

    def _reply(self, num_lists: int) -> Any:
        line = self._line()
        kind, said = line[:1], line[1:]
        if kind == b"+":
            return said
        if kind == b"-":
            from redis import exceptions  # noqa: PLC0415  (an extra)
            from redis.connection import DefaultParser  # noqa: PLC0415

            parse_error: Callable[[str], Exception] = DefaultParser.parse_error
            error = parse_error(said.decode(errors="replace"))
            if isinstance(error, exceptions.ConnectionError):  # as the client's own parsers do
                raise error
            return error
        number = int(said)
        if kind == b":":
            return number
        if number == -1 and kind in b"$*":
            return None
        if kind == b"$" and number > min(self._most_bytes, self._left_bytes):
            raise _TooLarge(f"a value of {number} bytes")
        if kind == b"$" and number >= 0:
            self._left_bytes -= number
            return self._string(number)
        if kind == b"*" and 0 <= number <= _MOST_ITEMS and num_lists:
            return [self._reply(num_lists - 1) for _ in range(number)]
        raise ValueError(f"unexpected reply {line[:40]!r}")

    def _line(self) -> bytes:
        while (end := self._unread.find(b"\r\n", 0, _LONGEST_LINE)) < 0:
            if len(self._unread) >= _LONGEST_LINE:
                raise ValueError(f"unexpected reply {bytes(self._unread[:40])!r}")
            piece = bytearray(_READ_BYTES)
            self._unread += memoryview(piece)[: self._read_into(piece)]
        line = bytes(self._unread[:end])
        del self._unread[: end + 2]
        return line

    def _string(self, size_bytes: int) -> bytearray:
        found = bytearray(size_bytes)
        held = self._unread[:size_bytes]
        found[: len(held)] = held
        del self._unread[:size_bytes]
        left = memoryview(found)[len(held) :]
        while left:
            num_bytes = self._read_into(left)
            self._came(num_bytes)
            left = left[num_bytes:]
        if self._line():
            raise ValueError("a reply that is longer than it says")
        return found

    def _read_into(self, buffer: Any) -> int:
        if time.monotonic() > self._until:
            raise TimeoutError("a reply does not end")
        num_bytes: int = self._sock.recv_into(buffer)
        if not num_bytes:
            raise ConnectionError("the server closed the connection")
        return num_bytes

"""From options to a running server, and its drain at shutdown."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, cast

import uvicorn

from kvboost.config import Options
from kvboost.errors import ConfigError, KVBoostError, UnsupportedModel
from kvboost.server.app import make_app
from kvboost.server.edge import Connection, Limits, end_unread, protocol
from kvboost.server.exchange import Running
from kvboost.server.keys import KeyRing, read_keys
from kvboost.server.logs import configure
from kvboost.server.options import ABOUT, ServerOptions, add_flags, read_options
from kvboost.server.plans import Served
from kvboost.server.telemetry import Telemetry

if TYPE_CHECKING:
    from kvboost.engine.engine import KVBoost
    from kvboost.server.grammar import Grammars

GRACE_S = 1.0  # for the error events of requests that are cut off
KEEP_ALIVE_S = 15


class DrainingServer(uvicorn.Server):
    """Drains at shutdown: running requests have `drain_s` to finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        running: Running,
        drain_s: float,
        *,
        greeting: str,
        close: Callable[[], None],
    ) -> None:
        """`greeting` is written once the server listens, `close` called when no request is left."""
        super().__init__(config)
        self._running = running
        self._drain_s = drain_s
        self._greeting = greeting
        self._close = close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then write the greeting."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        _say(self._greeting)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; on a second Ctrl+C without waiting for running requests.

        The signal is not raised again afterwards, as uvicorn would do: the engine is still to be
        closed, and an end that was asked for is no failure.
        """
        if self.should_exit and sig == signal.SIGINT:
            self._loop.call_soon_threadsafe(self._running.cut)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, and drain."""
        self._running.is_draining = True
        if len(self._running):
            num = len(self._running)
            _say(
                f"shutting down: waiting up to {self._drain_s:g} s for {num} "
                f"request{'s' if num > 1 else ''} (Ctrl+C again to stop now)\n"
            )
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._drain_s, self._cut),
            loop.call_later(self._drain_s + GRACE_S, self._abort),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        # While the loop runs: texts that are being warmed end with the engine.
        await asyncio.to_thread(self._close)

    def _cut(self) -> None:
        """End all requests with an error, and connections whose request has not arrived."""
        self._running.cut()
        self._abort(lambda connection: not connection.is_answering)

    def _abort(self, which: Callable[[Connection], bool] = lambda _: True) -> None:
        """Abort connections, such as those whose clients do not read."""
        for connection in cast("list[Connection]", list(self.server_state.connections)):
            if which(connection):
                connection.transport.abort()


def main(arguments: Sequence[str] | None = None) -> int:
    """`kvboost-server`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvboost-server", description=ABOUT, allow_abbrev=False)
    add_flags(parser)
    parser.set_defaults(fail=parser.error)
    try:
        return run(parser.parse_args(arguments))
    except (KVBoostError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"kvboost-server: {error}\n")
        return 1
    except KeyboardInterrupt:  # before it serves
        return 130


class Loaded(NamedTuple):
    """The parts of an application besides its options."""

    engine: KVBoost
    model: Served
    keys: KeyRing
    grammars: Grammars


def run(flags: argparse.Namespace) -> int:
    """Load the model and serve it until a signal ends that."""
    try:
        options, engine_options = read_options(vars(flags), os.environ)
    except ConfigError as error:
        flags.fail(str(error))  # ends the process with the code of wrong usage
    configure(options.log_format)
    with _bind(options) as bound:  # a port that is taken is known before a model is loaded
        engine, model, keys, grammars = load(options, engine_options)
        try:
            return serve(engine, options, grammars, model=model, keys=keys, bound=bound)
        finally:
            engine.close()


def load(options: ServerOptions, engine_options: Options) -> Loaded:
    """Read the keys, load the model and warm the texts of --warm.

    Raises:
        KVBoostError: something of it cannot be read or loaded.
        OSError: a file cannot be read.
    """
    from kvboost.server.grammar import Grammars  # noqa: PLC0415  (loads torch)

    keys = KeyRing(read_keys(options.api_keys) if options.api_keys else ())
    texts = [Path(name).read_text(encoding="utf-8") for name in options.warm]
    engine, model = _load(options, engine_options)
    try:
        if texts:
            with _told(f"warming {len(texts)} text{'s' if len(texts) > 1 else ''}"):
                for tenant in keys.tenants:  # none hits what another has stored
                    engine.warm(texts, tenant=tenant)
        return Loaded(engine, model, keys, Grammars(engine.tokenizer, model.vocab_size))
    except BaseException:
        engine.close()
        raise


def serve(
    engine: KVBoost,
    options: ServerOptions,
    grammars: Grammars,
    *,
    model: Served,
    keys: KeyRing,
    bound: socket.socket,
) -> int:
    """Serve at a bound socket until a signal comes; returns the exit code."""
    telemetry = Telemetry(engine, model=model.name)
    app = make_app(engine, options, telemetry, grammars, model=model, keys=keys)
    config = uvicorn.Config(
        app,
        http=protocol(Limits.of(options)),
        proxy_headers=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.drain_s + GRACE_S) + 1,
        ws="none",
        lifespan="off",
    )
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    greeting = f"serving {model.name} at http://{shown}:{port}\n"
    running, drain_s = app.state.running, options.drain_s
    DrainingServer(config, running, drain_s, greeting=greeting, close=engine.close).run([bound])
    return 0


def _bind(options: ServerOptions) -> socket.socket:
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end_unread(bound, options.client_timeout_s)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error}") from None
    bound.set_inheritable(True)
    return bound


def _load(options: ServerOptions, engine_options: Options) -> tuple[KVBoost, Served]:
    """The engine, and its model as clients see it."""
    with _told(f"loading {options.model}"):
        from kvboost.engine.engine import KVBoost  # noqa: PLC0415  (loads torch)
        from kvboost.models.load import limits, load_or_tell  # noqa: PLC0415

        arguments = {"dtype": options.dtype, "gguf_file": options.gguf_file}
        model, tokenizer = load_or_tell(
            options.model, options.device, arguments, options.max_weight_bytes
        )
    with _told("certifying"):
        engine = KVBoost(
            model, tokenizer, adapters=options.adapters, **dataclasses.asdict(engine_options)
        )
    if not engine.batch_stats()["kv_capacity_tokens"]:
        engine.close()
        raise UnsupportedModel(
            "strict=False is for the library: this model's K/V cannot be reused, and requests"
            " cannot share its memory, as a server's do"
        )
    vocab_size, longest = limits(model)
    room = engine.batch_stats()["kv_capacity_tokens"]
    most_answers = engine_options.max_batch_size + engine_options.max_queue_size
    most_tokens = min(room, longest or room)
    names = tuple(options.adapters)
    return engine, Served(options.model_name, vocab_size, most_tokens, most_answers, names)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Report a step of the start, and how long it took."""
    started = time.perf_counter()
    _say(f"{what} ...\n")
    yield
    _say(f"{what}: {time.perf_counter() - started:.1f} s\n")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()

"""How fast are the shared tiers? Frames through a tier, beside the server's own client."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.measure import Row, by_turns
from kvboost.bench.clock import seconds
from kvboost.core import FrameKey, PrefixKey
from kvboost.tiers.base import Tier
from kvboost.tiers.mooncake import MooncakeTier
from kvboost.tiers.redis import RedisTier

MB = 1_000_000
TIMEOUT_S = 20.0
ROUND_BYTES = 24 * MB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", action="append", help="of a running server (default: start some)")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 3], help="MB of a frame")


def run(options: argparse.Namespace) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        for url in options.url or stack.enter_context(_servers()):
            with _ways(url) as ways:
                for size in options.sizes:
                    yield from _measure(url, ways, round(size * MB), options.rounds)


class BareRedis:
    """The client as its manual shows it: a call for each value."""

    def __init__(self, url: str) -> None:
        from redis import Redis  # noqa: PLC0415

        self._client = Redis.from_url(url)
        self.close = self._client.close

    def put(self, frames: dict[FrameKey, memoryview]) -> Any:
        for key, frame in frames.items():
            self._client.set(key, frame.obj)

    def get(self, keys: list[FrameKey]) -> Any:
        return [self._client.get(key) for key in keys]

    def discard(self, keys: list[FrameKey]) -> None:
        self._client.delete(*keys)


class PipelinedRedis(BareRedis):
    """The client with all calls in one pipeline."""

    def put(self, frames: dict[FrameKey, memoryview]) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        for key, frame in frames.items():
            pipeline.set(key, frame.obj)
        return pipeline.execute()

    def get(self, keys: list[FrameKey]) -> Any:
        return self._client.mget(keys)


class BareMooncake:
    """The client with its own buffer: values in, values out."""

    def __init__(self, tier: MooncakeTier) -> None:
        host, port = tier._master  # noqa: SLF001
        self._store = tier._new_store()  # noqa: SLF001
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"{host}:{port}")
        assert self._store.setup(*arguments) == 0
        self.close = self._store.close

    def put(self, frames: dict[FrameKey, memoryview]) -> Any:
        assert self._store.put_batch([key.hex() for key in frames], list(frames.values())) == 0

    def get(self, keys: list[FrameKey]) -> Any:
        return self._store.get_batch([key.hex() for key in keys])

    def discard(self, keys: list[FrameKey]) -> None:
        self._store.batch_remove([key.hex() for key in keys], force=True)


class RegisteredMooncake(BareMooncake):
    """The client with memory that is registered for the call, as a reader of K/V would."""

    def put(self, frames: dict[FrameKey, memoryview]) -> Any:
        with self._registered(list(frames.values())) as (places, sizes):
            codes = self._store.batch_put_from([key.hex() for key in frames], places, sizes)
        assert not any(codes)

    def get(self, keys: list[FrameKey]) -> Any:
        size = self._store.get_size(keys[0].hex())
        frames = [np.empty(size, np.uint8).data for _ in keys]
        with self._registered(frames) as (places, sizes):
            codes = self._store.batch_get_into([key.hex() for key in keys], places, sizes)
        assert codes == sizes
        return frames

    @contextlib.contextmanager
    def _registered(self, frames: list[memoryview]) -> Iterator[tuple[list[int], list[int]]]:
        places = [np.frombuffer(frame, np.uint8).ctypes.data for frame in frames]
        sizes = [frame.nbytes for frame in frames]
        for place, size in zip(places, sizes, strict=True):
            assert self._store.register_buffer(place, size) == 0
        yield places, sizes
        for place in places:
            self._store.unregister_buffer(place)


@contextlib.contextmanager
def _ways(url: str) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        tier: Tier
        if url.startswith("mooncake"):
            tier = MooncakeTier(url, TIMEOUT_S)
            bare = {"values": BareMooncake(tier), "registered": RegisteredMooncake(tier)}
        else:
            tier = RedisTier(url, TIMEOUT_S)
            bare = {"one by one": BareRedis(url), "pipelined": PipelinedRedis(url)}
        ways = {"tier": tier, **bare}
        for way in ways.values():
            stack.callback(way.close)
        yield ways


def _measure(url: str, ways: dict[str, Any], size_bytes: int, num_rounds: int) -> Iterator[Row]:
    num_frames = max(1, ROUND_BYTES // size_bytes)
    frames = {
        PrefixKey(os.urandom(32)): memoryview(os.urandom(size_bytes)) for _ in range(num_frames)
    }

    def times_of(way: Any) -> tuple[float, float]:
        put_s = seconds(lambda: way.put(frames))
        get_s = seconds(lambda: way.get(list(frames)))
        way.discard(list(frames))
        return put_s, get_s

    sides = {name: lambda _, way=way: times_of(way) for name, way in ways.items()}
    taken = {name: np.median(each, axis=0) for name, each in by_turns(sides, num_rounds).items()}
    size_mb = num_frames * size_bytes / MB
    for number, action in enumerate(("put", "get")):
        for name in list(ways)[1:]:
            ours_s, theirs_s = float(taken["tier"][number]), float(taken[name][number])
            yield {
                "server": "unix" if url.startswith("unix") else url.split("?")[0].split(":")[0],
                "action": action,
                "frame_mb": size_bytes / MB,
                "bare": name,
                "tier_mb_s": round(size_mb / ours_s),
                "bare_mb_s": round(size_mb / theirs_s),
                "tier_to_bare": round(theirs_s / ours_s, 2),
            }


@contextlib.contextmanager
def _servers() -> Iterator[list[str]]:
    """Redis over TCP and over a socket; a Mooncake master with a process that has the memory."""
    from servers import mooncake_master, redis_server  # noqa: PLC0415  (needs pytest)

    code = "import sys; from kvboost.tiers.mooncake import MooncakeTier;"
    code += "tier = MooncakeTier(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        redis = stack.enter_context(redis_server("--unixsocket", f"{folder}/socket"))
        master = stack.enter_context(mooncake_master())
        url = f"mooncake://127.0.0.1:{master.port}"
        holder = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code, f"{url}?segment_bytes={1 << 30}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        stack.callback(holder.kill)
        yield [
            f"redis://127.0.0.1:{redis.port}",
            f"unix://{folder}/socket",
            f"{url}?segment_bytes=0",
        ]

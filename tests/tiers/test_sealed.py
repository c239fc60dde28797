"""Signed values: with `cache_secret`, what a stranger writes into a shared tier is not used."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import redis
from xxhash import xxh3_64_intdigest

from fakes import FaultyTier, WordTokenizer, words
from kvboost import ConfigError, KVBoost
from kvboost.codecs import frame as frames
from kvboost.config import Options
from kvboost.core import PrefixKey
from kvboost.tiers import stack
from kvboost.tiers.sealed import TAG_BYTES, SealedTier
from servers import redis_server
from tiny_models import SUPPORTED, build

SECRET = "a secret of the whole team"
KEY, OTHER = PrefixKey(b"k" * 32), PrefixKey(b"o" * 32)
VALUE = memoryview(bytes(range(200)))


def test_what_was_put_comes_back() -> None:
    below = FaultyTier()
    tier = SealedTier(below, SECRET)
    assert tier.put({KEY: VALUE}) == []
    assert tier.get([KEY, OTHER]) == {KEY: VALUE}
    assert len(below.frames[KEY]) == len(VALUE) + TAG_BYTES
    tier.discard([KEY])
    assert tier.get([KEY]) == {}


@pytest.mark.parametrize(
    "forge",
    [
        lambda value: b"",
        lambda value: value[:TAG_BYTES],
        lambda value: value[:-TAG_BYTES],
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: bytes([value[0] ^ 1]) + value[1:],
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    ],
    ids=["empty", "short", "no-tag", "cut", "longer", "body", "tag"],
)
def test_anything_else_is_neither_frame_nor_note(forge: Callable[[bytes], bytes]) -> None:
    below = FaultyTier()
    tier = SealedTier(below, SECRET)
    tier.put({KEY: VALUE})
    below.frames[KEY] = forge(bytes(below.frames[KEY]))
    assert tier.get([KEY]) == {KEY: b""}


def test_a_value_under_another_key_or_secret_is_wrong() -> None:
    below = FaultyTier()
    tier = SealedTier(below, SECRET)
    tier.put({KEY: VALUE})
    below.frames[OTHER] = below.frames[KEY]
    assert tier.get([OTHER]) == {OTHER: b""}
    assert SealedTier(below, SECRET + "!").get([KEY]) == {KEY: b""}


def test_short_secrets_are_refused_and_none_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"cache_secret=\*\*\*: expected at least 16") as refusal:
        Options(cache_secret="hunter2")
    assert "hunter2" not in str(refusal.value)
    assert SECRET not in repr(Options(cache_secret=SECRET))


def ask(url: str, prompt: list[int], **options: object) -> tuple[int, list[int], int]:
    """Tokens reused by a new process, its answer, and how many damaged values it met."""
    settled = {"chunk_size": 16, "tier_deadline_ms": 60_000, "cache_url": url} | options
    with KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), **settled) as engine:
        result = engine.generate(prompt, 4)
        engine.flush()
        return result.cached_tokens, result.token_ids, engine.cache_stats()["damaged_frames"]


@pytest.mark.tiny
@pytest.mark.servers
def test_a_forged_frame_is_used_without_a_secret_and_ignored_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack, "LEAST_WAIT_S", 60.0)
    prompt = words(100)
    for options, is_safe in (({}, False), ({"cache_secret": SECRET}, True)):
        with redis_server() as server:
            url = f"redis://127.0.0.1:{server.port}"
            _, right, _ = ask(url, prompt, **options)
            assert ask(url, prompt, **options)[0] == len(prompt) - 1
            assert forge_all(server.port) > 4
            cached, answer, num_damaged = ask(url, prompt, **options)
            assert (cached == 0) == (answer == right) == (num_damaged > 0) == is_safe


def forge_all(port: int) -> int:
    """Replace all K/V by noise with right checksums, as anybody can."""
    client = redis.Redis(port=port)
    noise, num_forged = np.random.default_rng(0), 0
    for name in client.scan_iter():
        value = bytearray(client.get(name))
        with suppress(frames.FrameError):  # a note
            head = frames.read(memoryview(value))
            start, stop = head.payload.start, head.payload.stop
            payload = noise.standard_normal((stop - start) // 4, np.float32).tobytes()
            value[start:stop] = payload
            struct.pack_into("<Q", value, frames.HEAD_BYTES - 16, xxh3_64_intdigest(payload))
            seal = frames._seal(memoryview(value)[:start])
            struct.pack_into("<Q", value, frames.HEAD_BYTES - 8, seal)
            client.set(name, bytes(value))
            num_forged += 1
    client.close()
    return num_forged

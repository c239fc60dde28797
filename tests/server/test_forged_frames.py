"""Frames that somebody with access to Redis has forged, with right checksums, and a real server."""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import redis
from xxhash import xxh3_64_intdigest

from fakes import words
from kvboost.codecs import frame
from kvboost.codecs.frame import FrameError
from servers import kvboost_server, redis_server
from tiny_models import save

pytestmark = pytest.mark.servers

NUM_PROMPTS, LENGTH = 8, 60
LONGEST_S = 10.0  # far beyond a busy machine's worst moment: a frame that holds everybody up
TRIES, DISCARDED_WITHIN_S = 10, 2.0
EDGES = (0, 1, 2**7, 2**8 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
PROVENANCE_AT, SEALED_AT = 7, frame.HEAD_BYTES - 8


def forge(honest: bytes, chance: random.Random) -> bytes:
    """The same frame with other numbers or bytes, longer or shorter; then sealed again.

    Its K/V stays: nothing but a `cache_secret` could tell other K/V with a right checksum.
    """
    forged, payload = bytearray(honest), frame.read(memoryview(honest)).payload
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        kind = chance.randrange(6)
        if kind == 0:  # a count, a length or a position
            at = chance.choice(range(8, 28, 4))
            struct.pack_into("<I", forged, at, chance.choice(EDGES) % 2**32)
        elif kind == 1:
            struct.pack_into("<Q", forged, 28, chance.choice(EDGES) % 2**64)
        elif kind == 2:  # anything in the head, keys and tokens with it
            forged[chance.randrange(4, min(payload.start, len(forged)))] = chance.randrange(256)
        elif kind == 3:
            del forged[chance.randrange(frame.HEAD_BYTES + 64, len(honest)) :]
        elif kind == 4:
            forged += chance.randbytes(chance.randrange(1, 200))
        else:
            forged[PROVENANCE_AT] ^= 1  # exact K/V calls itself approximate
    start = min(int.from_bytes(forged[8:12], "little"), len(forged))
    struct.pack_into("<Q", forged, SEALED_AT - 8, xxh3_64_intdigest(bytes(forged[start:])))
    head = bytes(forged[:start])
    seal = xxh3_64_intdigest(head[frame.HEAD_BYTES :], xxh3_64_intdigest(head[:SEALED_AT]))
    struct.pack_into("<Q", forged, SEALED_AT, seal)
    return bytes(forged)


def is_sound(forged: bytes, honest: bytes) -> bool:
    """Whether it says of itself what the honest frame says, so that nothing is wrong with it."""
    said = frame.read(memoryview(honest))
    try:
        head = frame.check(memoryview(forged), said.entry.key)
    except FrameError:
        return False
    same_kind = (head.codec, head.geometry) == (said.codec, said.geometry)
    return same_kind and head.entry == said.entry and len(forged) == len(honest)


def test_forged_frames_are_misses_and_discarded(tmp_path: Path) -> None:
    with redis_server() as server:
        outcomes = _forge_all(server.port, tmp_path)
    assert 4 * outcomes["sound"] < outcomes["status 200"]


def _forge_all(port: int, folder: Path) -> Counter[str]:
    count = int(os.environ.get("KVBOOST_TEST_FORGED", "150"))
    client = redis.Redis(port=port)
    chance = random.Random(os.environ.get("KVBOOST_TEST_SEED", "24"))
    prompts = [
        [97 + token % 26 for token in words(LENGTH, seed=number)] for number in range(NUM_PROMPTS)
    ]
    flags = ["--cache-url", f"redis://127.0.0.1:{port}", "--chunk-size", "16"]
    flags += ["--max-chunks", "4", "--max-new-tokens", "2"]
    outcomes: Counter[str] = Counter()
    with kvboost_server(save(folder / "tiny"), folder / "log", *flags) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:

            def ask(prompt: list[int]) -> str:
                body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "model": server.model}
                started = time.perf_counter()
                reply = http.post("/v1/completions", json=body)
                outcomes["slow"] += time.perf_counter() - started > LONGEST_S
                outcomes[f"status {reply.status_code}"] += 1
                return str(reply.json()["choices"][0]["text"])

            right = [ask(prompt) for prompt in prompts]
            frames = _stored(client, NUM_PROMPTS * 3)
            assert [ask(prompt) for prompt in prompts] == right
            outcomes.clear()
            for number in range(count):
                turn = number % NUM_PROMPTS
                text = b"".join(struct.pack("<I", token) for token in prompts[turn])
                own = [key for key, value in frames.items() if _tokens(value) in text]
                key = chance.choice(own)
                forged = forge(frames[key], chance)
                is_wrong = not is_sound(forged, frames[key])
                outcomes["sound"] += not is_wrong
                is_kept = False
                for _ in range(TRIES):
                    # With the others: behind a missing chunk, nothing is read.
                    client.mset({each: frames[each] for each in own} | {key: forged})
                    outcomes["other text"] += ask(prompts[turn]) != right[turn] and is_wrong
                    is_kept = is_wrong and _is_kept(client, key, forged)
                    if not is_kept:
                        break
                    ask(prompts[turn - 1])  # it was not read: its chunk was still in memory
                outcomes["kept"] += is_kept
                assert set(+outcomes) <= {"sound", "status 200"}, (number, outcomes)
        assert "Traceback" not in server.log.read_text()
    return outcomes


def _stored(client: redis.Redis, least: int) -> dict[bytes, bytes]:
    until = time.monotonic() + 20
    while True:
        found = {key: client.get(key) or b"" for key in client.scan_iter()}
        frames = {key: value for key, value in found.items() if value.startswith(frame.MAGIC)}
        if len(frames) >= least:
            return frames
        assert time.monotonic() < until, f"{len(frames)} frames of {least}"
        time.sleep(0.05)


def _tokens(value: bytes) -> bytes:
    return frame.read(memoryview(value)).entry.tokens


def _is_kept(client: redis.Redis, key: bytes, forged: bytes) -> bool:
    until = time.monotonic() + DISCARDED_WITHIN_S
    while client.get(key) == forged:
        if time.monotonic() > until:
            return True
        time.sleep(0.002)
    return False

"""Reuse by cache size, against a cache that is written down plainly."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.analyze.curve import Curve, follow
from kvboost.analyze.logs import read

SIZES = (1.0, 3.0, 7.0, 20.0, 50.0, math.inf)
DATA = Path(os.environ.get("KVBOOST_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")


def tokens_of(name: int) -> float:
    return 1.0 + name % 4


def reused(log: list[list[int]], size: float) -> float:
    """Tokens found by a least-recently-used cache; a prompt is looked up before it is used."""
    cache: OrderedDict[int, float] = OrderedDict()
    found = 0.0
    for names in log:
        found += sum(tokens_of(name) for name in names if name in cache)
        for name in reversed(names):
            cache[name] = tokens_of(name)
            cache.move_to_end(name)
        while sum(cache.values()) > size:
            cache.popitem(last=False)
    return found


def add_all(curve: Curve, log: list[list[int]], batch: int) -> None:
    """As `follow` does, `batch` prompts at a time."""
    for start in range(0, len(log), batch):
        prompts = log[start : start + batch]
        names = [name for prompt in prompts for name in reversed(prompt)]
        owners = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        tokens = np.array([tokens_of(name) for name in names], np.float64)
        curve.add(np.array(names, np.uint64), tokens, owners)


prompts = st.lists(st.integers(0, 15), max_size=8)


@settings(deadline=None)
@given(log=st.lists(prompts, max_size=30), batch=st.integers(1, 40))
def test_as_a_plain_cache_whatever_the_batches(log: list[list[int]], batch: int) -> None:
    curve = Curve(SIZES)
    add_all(curve, log, batch)
    total = sum(tokens_of(name) for names in log for name in names)
    for size in SIZES:
        assert curve.share(size).value * total == pytest.approx(reused(log, size))
        assert curve.share(size).error == 0


def conversations(num_requests: int) -> Iterator[list[int]]:
    chance = np.random.default_rng(3)
    talks: dict[int, list[int]] = {}
    for number in range(num_requests):
        talk = int(chance.zipf(1.3)) % 3000 if number % 2 else int(chance.integers(3000))
        names = talks.setdefault(talk, [0, 1, 2])  # everyone's
        if len(names) > 20:
            talks[talk] = names = [0, 1, 2]
        names.extend((number * 8 + n) for n in range(3, 3 + int(chance.integers(1, 5))))
        yield list(names)


def test_a_sample_tells_the_whole_within_its_error() -> None:
    sizes = [float(2**power) for power in range(9, 19)]
    whole, sample = Curve(sizes), Curve(sizes, max_names=4000)
    log = list(conversations(20_000))
    add_all(whole, log, 5000)
    add_all(sample, log, 500)
    assert sample.sampling_rate <= 1 / 8
    assert whole.sampling_rate == 1
    for size in (*sizes, math.inf):
        told = sample.share(size)
        assert 0 < told.error < 0.1
        assert abs(told.value - whole.share(size).value) <= told.error
    assert sample.share_of_names().value == pytest.approx(whole.share_of_names().value, abs=0.02)
    assert sample.distinct_tokens == pytest.approx(whole.distinct_tokens, rel=0.05)


def test_the_sample_stays_within_its_bound() -> None:
    curve = Curve(max_names=100)
    add_all(curve, [[3 * n, 3 * n + 1] for n in range(5000)], 1000)
    assert curve.sampling_rate <= 100 / 5000
    assert len(curve._used_names) <= 100


def test_the_published_share_of_the_conversation_trace() -> None:
    path = DATA / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("no conversation_trace.jsonl: set KVBOOST_DATA_DIR to the folder that has it")
    findings = follow(read(path))
    assert findings.num_requests == 12_031
    assert findings.content is None
    blocks = findings.prefix[512]
    assert blocks.num_names == 288_500
    assert round(blocks.share_of_names().value, 3) == 0.366
    assert blocks.sampling_rate == 1


def test_larger_blocks_find_less(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"input_length": 2000, "hash_ids": [1, 2, 3, last]} for last in (4, 5, 4)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings = follow(read(log, block_tokens=512), [512, 1024, 2048])
    assert {size: curve.num_names for size, curve in findings.prefix.items()} == {
        512: 12,
        1024: 6,
        2048: 3,
    }
    found = [findings.prefix[size].share().value * 6000 for size in (512, 1024, 2048)]
    assert found == pytest.approx([1536 + 2000, 1024 + 2000, 2000])

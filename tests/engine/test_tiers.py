"""The engine on top of disk and shared tiers: warm after a restart, right whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batching import WAIT_S, alone, answers, greedy
from fakes import FaultyDisk, FaultyTier, WordTokenizer, words
from kvboost import ConfigError, KVBoost
from kvboost.errors import DeadlineExceeded, KVBoostError
from kvboost.tiers import stack, urls
from kvboost.tiers.disk.tier import DiskTier
from tiny_models import SUPPORTED, build

pytestmark = pytest.mark.tiny


def engine_of(**options: object) -> KVBoost:
    settled: dict[str, object] = {"chunk_size": 16, "tier_deadline_ms": 60_000}
    return KVBoost(build(*SUPPORTED["llama"]), WordTokenizer(), **(settled | options))


@pytest.fixture
def below(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyTier]:
    """A tier that fails on demand, behind the URL redis://, and is waited for on any machine."""
    tier = request.param()
    monkeypatch.setattr(stack, "LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(urls, "_open_shared", lambda *_: tier)
    yield tier
    tier.thawed.set()


def small_memory(num_chunks: int) -> int:
    with engine_of() as engine:
        return num_chunks * 16 * engine._parts.model.geometry.bytes_per_token * 2


def test_a_new_process_is_as_warm_as_the_old_one(tmp_path: Path) -> None:
    prompts = [words(100 + number, seed=number) for number in range(20)]
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        expected = [engine.generate(prompt, 4).token_ids for prompt in prompts]
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        results = [engine.generate(prompt, 4) for prompt in prompts]
        stats = engine.cache_stats()
    assert [result.token_ids for result in results] == expected
    assert [result.cached_tokens for result in results] == [len(p) - 1 for p in prompts]
    assert stats["tiers"]["disk"]["hits"] == stats["loaded_chunks"] > 0


def test_moved_text_is_found_after_a_restart(tmp_path: Path) -> None:
    document = words(200)
    with engine_of(disk_cache_dir=str(tmp_path), reuse="auto") as engine:
        engine.generate(words(30, seed=1) + document, 2)
    with engine_of(disk_cache_dir=str(tmp_path), reuse="auto") as engine:
        report = engine.explain(words(77, seed=2) + document + words(9, seed=3))
    assert sum(len(s.span) for s in report.spans if s.kind.value == "moved") == 200


def test_what_does_not_fit_in_memory_comes_from_disk(tmp_path: Path) -> None:
    prompts = [words(100, seed=number) for number in range(12)]
    limit = small_memory(20)
    with engine_of(disk_cache_dir=str(tmp_path), max_cache_bytes=limit) as engine:
        for prompt in prompts:
            engine.generate(prompt, 2)
            engine.flush()
        assert [engine.generate(p, 2).cached_tokens for p in prompts] == [99] * 12
        stats = engine.cache_stats()
        assert stats["hot_memory_mb"] <= stats["budget_mb"] and stats["loaded_chunks"] > 0


@pytest.mark.parametrize("below", [FaultyTier], indirect=True)
def test_two_engines_share_a_tier_but_not_tenants_or_codecs(below: FaultyTier) -> None:
    prompt = words(100)
    with (
        engine_of(cache_url="redis://here") as first,
        engine_of(cache_url="redis://here") as second,
    ):
        expected = first.generate(prompt, 8, tenant="a").token_ids
        first.flush()
        assert second.generate(prompt, 8, tenant="b").cached_tokens == 0
        warm = second.generate(prompt, 8, tenant="a")
        assert (warm.cached_tokens, warm.token_ids) == (99, expected)
        with engine_of(cache_url="redis://here", kv_cache_bits=8) as third:
            assert third.generate(prompt, 8, tenant="a").cached_tokens == 0


@pytest.mark.parametrize("below", [FaultyTier, FaultyDisk], indirect=True)
@pytest.mark.parametrize("fault", ["down", "lost", "truncated", "corrupted", "frozen"])
def test_a_broken_tier_never_breaks_a_request(below: FaultyTier, fault: str) -> None:
    prompts = [words(60, seed=number) for number in range(10)]
    with engine_of() as engine:
        expected = [engine.generate(prompt, 4).token_ids for prompt in prompts]
    options = {"cache_url": "redis://here", "tier_deadline_ms": 100}
    with engine_of(**options, max_cache_bytes=small_memory(8)) as engine:
        for turn in range(4):
            below.fault = fault if turn in (1, 2) else ""
            if turn == 3:
                below.thawed.set()
            assert [engine.generate(prompt, 4).token_ids for prompt in prompts] == expected
        counts = engine.cache_stats()
        assert counts["requests"] == 40
        if fault != "lost":
            assert counts["tier_faults"] + counts["damaged_frames"] > 0


@pytest.mark.parametrize("below", [FaultyTier], indirect=True)
def test_who_waits_for_a_slow_tier_holds_up_nobody(below: FaultyTier) -> None:
    prompt, options = words(100), {"cache_url": "redis://here"}
    with engine_of(**options) as engine:
        engine.generate(prompt, 2)
    with engine_of(**options, max_batch_size=2) as engine:
        below.fault = "frozen"
        waiting = engine.submit(prompt, greedy(4))
        late = engine.submit(prompt, greedy(4), deadline_s=0.05)
        engine.submit(prompt, greedy(4)).cancel()
        quick = engine.submit(words(50), greedy(8), reuse="off")
        assert answers([quick]) == [alone(words(50), 8)]
        with pytest.raises(DeadlineExceeded):
            late.result(WAIT_S)
        assert not waiting.future.done()
        below.fault = ""
        below.thawed.set()
        assert answers([waiting]) == [alone(prompt, 4)]
        assert waiting.result().cached_tokens == 99


def test_a_closed_engine_says_so_and_leaves_no_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        engine.generate(words(40), 2)
    assert threading.active_count() == threads
    with pytest.raises(KVBoostError, match="closed"):
        engine.generate(words(40), 2)


def test_fewer_bits_take_less_room_and_are_verified_against_the_budget() -> None:
    sizes = {}
    for bits in (16, 8, 4):
        with engine_of(kv_cache_bits=bits) as engine:
            engine.generate(words(640), 2)
            engine.flush()
            sizes[bits] = engine.cache_stats()["hot_memory_mb"]
            assert engine.generate(words(640), 2).cached_tokens == 639
            report = engine.verify_correctness([words(300, seed=1)], max_new_tokens=8)
            assert report and report.of_mean == (bits < 16)
    assert sizes[4] < sizes[8] < sizes[16]


def test_a_folder_in_use_is_waited_for(tmp_path: Path) -> None:
    holder = DiskTier(tmp_path, 2**20)
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        assert engine.generate(words(40), 2).cached_tokens == 0
        assert not engine.cache_stats()["tiers"]["disk"]["is_up"]
        assert engine.generate(words(40), 2).cached_tokens == 39
        holder.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_url": "ftp://somewhere"}, "'ftp' is not one of memory://, file://, redis://"),
        ({"cache_url": "file://folder"}, "three slashes"),
        ({"cache_url": "file:///a file:///b"}, "expected each kind of tier once"),
        ({"kv_cache_bits": 3}, "expected 16, 8 or 4"),
        ({"kv_cache_bits": 8, "deterministic": True}, "requires kv_cache_bits=16, got 8"),
        ({"max_disk_bytes": 1000}, "max_disk_bytes=1000"),
        ({"disk_cache_dir": ""}, "non-empty"),
        ({"disk_cache_dir": 5}, "disk_cache_dir=5"),
        ({"cache_url": "file:///a,redis://b"}, "separate several URLs by spaces"),
        ({"cache_url": "file:///a?max=4"}, "no option 'max=4'"),
        ({"cache_url": "redis://:p[a@h"}, "must be escaped"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(**options)

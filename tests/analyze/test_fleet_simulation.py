"""The simulated fleet: caches, queues and routing do what can be reckoned by hand."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet import scale_page
from benchmarks.fleet.scale_traffic import BLOCK_TOKENS, Traffic
from kvboost.analyze.choices import ROUTINGS
from kvboost.analyze.fleet import Fleet, FleetResult, Setup, _Cache, simulate
from kvboost.analyze.logs import LoggedRequest
from kvboost.errors import ConfigError

BLOCK = 100
RESULTS = Path(__file__).parents[2] / "docs" / "concepts" / "scale" / "results.json"


def asked(at_s: float, *names: int, rest: int = BLOCK) -> LoggedRequest:
    num_tokens = BLOCK * (len(names) - 1) + rest
    return LoggedRequest(at_s, num_tokens, np.array(names, np.uint64), BLOCK, None, None)


def pieces(at_s: float, *names: int, sizes: Sequence[float]) -> LoggedRequest:
    blocks = np.array([1 << 40, *names], np.uint64)
    wanted, tokens = np.array(names, np.uint64), np.array(sizes, np.float32)
    return LoggedRequest(at_s, int(sum(sizes)), blocks, BLOCK, wanted, tokens)


def one(*requests: LoggedRequest, **changes: object) -> FleetResult:
    return simulate(requests, Setup(**{"num_replicas": 1, "prefill_tokens_per_s": 100.0} | changes))


def chats(num_chats: int, num_turns: int) -> list[LoggedRequest]:
    """Conversations that grow by a block each turn; block 7 is everybody's, and not worth a way."""
    return [
        asked(turn * 100.0 + chat, 7, *(1000 * chat + 10 + n for n in range(turn + 12)))
        for turn in range(num_turns)
        for chat in range(num_chats)
    ]


def test_only_the_leading_blocks_that_are_held_count() -> None:
    result = one(asked(0, 1, 2, 3), asked(50, 1, 9, 3), asked(99, 1, 2, rest=30))
    assert (result.num_requests, result.prompt_tokens) == (3, 730)
    assert result.local_tokens == 100 + 130  # block 3 stood after another text
    assert result.computed_tokens == 300 + 200


def test_pieces_count_wherever_they_stand() -> None:
    result = one(pieces(0, 5, 6, sizes=(40, 60)), pieces(9, 8, 6, sizes=(10, 60)))
    assert (result.local_tokens, result.computed_tokens) == (60, 110)


def test_the_least_recently_used_block_leaves_first_and_of_a_prompt_the_last() -> None:
    requests = [asked(0, 1, 2), asked(10, 3), asked(20, 1), asked(30, 4), asked(40, 1, 2)]
    assert one(*requests, cache_tokens=300.0).local_tokens == 200  # 1 is newer than 2
    assert one(*requests, cache_tokens=400.0).local_tokens == 300


class SimpleCache:
    """What `_Cache` does, in the plainest way."""

    def __init__(self, max_tokens: float) -> None:
        self.held: OrderedDict[int, float] = OrderedDict()
        self._max_tokens = max_tokens

    def use(self, names: list[int], sizes: list[float], *, is_prefix: bool) -> float:
        found = 0.0
        for name, size in zip(names, sizes, strict=True):
            if name in self.held:
                found += size
            elif is_prefix:
                break
        for name, size in reversed([*zip(names, sizes, strict=True)]):
            self.held[name] = size
            self.held.move_to_end(name)
        while sum(self.held.values()) > self._max_tokens:
            self.held.popitem(last=False)
        return found


@pytest.mark.parametrize("is_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [100.0, 1_000.0, 10_000.0])
def test_a_cache_is_one_of_the_least_recently_used_in_bounded_memory(
    max_tokens: float, is_prefix: bool
) -> None:
    chance = random.Random(5)
    cache, simple = _Cache(max_tokens), SimpleCache(max_tokens)
    for _ in range(2_000):
        first = 20 * chance.randrange(10)
        names = list(range(first, first + chance.randrange(20)))
        if not is_prefix:
            names = chance.choices(range(200), k=len(names))  # some of them twice
        sizes = [1.0 + name % 10 for name in names]
        expected = simple.use(names, sizes, is_prefix=is_prefix)
        assert cache.use(names, sizes, is_prefix=is_prefix)[0] == expected
        assert cache.last_use.keys() == simple.held.keys()
        assert sum(len(used) for _, used, _ in cache._uses) <= 2 * len(simple.held)
        assert len(cache._uses) <= 2 * len(simple.held)


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    result = one(asked(0, 1, 2, 3, 4), asked(50, 1, 2, 3, 4), cache_tokens=200.0)
    assert result.local_tokens == 200


def test_requests_wait_for_those_before_them() -> None:
    result = one(asked(0, 1, 2), asked(1, 3), asked(30, 4))
    assert result.mean_wait_s == pytest.approx((2 + 2 + 1) / 3)
    assert result.p50_wait_s == pytest.approx(2)


def test_the_tier_has_what_another_replica_computed_and_loading_takes_time() -> None:
    setup = {"num_replicas": 2, "routing": "round-robin", "shared_tokens": 1000.0}
    result = one(asked(0, 1, 2), asked(50, 1, 2, 3), shared_tokens_per_s=400.0, **setup)
    assert (result.local_tokens, result.shared_tokens) == (0, 200)
    assert result.mean_wait_s == pytest.approx((2 + 1 + 200 / 400) / 2)


def test_the_tier_is_not_asked_for_what_the_replica_holds() -> None:
    assert one(asked(0, 1), asked(50, 1), shared_tokens=1000.0).shared_tokens == 0


def test_what_warms_the_fleet_is_not_counted() -> None:
    result = simulate([asked(0, 1), asked(50, 1)], Setup(), count_from_s=50)
    assert (result.num_requests, result.local_tokens, result.computed_tokens) == (1, 100, 0)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_is_found_or_computed_on_every_routing(routing: str) -> None:
    setup = Setup(4, routing, cache_tokens=2000.0, shared_tokens=3000.0)
    result = simulate(chats(8, 6), setup)
    found = result.local_tokens + result.shared_tokens
    assert result.prompt_tokens == sum(request.num_tokens for request in chats(8, 6))
    assert found + result.computed_tokens == result.prompt_tokens
    assert found > 0


def test_routing_by_reuse_keeps_conversations_where_they_are() -> None:
    by_routing = {
        name: simulate(chats(41, 6), Setup(8, name, hash_tokens=2 * BLOCK)) for name in ROUTINGS
    }
    one_cache = simulate(chats(41, 6), Setup(1))
    for name in ("reuse", "prefix-hash"):
        assert by_routing[name].local_tokens > 0.95 * one_cache.local_tokens
    for name in ("two-choices", "round-robin"):
        assert by_routing[name].local_tokens < 0.6 * one_cache.local_tokens


def test_queues_limit_how_long_a_popular_text_is_followed() -> None:
    burst = [asked(0.001 * n, 1, 2, 100 + n) for n in range(200)]
    results = {
        name: simulate(burst, Setup(8, name, prefill_tokens_per_s=1000.0, hash_tokens=2 * BLOCK))
        for name in ("prefix-hash", "reuse")
    }
    assert results["prefix-hash"].busiest == 8  # everything at one replica
    assert results["reuse"].busiest < 2
    assert results["reuse"].p95_wait_s < results["prefix-hash"].p95_wait_s / 3


def test_least_loaded_never_queues_while_another_is_idle() -> None:
    burst = [asked(0, n) for n in range(1, 5)]
    setup = Setup(4, "least-loaded", prefill_tokens_per_s=100.0)
    assert simulate(burst, setup).p95_wait_s == pytest.approx(1)


def test_routers_that_do_not_see_each_other_need_reports() -> None:
    setup = {"num_replicas": 8, "num_routers": 5}
    alone = simulate(chats(41, 6), Setup(**setup))
    told = simulate(chats(41, 6), Setup(**setup, report_every_s=1.0))
    assert told.local_tokens > 1.1 * alone.local_tokens


def test_a_lost_replica_gets_nothing_and_comes_back_empty() -> None:
    fleet = Fleet(Setup(2, "reuse"))
    first = fleet.serve(asked(0, 1, 2))
    fleet.lose([first.replica])
    second = fleet.serve(asked(1, 1, 2))
    assert second.replica != first.replica
    assert second.local_tokens == 0
    fleet.restore([first.replica])
    assert fleet.serve(asked(2, 1, 2)).replica == second.replica
    with pytest.raises(ConfigError, match="at least one"):
        fleet.lose(["0", "1"])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_routings_live_with_a_loss(routing: str) -> None:
    fleet = Fleet(Setup(3, routing))
    for request in chats(4, 1):
        fleet.serve(request)
    fleet.lose(["1"])
    assert {fleet.serve(request).replica for request in chats(30, 1)} <= {"0", "2"}
    fleet.restore(["1"])
    assert "1" in {fleet.serve(request).replica for request in chats(60, 1)[30:]}


def test_wrong_setups_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="prefix-hash"):
        Fleet(Setup(routing="random"))
    with pytest.raises(ConfigError, match="at least one replica"):
        Fleet(Setup(num_replicas=0))


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    turns = [(0, [0, 1, 2]), (5, [0, 7, 8]), (60, [0, 1, 2, 3]), (200, [0, 1, 2, 3, 4])]
    rows = [
        {"timestamp": 1000 * at, "input_length": BLOCK_TOKENS * len(ids) - 12, "hash_ids": ids}
        for at, ids in turns
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return Traffic(file)


def test_traffic_has_the_rate_the_turns_and_the_sharing_of_its_trace(traffic: Traffic) -> None:
    requests = list(traffic.requests(1.0, 10_000.0, seed=3))
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert len({int(request.blocks[0]) for request in requests}) == 1
    by_chat: dict[int, list[LoggedRequest]] = {}
    for request in requests:
        by_chat.setdefault(int(request.blocks[1]), []).append(request)
    long = [chat for chat in by_chat.values() if len(chat) == 3]
    assert len(long) / len(by_chat) == pytest.approx(0.5, abs=0.06)
    for chat in long:
        assert [len(request.blocks) for request in chat] == [3, 4, 5]
        assert chat[1].at_s - chat[0].at_s == pytest.approx(60)
        assert chat[1].blocks.tolist() == chat[2].blocks.tolist()[:4]


def test_popular_beginnings_are_shared_by_the_share_that_was_asked_for(traffic: Traffic) -> None:
    requests = list(traffic.requests(5.0, 2000.0, seed=3, popular=0.2))
    longer = [request for request in requests if len(request.blocks) > 5]
    assert len(longer) / len(requests) == pytest.approx(0.2, abs=0.04)
    assert len({int(request.blocks[16]) for request in longer}) == 1
    assert all(request.num_tokens == BLOCK_TOKENS * len(request.blocks) - 12 for request in longer)


def test_tables_of_the_page_are_those_of_the_results() -> None:
    page, results = scale_page.PAGE.read_text(), json.loads(RESULTS.read_text())
    assert sorted(scale_page.TABLE.findall(page)) == sorted(scale_page.TABLES)
    assert page == scale_page.filled(page, results), "python -m benchmarks.pictures"

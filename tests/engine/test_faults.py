"""Shared caches that die, freeze, drag, fill up and lie: every request is answered as without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from servers import Proxy, Server, mooncake_master, redis_server
from trials import DEADLINE_MS, trial
from waiting import wait_until

pytestmark = [pytest.mark.tiny, pytest.mark.servers, pytest.mark.alone]

MAX_PAUSES = 12  # of the breaker, while a trial's fault lasts: they double from a quarter second


def url_of(port: int) -> str:
    return f"redis://127.0.0.1:{port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with redis_server() as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as running:
        yield running


@pytest.fixture(scope="module")
def calm_s() -> float:
    """What a request takes on a server that works."""
    with redis_server() as server, trial("redis", cache_url=url_of(server.port)) as on:
        calm_s = on.run("redis without fault")
        stats = on.stats()
        assert stats["hits"] > 0 and stats["written"] > 0
        assert stats["damaged"] == 0
        return calm_s


def test_a_killed_redis_is_a_miss(server: Server, calm_s: float) -> None:
    with trial("redis", cache_url=url_of(server.port)) as on:
        on.run("redis killed", begin=server.kill, calm_s=calm_s)
        stats = on.stats()
        assert 0 < stats["faults"] == stats["tier_faults"]
        assert stats["dropped"] > 0 and not stats["is_up"]


def test_a_restarted_redis_is_used_again(server: Server, calm_s: float) -> None:
    with trial("redis", cache_url=url_of(server.port)) as on:
        on.run("redis killed and restarted", server.kill, server.start, calm_s)
        assert on.stats()["faults"] > 0
        on.comes_back()


def test_a_frozen_redis_costs_a_few_deadlines(server: Server, calm_s: float) -> None:
    with trial("redis", cache_url=url_of(server.port)) as on:
        on.run("redis frozen and thawed", server.freeze, server.thaw, calm_s)
        assert 0 < on.stats()["faults"] <= MAX_PAUSES
        on.comes_back()


def test_closing_does_not_wait_for_ever_for_a_frozen_redis(server: Server) -> None:
    with trial("redis", cache_url=url_of(server.port)) as on:
        on.run("redis frozen for good", server.freeze)
        assert on.stats()["faults"] > 0


def test_a_frozen_redis_does_not_keep_an_engine_from_starting(
    server: Server, calm_s: float
) -> None:
    server.freeze()
    with trial("redis", cache_url=url_of(server.port)) as on:
        assert not on.stats()["is_up"]
        on.run("redis frozen at the start", end=server.thaw, calm_s=calm_s)
        on.comes_back()


def test_several_clients_and_a_frozen_redis(server: Server) -> None:
    with trial("redis", cache_url=url_of(server.port)) as on:
        calm_s = on.run("redis without fault, 6 clients", num_clients=6)
        on.run("redis frozen, 6 clients", server.freeze, server.thaw, calm_s, num_clients=6)
        assert on.stats()["faults"] > 0
        on.comes_back()


def test_a_disk_goes_on_without_the_redis_below_it(
    server: Server, tmp_path: Path, calm_s: float
) -> None:
    with trial("disk", disk_cache_dir=str(tmp_path), cache_url=url_of(server.port)) as on:
        on.run("redis below a disk killed", server.kill, server.start, calm_s)
        stats = on.stats()
        assert stats["is_up"] and stats["tier_faults"] > stats["faults"] == 0
        on.comes_back()
        on.tier = "redis"
        wait_until(lambda: on.stats()["is_up"])


@pytest.mark.parametrize(
    "slowed",
    [*({"delay_s": share * DEADLINE_MS / 1e3} for share in (0.1, 0.6, 1.3)), {"bytes_per_s": 2e5}],
    ids=str,
)
def test_a_slow_redis(proxy: Proxy, calm_s: float, slowed: dict[str, float]) -> None:
    with trial("redis", cache_url=url_of(proxy.port)) as on:
        on.run(f"redis with {slowed}", partial(proxy.spoil, **slowed), proxy.spoil, calm_s)
        if slowed.get("delay_s", 0) > DEADLINE_MS / 1e3:  # it is left alone
            assert 0 < on.stats()["faults"] <= MAX_PAUSES
        on.comes_back()


@pytest.mark.parametrize(("spoiled", "counted"), [("flips", "damaged"), ("cuts", "faults")])
def test_values_that_are_spoiled_on_their_way_are_not_used(
    proxy: Proxy, calm_s: float, spoiled: str, counted: str
) -> None:
    """A bit is flipped, or the connection ends in the middle of a value."""
    begin = partial(proxy.spoil, **{f"{spoiled}_values": True})
    with trial("redis", cache_url=url_of(proxy.port)) as on:
        on.make_reading_pay()
        on.run(f"redis that {spoiled} values", begin, proxy.spoil, calm_s)
        assert on.stats()[counted] > 0
        on.comes_back()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_full_redis(server: Server, calm_s: float, policy: str) -> None:
    with (
        redis.Redis(port=server.port) as admin,
        trial("redis", cache_url=url_of(server.port)) as on,
    ):

        def fill() -> None:
            used_bytes = admin.info("memory")["used_memory"]
            admin.config_set("maxmemory-policy", policy)
            admin.config_set("maxmemory", used_bytes if policy == "noeviction" else "3mb")

        on.run(f"redis full, {policy}", fill, partial(admin.config_set, "maxmemory", 0), calm_s)
        if policy == "noeviction":
            assert on.stats()["dropped"] > 0
        else:
            assert admin.info("stats")["evicted_keys"] > 0
        on.comes_back()


def wrong_values(admin: redis.Redis, kind: str) -> None:
    """Replace all chunks by others."""
    keys = [key for key in admin.scan_iter(count=1000) if (admin.strlen(key) or 0) > 1000]
    values = {key: admin.get(key) for key in keys}
    for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
        if kind == "garbage":
            admin.set(key, bytes(range(256)) * 8)
        elif kind == "another key's":
            admin.set(key, values[other])
        elif kind == "truncated":
            admin.set(key, values[key][:-100])
        elif kind == "empty":
            admin.set(key, b"")
        else:
            admin.delete(key)
            admin.rpush(key, b"a list")


@pytest.mark.parametrize("kind", ["garbage", "another key's", "truncated", "empty", "a list"])
def test_what_others_wrote_under_our_keys(server: Server, calm_s: float, kind: str) -> None:
    with (
        redis.Redis(port=server.port) as admin,
        trial("redis", cache_url=url_of(server.port)) as on,
    ):
        on.run(
            f"redis with wrong values: {kind}", partial(wrong_values, admin, kind), calm_s=calm_s
        )
        assert on.stats()["damaged"] > 0
        on.comes_back()


@pytest.fixture
def master() -> Iterator[Server]:
    with mooncake_master() as running:
        yield running


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_mooncake_master(master: Server, fault: str) -> None:
    begin, end = (master.kill, master.start) if fault == "killed" else (master.freeze, master.thaw)
    url = f"mooncake://127.0.0.1:{master.port}?segment_bytes={64 << 20}"
    with trial("mooncake", cache_url=url) as on:
        calm_s = on.run("mooncake without fault")
        calm = on.stats()
        assert calm["hits"] > 0  # a busy machine may make it late once: no assertion on faults
        on.run(f"mooncake master {fault}", begin, end, calm_s)
        assert on.stats()["faults"] > calm["faults"]
        on.comes_back()

"""The router on fake replicas: who is asked first, and what it remembers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from kvboost.fleet.messages import Forwarded
from kvboost.fleet.router import ReuseRouter
from kvboost.routing.anchors import find
from kvboost.routing.book import ALL_NAMES, Report
from waiting import in_a_loop

DEPLOYMENT = DeploymentID("EngineReplica", "kvboost")
WORDS = ("acid", "belt", "coal", "dust", "echo", "fern", "gold", "hail", "iris", "jade", "kelp")


def text(seed: int, num_words: int = 400) -> str:
    """Words in an order that depends on the seed."""
    numbers = ((seed * 7919 + step * step * 31 + step * 17) for step in range(num_words))
    return " ".join(f"{WORDS[number % 11]}{number % 97}" for number in numbers)


class FakeReplica:
    max_ongoing_requests = 20
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, name: str, **stats: Any) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats = stats
        self.queue_len = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


def request(content: Any, number: int = 0) -> PendingRequest:
    body = {"messages": [{"role": "user", "content": content}]}
    args = [Forwarded("POST", "/v1/chat/completions", b"", (), b"", body)]
    return PendingRequest(args, {}, RequestMetadata(f"r{number}", f"i{number}"))


class Scene:
    """A router and its replicas, inside a running loop."""

    def __init__(self, num_replicas: int = 4, **arguments: Any) -> None:
        self.router = ReuseRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(**arguments)
        self.replicas = [FakeReplica(f"r{number}") for number in range(num_replicas)]
        self.router.update_replicas(self.replicas)

    def send(self, pending: PendingRequest, number: int) -> None:
        self.router.on_request_routed(pending, self.replicas[number].replica_id, None)

    async def names(self, pending: PendingRequest | None) -> list[list[str]]:
        groups = await self.router.choose_replicas(self.replicas, pending)
        return [[each.replica_id.unique_id for each in group] for group in groups]


@in_a_loop
async def test_an_unknown_prompt_goes_to_one_of_two_by_chance() -> None:
    stand = Scene()
    drawn = [await stand.names(request(text(1))) for _ in range(40)]
    assert all(len(groups) == 1 and len({*groups[0]}) == 2 for groups in drawn)
    assert {name for groups in drawn for name in groups[0]} == {"r0", "r1", "r2", "r3"}
    assert len(await stand.names(None)) == 1


@in_a_loop
async def test_a_prompt_goes_where_its_beginning_went_and_then_to_two_by_chance() -> None:
    stand = Scene()
    stand.send(request(text(1)), 2)
    stand.send(request(text(2)), 3)
    first, *rest = await stand.names(request(text(1) + " and what else?"))
    assert first == ["r2"]
    assert [len(group) for group in rest] == [2]


@in_a_loop
async def test_a_response_goes_where_its_instructions_went() -> None:
    stand = Scene()
    body = {"instructions": text(1), "input": "What now?"}
    asked = Forwarded("POST", "/v1/responses", b"", (), b"", body)
    pending = PendingRequest([asked], {}, RequestMetadata("r", "i"))
    stand.send(request(text(2)), 3)
    stand.send(request(text(1)), 2)
    first, *_ = await stand.names(pending)
    assert first == ["r2"]


@pytest.mark.parametrize(("reuse", "expected"), [("auto", ["r1"]), ("exact", None), ("off", None)])
@in_a_loop
async def test_text_that_moved_counts_where_it_can_be_reused(
    reuse: str, expected: list[str] | None
) -> None:
    stand = Scene(reuse=reuse)
    stand.send(request(text(1)), 1)
    groups = await stand.names(request(text(5) + text(1)))
    assert (groups[0] if len(groups) > 1 else None) == expected


@in_a_loop
async def test_a_long_queue_outweighs_what_a_replica_holds() -> None:
    stand = Scene(slack=3)
    stand.send(request(text(1)), 0)
    for _ in range(3):
        stand.router.on_send_request(stand.replicas[0].replica_id)
    assert (await stand.names(request(text(1))))[0] == ["r0"]
    stand.router.on_send_request(stand.replicas[0].replica_id)
    assert len(await stand.names(request(text(1)))) == 1


@in_a_loop
async def test_requests_of_ray_serve_llm_are_read_too() -> None:
    parts = [{"type": "text", "text": text(1)}]
    chat = SimpleNamespace(messages=[{"role": "user", "content": parts}])
    completion = SimpleNamespace(prompt=text(1))
    stand = Scene()
    metadata = RequestMetadata("a", "a")
    stand.send(PendingRequest([chat, "raw request"], {}, metadata), 3)
    asked = await stand.names(PendingRequest([completion], {}, metadata))
    assert asked[0] == ["r3"]
    assert len(await stand.names(PendingRequest([], {}, metadata))) == 1
    assert len(await stand.names(PendingRequest([7, None], {}, metadata))) == 1


@in_a_loop
async def test_an_adapter_of_ray_serve_llm_counts_more_than_the_prompt() -> None:
    stand = Scene()
    stand.send(request(text(1)), 0)
    stand.replicas[3].multiplexed_model_ids = frozenset({"terse"})
    stand.router.update_replicas(stand.replicas)
    pending = request(text(1))
    pending.metadata.multiplexed_model_id = "terse"
    assert await stand.names(pending) == [["r3"]]


def report(content: str, limit: int = ALL_NAMES) -> dict[str, object]:
    return Report(limit, find(content.encode())).to_wire()


@in_a_loop
async def test_what_replicas_report_is_believed() -> None:
    stand = Scene()
    stand.replicas[1].routing_stats = report(text(1))
    stand.router.update_replicas(stand.replicas)
    assert (await stand.names(request(text(1))))[0] == ["r1"]
    stand.replicas[1].routing_stats = report(text(2))  # the first text was evicted
    stand.router.update_replicas(stand.replicas)
    assert len(await stand.names(request(text(1)))) == 1
    assert (await stand.names(request(text(2))))[0] == ["r1"]


@in_a_loop
async def test_an_old_report_that_comes_again_says_nothing_new() -> None:
    stand = Scene()
    for each in stand.replicas:
        each.routing_stats = report(text(9))
    stand.router.update_replicas(stand.replicas)
    stand.send(request(text(1)), 0)
    for _ in range(3):  # another replica's stats changed: all are broadcast
        stand.router.update_replicas(stand.replicas)
    assert (await stand.names(request(text(1))))[0] == ["r0"]


@in_a_loop
async def test_stats_that_are_no_report_are_passed_over() -> None:
    stand = Scene()
    stand.send(request(text(1)), 0)
    stand.replicas[0].routing_stats = {"limit": "all", "anchors": 7}
    stand.router.update_replicas(stand.replicas)
    assert (await stand.names(request(text(1))))[0] == ["r0"]


@pytest.mark.parametrize("has_died", [True, False])
@in_a_loop
async def test_a_replica_that_left_is_forgotten(has_died: bool) -> None:
    stand = Scene()
    stand.send(request(text(1)), 0)
    gone = stand.replicas[0]
    if has_died:
        stand.router.on_replica_actor_died(gone.replica_id)
    else:
        stand.router.update_replicas(stand.replicas[1:])
    stand.router.update_replicas(stand.replicas)  # a new one with an old name, to see
    assert len(await stand.names(request(text(1)))) == 1


@in_a_loop
async def test_replicas_that_are_no_candidates_are_not_chosen() -> None:
    stand = Scene()
    stand.send(request(text(1)), 0)
    groups = await stand.router.choose_replicas(stand.replicas[1:], request(text(1)))
    assert len(groups) == 1
    assert await stand.router.choose_replicas([], request(text(1))) == []


@in_a_loop
async def test_each_of_many_requests_gets_its_own_replica() -> None:
    stand = Scene(slack=100)
    for number in range(4):
        stand.send(request(text(number)), number)
    pending = [request(text(number % 4), number) for number in range(24)]
    choosing = map(stand.router._choose_replica_for_request, pending)
    chosen = await asyncio.gather(*choosing)
    assert [each.replica_id.unique_id for each in chosen] == ["r0", "r1", "r2", "r3"] * 6


@in_a_loop
async def test_a_full_replica_is_passed_over_and_full_ones_are_not_asked_without_a_pause() -> None:
    stand = Scene(num_replicas=2)
    stand.send(request(text(1)), 0)
    stand.replicas[0].queue_len = 20
    stand.router.on_new_queue_len_info(stand.replicas[0].replica_id, 20)
    chosen = await stand.router._choose_replica_for_request(request(text(1)))
    assert chosen is stand.replicas[1]
    num_asked = 0

    async def full(*, deadline_s: float) -> int:
        nonlocal num_asked
        num_asked += 1
        return 20

    for each in stand.replicas:
        stand.router.on_new_queue_len_info(each.replica_id, 20)
        each.get_queue_len = full  # type: ignore[method-assign]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stand.router._choose_replica_for_request(request(text(1), 1)), 0.5)
    assert 2 <= num_asked <= 40

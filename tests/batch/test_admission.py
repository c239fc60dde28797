"""Queue places, admission and preemption: tenants take turns, nobody waits for ever."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.engine.batch.admission import MOST_PASSED, MOST_PREFILLS, Admission
from kvboost.engine.batch.queue import Capacity

POOL = 1000


def test_a_tenant_alone_has_all_places() -> None:
    places = Capacity(5, 3)
    assert [places.acquire("a", waits=False) for _ in range(6)] == [True] * 5 + [False]


def test_when_places_are_full_others_still_enter_up_to_their_fair_share() -> None:
    places = Capacity(8, 6)
    for _ in range(8):
        assert places.acquire("a", waits=False)
    taken = [places.acquire("b", waits=False) for _ in range(6)]
    assert taken == [True] * 4 + [False] * 2  # half of eight
    assert not places.acquire("a", waits=False)
    assert [places.acquire("c", waits=False) for _ in range(3)] == [True, True, False]  # 14 in all
    for _ in range(5):
        places.release("a")
    assert not places.acquire("a", waits=False)  # it has three of eight, and nine are taken
    places.release("b")
    places.release("b")
    assert places.acquire("a", waits=False)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=80))
def test_places_are_bounded_and_come_back(calls: list[tuple[str, bool]]) -> None:
    places, taken = Capacity(6, 4), Counter[str]()
    for tenant, enters in calls:
        if enters:
            is_taken = places.acquire(tenant, waits=False)
            assert is_taken or taken.total() >= 6
            assert is_taken or taken[tenant] >= 6 / len({*+taken, tenant}) or taken.total() == 10
            taken[tenant] += is_taken
        elif taken[tenant]:
            places.release(tenant)
            taken[tenant] -= 1
        assert taken.total() <= 10
    for tenant in taken.elements():
        places.release(tenant)
    assert all(places.acquire("a", waits=False) for _ in range(6))


def test_who_waits_for_a_place_gets_the_one_that_is_given_back() -> None:
    places = Capacity(1, 0)
    assert places.acquire("a", waits=False)
    waiting = threading.Thread(target=places.acquire, args=("b",), kwargs={"waits": True})
    waiting.start()
    places.release("a")
    waiting.join(60)
    assert not waiting.is_alive()


@dataclass(eq=False)
class Job:
    """What admission sees of a request that runs for some steps."""

    tenant: str
    num_tokens: int
    num_steps: int = 1
    came_at: int = 0
    joined_at: float = 0
    num_passed: int = 0
    is_prefilling: bool = False
    guest: None = None

    num_preempted: int = 0
    grows: int = 0  # tokens a step

    def __post_init__(self) -> None:
        self.request = SimpleNamespace(tenant=self.tenant)
        self.rows = SimpleNamespace(num_shared=0, is_private=False)

    @property
    def num_reserved(self) -> int:
        return self.num_tokens

    @property
    def has_grown(self) -> bool:
        return self.grows > 0


class Scheduler:
    """Admission and steps, without the computing."""

    def __init__(self, max_batch_size: int = 8) -> None:
        self.running: list[Any] = []
        pool = SimpleNamespace(room=lambda sizes, leaving: POOL - sum(most for _, most in sizes))
        parts: Any = SimpleNamespace(
            options=SimpleNamespace(max_batch_size=max_batch_size),
            model=SimpleNamespace(is_alone=lambda _: False),
            piece_tokens=None,
            working_tokens=POOL,
            pool=pool,
        )
        self.admission = Admission(parts, self.running)
        self.now = 1
        self.waits: dict[Any, int] = {}

    def add(self, *jobs: Job) -> None:
        for job in jobs:
            job.came_at = self.now
            self.admission.waiting.add(job)  # type: ignore[arg-type]

    def preempt(self, job: Any) -> None:
        job.num_preempted += 1
        self.running.remove(job)
        self.admission.waiting.put_back(job)

    def step(self, is_full: bool = False) -> None:
        while (job := self.admission.overflow()) is not None:
            self.preempt(job)
        while (chosen := self.admission.next(lambda _: True, is_full=is_full)) is not None:
            job, preempted = chosen
            for each in preempted:
                self.preempt(each)
            self.admission.waiting.take(job)
            job.joined_at = job.joined_at or self.now + len(self.waits) / 1000
            self.waits.setdefault(job, self.now - job.came_at)
            self.running.append(job)
        assert sum(each.num_tokens for each in self.running) <= POOL
        for job in list(self.running):
            job.num_steps -= 1
            job.num_tokens += job.grows
            if job.num_steps == 0:
                self.running.remove(job)
        self.now += 1


def test_a_request_that_fits_passes_one_that_does_not() -> None:
    scheduler = Scheduler()
    scheduler.add(long := Job("a", 900, num_steps=500), Job("a", 900))
    scheduler.step()
    small = [Job("b", 50) for _ in range(100)]
    for job in small:
        scheduler.add(job)
        scheduler.step()
    assert [scheduler.waits[job] for job in small] == [0] * 100
    assert long.num_preempted == 0


@pytest.mark.parametrize("num_tokens", [10, 120])
def test_a_tenant_that_has_everything_gives_way_to_others(num_tokens: int) -> None:
    """Places of the batch (8 x 10 tokens), or the pool (8 x 120)."""
    scheduler = Scheduler()
    scheduler.add(*[hog := Job("a", num_tokens, num_steps=10**6) for _ in range(40)])
    scheduler.step()
    small = [Job("b", 100, num_steps=3) for _ in range(100)]
    for job in small:
        scheduler.add(job)
        scheduler.step()
    assert max(scheduler.waits[job] for job in small) == 0
    counts = Counter(job.tenant for job in scheduler.running)
    assert counts["a"] >= 5 and counts["b"] >= 2
    assert hog.num_preempted == 0  # it never ran
    assert max(job.num_preempted for job in small) == 0


def test_a_tenant_gets_its_share_and_no_more() -> None:
    scheduler = Scheduler()
    scheduler.add(*[Job("a", 10, num_steps=10**6) for _ in range(20)])
    scheduler.step()
    first = list(scheduler.running)
    scheduler.add(*[Job("b", 10, num_steps=10**6) for _ in range(20)])
    for _ in range(50):
        scheduler.step()
        assert Counter(job.tenant for job in scheduler.running) == {"a": 4, "b": 4}
    # The youngest gave way, once, and the oldest go on.
    assert [job.num_preempted for job in first] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_when_outputs_outgrow_the_pool_the_oldest_go_on_and_all_finish() -> None:
    scheduler = Scheduler()
    jobs = [Job("a", 50, num_steps=20, grows=10) for _ in range(16)]  # to 250 of 1000
    scheduler.add(*jobs)
    scheduler.step()
    first = list(scheduler.running)
    assert len(first) == 8
    for _ in range(16 * 20):
        scheduler.step()
    assert not scheduler.running and not len(scheduler.admission.waiting)
    assert sum(job.num_preempted for job in jobs) > 0
    assert first[0].num_preempted == first[1].num_preempted == 0


def test_within_a_tenant_a_request_is_passed_a_limited_number_of_times() -> None:
    scheduler = Scheduler()
    scheduler.add(Job("a", 500, num_steps=60), big := Job("a", 600))
    scheduler.step()
    small = [Job("a", 10) for _ in range(40)]
    for job in small:
        scheduler.add(job)
        scheduler.step()
    assert big.num_passed == MOST_PASSED
    assert sum(job in scheduler.waits for job in small) == MOST_PASSED
    for _ in range(40):
        scheduler.step()
    assert scheduler.waits[big] == 60


def test_a_large_request_is_not_starved_by_small_ones_of_others() -> None:
    scheduler = Scheduler()
    large = Job("a", 900)
    scheduler.add(*[Job("b", 150, num_steps=number + 1) for number in range(6)])
    scheduler.step()
    scheduler.add(large)
    while large not in scheduler.waits:
        scheduler.add(Job("b", 150, num_steps=4))
        scheduler.step()
        assert scheduler.now < 60


def test_a_tenant_has_a_few_prefills_at_once_and_others_are_not_held_up_by_them() -> None:
    scheduler = Scheduler()
    scheduler.add(*[Job("a", 10, 9, is_prefilling=True) for _ in range(6)])
    scheduler.step(is_full=True)
    assert len(scheduler.running) == MOST_PREFILLS
    scheduler.add(short := Job("b", 10))
    scheduler.step(is_full=True)
    assert scheduler.waits[short] == 0


@pytest.mark.parametrize("seed", range(4))
@given(chance=st.randoms(use_true_random=False))
def test_everybody_is_served(seed: int, chance: Any) -> None:
    scheduler = Scheduler(max_batch_size=4)
    jobs = [
        Job(chance.choice("abc"), chance.randint(1, POOL), chance.randint(1, 5)) for _ in range(30)
    ]
    for job in jobs:
        scheduler.add(job)
        if chance.random() < 0.5:
            scheduler.step()
    for _ in range(30 * 5):
        scheduler.step()
    assert set(scheduler.waits) == set(jobs) and not scheduler.running

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import fake_chunk, fill
from kvboost.core import PrefixKey
from kvboost.tiers.memory import MemoryTier
from waiting import at_once


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "discard", "pin"]), st.integers(0, 9), st.integers(1, 60)
    ),
    max_size=80,
)


@given(OPERATIONS, st.integers(1, 100), st.one_of(st.none(), st.integers(1, 5)))
def test_budgets_hold_and_sizes_add_up_whatever_is_done(
    operations: list[tuple[str, int, int]], budget: int, most: int | None
) -> None:
    tier, held = MemoryTier(budget, most), {}
    for name, number, size in operations:
        key = PrefixKey(bytes([number]))
        if name == "put":
            for gone in [key, *tier.put({key: fake_chunk(bytes([number] * size))})]:
                held.pop(gone, None)
            if tier.holds(key):
                held[key] = size
        elif name == "get":
            chunk = tier.get([key]).get(key)
            assert (chunk is not None) == (key in held)
            assert chunk is None or bytes(chunk.frame()) == bytes([number] * held[key])
        elif name == "discard":
            tier.discard([key])
            if not tier.holds(key):
                held.pop(key, None)
        elif name == "pin":
            tier.pin([key], ttl_s=None)
        stats = tier.stats()
        assert stats.size_bytes == sum(held.values()) <= budget
        assert stats.num_entries == len(held) <= (most or len(held))


def test_what_was_used_again_outlives_what_was_only_stored() -> None:
    tier = MemoryTier(budget_bytes=40)
    fill(tier, "abc")
    tier.get([PrefixKey(b"a")])
    assert fill(tier, "defg") == [b"b", b"c", b"d"]
    assert tier.holds(PrefixKey(b"a"))


def test_a_frame_larger_than_the_budget_is_refused() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "a")
    assert fill(tier, "x", size_bytes=21) == [b"x"]
    assert tier.holds(PrefixKey(b"a"))


def test_a_pin_keeps_its_entry_until_it_runs_out() -> None:
    clock = Clock()
    tier = MemoryTier(budget_bytes=20, clock=clock)
    fill(tier, "ab")
    assert tier.pin([PrefixKey(b"a"), PrefixKey(b"-")], ttl_s=5) == [b"a"]
    assert fill(tier, "c") == [b"b"]
    assert tier.num_pinned == 1
    clock.now = 6
    assert fill(tier, "d") == [b"a"]


def test_pins_that_take_most_of_the_budget_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier(budget_bytes=25)
    fill(tier, "ab")
    assert tier.pin([PrefixKey(b"a")], ttl_s=None) == [b"a"] and not caplog.records
    assert tier.pin([PrefixKey(b"b")], ttl_s=None) == [b"b"]
    assert "80% of the memory for K/V" in caplog.text


def test_nothing_is_kept_where_pins_leave_no_room() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "ab")
    tier.pin([PrefixKey(b"a"), PrefixKey(b"b")], ttl_s=None)
    assert fill(tier, "c") == [b"c"]
    assert tier.holds(PrefixKey(b"a")) and tier.holds(PrefixKey(b"b"))


def test_threads_do_not_break_the_budget() -> None:
    tier = MemoryTier(budget_bytes=100)

    def work(seed: int) -> None:
        for step in range(300):
            fill(tier, [f"{(seed * step) % 37}"], size_bytes=7)
            tier.get([PrefixKey(str(step % 37).encode())])
            assert tier.stats().size_bytes <= 100

    at_once(work, range(1, 9))


def owned(owner: int, size_bytes: int = 1000) -> Any:
    return fake_chunk(bytes(size_bytes), owner)


def test_who_is_over_quota_makes_room_from_what_is_his_own() -> None:
    tier = MemoryTier(budget_bytes=10_000, quota_bytes=3_000)
    for number in range(3):
        tier.put({PrefixKey(b"b%d" % number): owned(2)})
    evicted = [tier.put({PrefixKey(b"a%d" % number): owned(1)}) for number in range(5)]
    assert evicted == [[], [], [], [b"a0"], [b"a1"]]
    assert all(tier.holds(PrefixKey(b"b%d" % number)) for number in range(3))
    assert tier.put({PrefixKey(b"large"): owned(1, 3_001)}) == [b"large"]


def numbered(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(8, "big"))


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python are executed."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines


def at_quota(num_frames: int) -> MemoryTier:
    """Tenant 2 has reached its quota, and its chunks rank behind those of tenant 1."""
    tier = MemoryTier(1000 * num_frames, quota_bytes=500 * num_frames)
    for number in range(num_frames):
        tier.put({numbered(number): owned(1 + 2 * number // num_frames)})
    tier.get([numbered(number) for number in range(num_frames // 2, num_frames)])
    return tier


def mostly_pinned(num_frames: int) -> MemoryTier:
    tier = MemoryTier(1000 * num_frames)
    for number in range(num_frames):
        tier.put({numbered(number): owned(2)})
    tier.pin([numbered(number) for number in range(num_frames * 4 // 5)], ttl_s=3600)
    return tier


@pytest.mark.parametrize("filled", [at_quota, mostly_pinned])
def test_a_put_into_a_full_tier_takes_the_same_steps_at_any_size(
    filled: Callable[[int], MemoryTier],
) -> None:
    def most_lines(num_frames: int) -> int:
        tier = filled(num_frames)
        new = range(2 * num_frames, 2 * num_frames + 300)
        return max(lines_run(lambda n=n: tier.put({numbered(n): owned(2)})) for n in new)

    # A round of ageing begins within these puts, and must be spread over many of them.
    assert most_lines(16_000) < 1.5 * most_lines(1_000)


def test_a_tenant_that_stores_a_lot_leaves_room_for_the_writes_of_others() -> None:
    tier = MemoryTier(budget_bytes=200)
    owners = {b"a": 1, b"b": 2}
    for name, owner in owners.items():
        for number in range(10):
            tier.put({PrefixKey(name + b"%d" % number): owned(owner, 10)})
    held = {
        name: [n for n in range(10) if tier.hold(PrefixKey(name + b"%d" % n))] for name in owners
    }
    assert len(held[b"a"]) == 7 and len(held[b"b"]) == 2
    for number in held[b"a"]:
        tier.release(PrefixKey(b"a%d" % number))
    assert all(tier.hold(PrefixKey(b"b%d" % number)) for number in range(7))


def test_a_tenant_alone_has_all_the_room_for_writes() -> None:
    tier = MemoryTier(budget_bytes=200)
    for number in range(20):
        tier.put({PrefixKey(b"%d" % number): owned(1, 10)})
    assert sum(tier.hold(PrefixKey(b"%d" % number)) for number in range(20)) == 10


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), max_size=80))
def test_chunks_whose_pins_and_holds_have_ended_can_be_evicted_again(
    operations: list[tuple[int, int]],
) -> None:
    clock = Clock()
    tier = MemoryTier(10_000, quota_bytes=9_999, clock=clock)
    for number in range(10):
        tier.put({numbered(number): owned(number % 2)})
    for kind, number in operations:
        key = numbered(number)
        if kind < 2:
            tier.pin([key], ttl_s=2 + 50 * kind)
        elif kind == 2:
            tier.erase([key])
        elif kind == 3 and tier.hold(key):
            tier.put({numbered(99): owned(1)})
            tier.release(key)
        elif kind == 4:
            tier.get([key])
        else:
            tier.put({key: owned(number % 2)})
        clock.now += 1
    clock.now += 100
    tier.admit({numbered(100): owned(0, 9_999)})
    assert tier.stats().num_entries == 1 and tier.holds(numbered(100))


def test_what_is_held_stays_until_it_is_released() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "ab")
    tier.hold(PrefixKey(b"a"))
    tier.hold(PrefixKey(b"a"))
    assert fill(tier, "c") == [b"b"]
    tier.release(PrefixKey(b"a"))
    assert fill(tier, "d") == [b"c"]
    tier.release(PrefixKey(b"a"))
    assert fill(tier, "e") == [b"a"]


def test_a_pin_outlives_another_put_of_its_key() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "ab")
    tier.pin([PrefixKey(b"a")], ttl_s=None)
    fill(tier, "a")
    fill(tier, "cdef")
    assert tier.holds(PrefixKey(b"a"))


def test_what_is_about_to_be_read_comes_in_whatever_it_is_worth() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "ab")
    for _ in range(50):
        tier.get([PrefixKey(b"a"), PrefixKey(b"b")])
    assert fill(tier, "c") == [b"c"]
    assert tier.admit({PrefixKey(b"c"): fake_chunk(bytes(10))}) in ([b"a"], [b"b"])

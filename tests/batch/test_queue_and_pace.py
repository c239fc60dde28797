"""Who is next, how much of a prompt a step takes, and whose rows can be shared: no model needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import ChunkKeys, PrefixKey, Span
from kvboost.engine.batch.live import LEAST_SHARED, LivePrompt, LivePrompts
from kvboost.engine.batch.pace import LEAST_TOKENS, MOST_TOKENS, PROMPT_SHARE, SHARED_STEP_S, Pace
from kvboost.engine.batch.queue import MOST_SKIPPED, FairQueue, StepTime


@dataclass
class Call:
    tenant: str


@dataclass(eq=False)
class Waiting:
    """What a queue sees of a member."""

    request: Call
    num_tokens: int
    joined_at: float = 0.0


def member(tenant: str = "", num_tokens: int = 100) -> Any:
    return Waiting(Call(tenant), num_tokens)


def take(queue: FairQueue, is_ready: Any = lambda _: True) -> Any:
    chosen = next(filter(is_ready, queue.in_order(lambda _: 0.0)), None)
    if chosen is not None:
        queue.take(chosen)
    return chosen


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    queue = FairQueue()
    for _ in range(40):
        queue.add(member("long", 1000))
        queue.add(member("short", 100))
    tenants = [take(queue).request.tenant for _ in range(22)]
    assert tenants.count("long") == 2


def test_who_was_away_has_no_claim_for_that_time() -> None:
    queue = FairQueue()
    for _ in range(30):
        queue.add(member("a"))
    for _ in range(10):
        take(queue)
    for _ in range(10):
        queue.add(member("b"))
    assert [take(queue).request.tenant for _ in range(6)].count("b") == 3


def test_who_is_not_ready_keeps_its_place_in_line() -> None:
    queue, first, second = FairQueue(), member(), member()
    queue.add(first)
    queue.add(second)
    assert take(queue, lambda each: each is second) is second
    assert take(queue, lambda each: False) is None
    assert take(queue) is first


def test_a_preempted_request_is_first_of_its_tenant_and_is_not_counted_twice() -> None:
    queue = FairQueue()
    first, second, other = member("a"), member("a"), member("b")
    for each in (first, second, other):
        queue.add(each)
    served = queue._served["a"]
    queue.take(first)
    first.joined_at = 1.0
    queue.put_back(first)
    assert [each for each in queue.in_order(lambda _: 0.0) if each is not other] == [first, second]
    queue.take(first)
    assert queue._served["a"] == served + first.num_tokens


def test_the_tenant_with_the_smallest_share_is_next_and_of_equals_the_newest() -> None:
    queue = FairQueue()
    for tenant in "abc":
        queue.add(member(tenant))
    shares = {"a": 0.5, "b": 0.2, "c": 0.2}
    assert [each.request.tenant for each in queue.in_order(shares.__getitem__)] == ["c", "b", "a"]


def test_tenants_that_left_are_forgotten() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.add(member(f"tenant {number}"))
        take(queue)
    assert not queue._served and not queue._waiting and len(queue) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 500)) | st.just(None),
        max_size=60,
    )
)
def test_nobody_is_lost_and_nobody_is_served_twice(calls: list[tuple[str, int] | None]) -> None:
    queue, waiting = FairQueue(), []
    for call in calls:
        if call is not None:
            waiting.append(member(*call))
            queue.add(waiting[-1])
        elif waiting:
            chosen = take(queue)
            same = [each for each in waiting if each.request.tenant == chosen.request.tenant]
            assert chosen is same[0]
            waiting.remove(chosen)
        assert len(queue) == len(waiting) and {*map(id, queue)} == {*map(id, waiting)}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 400))
def test_a_tenant_that_waits_is_served_no_less_than_any_other(tenants: str, size: int) -> None:
    queue, served = FairQueue(), dict.fromkeys("abc", 0)
    for tenant in tenants:
        queue.add(member(tenant, size))
    while len(queue):
        waiting = {each.request.tenant for each in queue}
        chosen = take(queue)
        served[chosen.request.tenant] += size
        least = min(served[tenant] for tenant in waiting)
        assert served[chosen.request.tenant] <= least + size


def test_without_answers_a_step_takes_as_much_of_the_prompts_as_it_can() -> None:
    assert Pace().prompt_tokens(0, 5, is_shared=False) == MOST_TOKENS
    assert LEAST_TOKENS <= Pace().prompt_tokens(3, 1, is_shared=False) < MOST_TOKENS


def settled(decode_s: float, token_s: float, target_ms: int | None = None) -> Pace:
    """After many steps on a machine of that speed."""
    pace = Pace(target_ms)
    for _ in range(100):
        pace.observe(decode_s, 8, 0)
        num_prompt = pace.prompt_tokens(8, 1, is_shared=False)
        pace.observe(decode_s + num_prompt * token_s, 8, num_prompt)
    return pace


@pytest.mark.parametrize("token_s", [0.0002, 0.001, 0.0015])
def test_by_default_prompts_get_their_share_of_each_step(token_s: float) -> None:
    added_s = token_s * settled(0.1, token_s).prompt_tokens(8, 1, is_shared=False)
    assert added_s == pytest.approx(PROMPT_SHARE * 0.1, rel=0.05)


@pytest.mark.parametrize("target_ms", [200, 300, 500])
def test_steps_are_filled_up_to_the_target(target_ms: int) -> None:
    num_prompt = settled(0.1, 0.001, target_ms).prompt_tokens(8, 1, is_shared=False)
    assert 0.1 + 0.001 * num_prompt == pytest.approx(target_ms / 1e3, rel=0.02)


@pytest.mark.parametrize("target_ms", [1, 100, 101])
def test_a_prompt_goes_on_though_decoding_alone_misses_the_target(target_ms: int) -> None:
    assert settled(0.1, 0.01, target_ms).prompt_tokens(8, 1, is_shared=False) == LEAST_TOKENS


def test_a_target_holds_however_many_wait_for_their_first_token() -> None:
    pace = settled(0.1, 0.001, target_ms=250)
    assert pace.prompt_tokens(2, 8, is_shared=False) == pace.prompt_tokens(8, 1, is_shared=False)


def test_a_slow_step_among_many_hardly_changes_the_next() -> None:
    pace = settled(0.1, 0.0005)
    before = pace.prompt_tokens(8, 1, is_shared=False)
    pace.observe(0.1 + 2 * before * 0.0005, 8, before)
    assert pace.prompt_tokens(8, 1, is_shared=False) >= 0.8 * before


def test_by_default_more_room_where_more_wait_for_their_first_token_than_for_a_next() -> None:
    pace = settled(0.1, 0.001)
    assert pace.prompt_tokens(8, 8, is_shared=False) == pace.prompt_tokens(8, 1, is_shared=False)
    assert pace.prompt_tokens(2, 8, is_shared=False) > 3 * pace.prompt_tokens(8, 8, is_shared=False)


def test_steps_are_short_while_other_tenants_may_come() -> None:
    pace = settled(0.1, 0.002)
    assert pace.prompt_tokens(0, 8, is_shared=False) == MOST_TOKENS
    assert 0.002 * pace.prompt_tokens(0, 8, is_shared=True) == pytest.approx(SHARED_STEP_S, rel=0.1)
    beside_s = 0.1 + 0.002 * pace.prompt_tokens(1, 9, is_shared=True)
    assert beside_s == pytest.approx(SHARED_STEP_S, rel=0.1)
    assert pace.prompt_tokens(8, 8, is_shared=True) == pace.prompt_tokens(8, 8, is_shared=False)
    streamed = settled(9.0, 0.002)  # reads its weights from a disk for each step
    assert streamed.prompt_tokens(0, 8, is_shared=True) == MOST_TOKENS


@given(
    st.lists(
        st.tuples(st.floats(1e-9, 1e3), st.integers(0, 300), st.integers(0, 2000)), max_size=30
    ),
    st.integers(1, 300),
    st.integers(0, 300),
    st.none() | st.integers(1, 10**6),
)
def test_whatever_was_measured_a_prompt_goes_on(
    steps: list[tuple[float, int, int]],
    num_decoding: int,
    num_waiting: int,
    target_ms: int | None,
) -> None:
    pace = Pace(target_ms)
    for seconds, decoding, prompt in steps:
        if decoding or prompt:
            pace.observe(seconds, decoding, prompt)
    assert (
        LEAST_TOKENS
        <= pace.prompt_tokens(num_decoding, num_waiting, is_shared=False)
        <= MOST_TOKENS
    )


def keys_of(names: str) -> list[ChunkKeys]:
    """A chunk for each letter, named by the letters up to it."""
    prefixes = [PrefixKey(names[: end + 1].encode()) for end in range(len(names))]
    return [ChunkKeys(PrefixKey(b""), prefix) for prefix in prefixes]


def spans_of(names: str, size: int = LEAST_SHARED) -> list[Span]:
    return [Span(size * number, size * (number + 1)) for number in range(len(names))]


def found(live: LivePrompts, names: str, size: int = LEAST_SHARED) -> tuple[LivePrompt | None, int]:
    return live.find(keys_of(names), spans_of(names, size))


def test_a_prompt_that_begins_alike_is_found() -> None:
    live, owner = LivePrompts(), LivePrompt()
    live.add(owner, keys_of("abc"))
    assert found(live, "abx") == (owner, 2 * LEAST_SHARED)
    assert found(live, "abcd") == (owner, 3 * LEAST_SHARED)
    assert found(live, "xbc") == (None, 0)


def test_little_in_common_is_not_worth_sharing() -> None:
    live = LivePrompts()
    live.add(LivePrompt(), keys_of("abc"))
    assert found(live, "abx", size=LEAST_SHARED // 2 - 1) == (None, 0)


def test_the_next_one_takes_over_when_an_owner_has_ended() -> None:
    live, first, second = LivePrompts(), LivePrompt(num_ready=9), LivePrompt(num_ready=5)
    live.add(first, keys_of("abc"))
    live.add(second, keys_of("abd"))
    assert found(live, "abz") == (first, 2 * LEAST_SHARED)
    live.remove(first)
    assert found(live, "abz") == (second, 2 * LEAST_SHARED)
    assert found(live, "abc") == (second, 2 * LEAST_SHARED)
    live.remove(second)
    live.remove(second)
    assert found(live, "abz") == (None, 0) and len(live) == 0


def test_of_several_the_one_that_is_furthest_is_asked() -> None:
    live, slow, fast = LivePrompts(), LivePrompt(num_ready=100), LivePrompt(num_ready=300)
    for owner in (slow, fast):
        live.add(owner, keys_of("abc"))
    assert found(live, "abc")[0] is fast


def steps(num_steps: int, costs: dict[str, tuple[float, int]]) -> dict[str, tuple[int, float]]:
    """Steps and time of tenants, by what each adds to a step in seconds and tokens."""
    clock, members = StepTime(), [member(tenant) for tenant in costs]
    counts = dict.fromkeys(costs, 0)
    passed_s = 0.0
    used_s = dict.fromkeys(costs, 0.0)
    for _ in range(num_steps):
        tenants = [each.request.tenant for each in clock.in_turn(members)]
        seconds = sum(costs[tenant][0] for tenant in tenants)
        clock.charge(seconds, [(tenant, costs[tenant][1] * [0]) for tenant in tenants])
        passed_s += seconds
        for tenant in tenants:
            counts[tenant] += 1
            used_s[tenant] += costs[tenant][0]
    return {tenant: (counts[tenant], used_s[tenant] / passed_s) for tenant in costs}


def test_a_heavy_tenant_slows_a_light_one_by_half() -> None:
    outcome = steps(200, {"light": (0.1, 1), "heavy": (0.9, 70)})
    assert outcome["light"][0] == 200  # in each step
    assert 0.4 < outcome["light"][1] < 0.6
    for num_tenants in (3, 5):
        light = {f"light{number}": (0.1, 1) for number in range(num_tenants - 1)}
        many = steps(400, light | {"heavy": (0.9, 70)})
        assert 0.5 / num_tenants < many["heavy"][1] < 2 / num_tenants


def test_tenants_that_ask_for_the_same_share_all_steps() -> None:
    outcome = steps(100, {"a": (0.1, 8), "b": (0.1, 8), "c": (0.11, 8)})
    assert [num for num, _ in outcome.values()] == [100, 100, 100]
    assert steps(100, {"a": (0.9, 70)}) == {"a": (100, 1.0)}


def test_a_tenant_that_comes_late_has_no_claim_for_the_past() -> None:
    clock, early, late = StepTime(), [member("a"), member("b")], member("late")
    for _ in range(100):
        clock.charge(1.0, [(each.request.tenant, [0]) for each in clock.in_turn(early)])
    turns = []
    for _ in range(20):
        tenants = {each.request.tenant for each in clock.in_turn([*early, late])}
        clock.charge(1.0, [(tenant, [0]) for tenant in tenants])
        turns.append(tenants)
    assert turns[:2] == 2 * [{"late"}] and all(len(tenants) == 3 for tenants in turns[2:])


def test_a_tenant_that_comes_again_and_again_is_no_newcomer() -> None:
    clock, old, again = StepTime(), member("old"), member("again")
    old_s = 0.0
    for number in range(99):
        present = [old, again] if number % 3 else [old]
        tenants = {each.request.tenant for each in clock.in_turn(present)}
        clock.charge(1.0, [(tenant, [0]) for tenant in tenants])
        old_s += 1.0 / len(tenants) if "old" in tenants else 0.0
    assert old_s > 0.45 * 99  # a newcomer each time, the other would have two thirds


def test_a_tenant_that_used_an_idle_engine_owes_nothing() -> None:
    clock, heavy, other = StepTime(), member("heavy"), member("other")
    for present in [[heavy]] * 50 + [[other]]:
        clock.charge(1.0, [(each.request.tenant, [0]) for each in clock.in_turn(present)])
    assert clock.in_turn([heavy, other]) == [heavy, other]


def test_new_tenants_that_keep_coming_do_not_stop_one() -> None:
    clock, turns = StepTime(), []
    for number in range(100):
        present = [member("old"), member(f"new {number // 2}")]
        tenants = {each.request.tenant for each in clock.in_turn(present)}
        seconds = 1.0 if "old" in tenants else 0.1
        clock.charge(seconds, [(tenant, [0]) for tenant in tenants])
        turns.append("old" in tenants)
    assert sum(turns) >= 100 // (MOST_SKIPPED + 1)

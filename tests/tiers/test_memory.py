import threading

from hypothesis import given
from hypothesis import strategies as st

from fakes import fill
from kvboost.core import PrefixKey
from kvboost.tiers.memory import MemoryTier


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
            for gone in [key, *tier.put(key, memoryview(bytes([number] * size)))]:
                held.pop(gone, None)
            if tier.get(key) is not None:
                held[key] = size
        elif name == "get":
            frame = tier.get(key)
            assert (frame is not None) == (key in held)
            assert frame is None or bytes(frame) == bytes([number] * held[key])
        elif name == "discard" and tier.discard(key):
            held.pop(key, None)
        elif name == "pin":
            tier.pin([key], ttl_s=None)
        stats = tier.stats()
        assert stats.size_bytes == sum(held.values()) <= budget
        assert stats.num_entries == len(held) <= (most or len(held))


def test_what_was_used_again_outlives_what_was_only_stored() -> None:
    tier = MemoryTier(budget_bytes=40)
    fill(tier, "abc")
    tier.get(PrefixKey(b"a"))
    assert fill(tier, "defgh") == [b"b", b"c", b"d", b"e"]
    assert tier.get(PrefixKey(b"a")) is not None


def test_protection_ends_for_what_is_not_used_for_long() -> None:
    tier = MemoryTier(budget_bytes=50)
    fill(tier, "abcde")
    for name in b"abcde":
        tier.get(PrefixKey(bytes([name])))
    assert fill(tier, "f") == [b"a"]


def test_a_frame_larger_than_the_budget_is_refused() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "a")
    assert fill(tier, "x", size_bytes=21) == [b"x"]
    assert tier.get(PrefixKey(b"a")) is not None


def test_a_pin_keeps_its_entry_until_it_runs_out() -> None:
    clock = Clock()
    tier = MemoryTier(budget_bytes=20, clock=clock)
    fill(tier, "ab")
    assert tier.pin([PrefixKey(b"a"), PrefixKey(b"-")], ttl_s=5) == 1
    assert fill(tier, "c") == [b"b"]
    assert tier.stats().num_pinned == 1
    clock.now = 6
    assert fill(tier, "d") == [b"a"]


def test_nothing_is_kept_where_pins_leave_no_room() -> None:
    tier = MemoryTier(budget_bytes=20)
    fill(tier, "ab")
    tier.pin([PrefixKey(b"a"), PrefixKey(b"b")], ttl_s=None)
    assert fill(tier, "c") == [b"c"]
    assert tier.get(PrefixKey(b"a")) is not None and tier.get(PrefixKey(b"b")) is not None


def test_threads_do_not_break_the_budget() -> None:
    tier, over = MemoryTier(budget_bytes=100), []

    def work(seed: int) -> None:
        for step in range(300):
            fill(tier, [f"{(seed * step) % 37}"], size_bytes=7)
            tier.get(PrefixKey(str(step % 37).encode()))
            over.append(tier.stats().size_bytes > 100)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(over) and len(over) == 2400

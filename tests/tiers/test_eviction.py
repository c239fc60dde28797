from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvboost.core import PrefixKey
from kvboost.tiers.eviction import ReuseDensity

SIZE = 10


def keys(names: str) -> list[PrefixKey]:
    return [PrefixKey(name.encode()) for name in names]


def number_key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(4, "big"))


def add(eviction: ReuseDensity, names: str) -> None:
    eviction.add(dict.fromkeys(keys(names), SIZE))


def order(eviction: ReuseDensity) -> str:
    return b"".join(eviction.victims()).decode()


class Loop:
    """A full tier of `num_keys`, in front of a stream of prompts of one chunk."""

    def __init__(self, num_keys: int) -> None:
        self.eviction = ReuseDensity(num_keys * SIZE)
        self.num_keys, self.held = num_keys, set[PrefixKey]()

    def request(self, number: int) -> bool:
        key = number_key(number)
        is_hit = key in self.held
        if is_hit:
            self.eviction.use([key])
            return True
        self.eviction.add({key: SIZE})
        self.held.add(key)
        excess = max(0, len(self.held) - self.num_keys)
        for victim in list(islice(self.eviction.victims(), excess)):
            self.eviction.remove(victim)
            self.held.remove(victim)
        return False


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove"]), st.integers(0, 12), st.integers(1, 60)),
    max_size=120,
)


@given(OPERATIONS, st.integers(1, 200))
def test_victims_are_the_keys_that_are_here_each_once(
    operations: list[tuple[str, int, int]], budget: int
) -> None:
    eviction, here = ReuseDensity(budget), set()
    for name, number, size in operations:
        key = number_key(number)
        if name == "add" and key not in here:
            eviction.add({key: size})
            here.add(key)
        elif name == "use" and key in here:
            eviction.use([key])
        elif name == "remove" and key in here:
            eviction.remove(key)
            here.remove(key)
        victims = list(eviction.victims())
        assert len(victims) == len(here) and set(victims) == here


def test_the_end_of_a_prompt_leaves_before_its_beginning() -> None:
    eviction = ReuseDensity(1000 * SIZE)
    add(eviction, "cba")
    assert order(eviction) == "cba"
    eviction.use(keys("ba"))
    assert order(eviction) == "cba"


def test_before_anything_is_learned_the_oldest_leaves_first() -> None:
    eviction = ReuseDensity(4 * SIZE)
    for name in "abcdefgh":
        add(eviction, name)
    assert order(eviction) == "abcdefgh"


def test_what_was_used_outlives_what_was_only_stored() -> None:
    eviction = ReuseDensity(100 * SIZE)
    add(eviction, "abc")
    eviction.use(keys("a"))
    add(eviction, "d")
    assert order(eviction) == "bcda"


def test_keys_that_come_back_after_they_left_are_kept_then() -> None:
    """Recency and frequency have no hits here: all keys leave before they come back."""
    loop, hits = Loop(num_keys=50), []
    for number in range(4000):
        for once in range(5):
            loop.request(1000 + 5 * number + once)
        hits.append(loop.request(number % 40))
    assert sum(hits[:40]) == 0 and sum(hits[-1000:]) > 900


def test_part_of_a_loop_too_large_for_the_tier_stays() -> None:
    """Recency has no hits at all in a loop that is longer than the tier."""
    loop = Loop(num_keys=50)
    hits = [loop.request(number % 100) for _ in range(60) for number in range(100)]
    assert sum(hits[-2000:]) > 0.35 * 2000


def test_a_scan_does_not_displace_what_is_used_regularly() -> None:
    loop = Loop(num_keys=50)
    hits = []
    for number in range(5000):
        loop.request(1000 + number)
        hits.append(loop.request(number % 40))
    assert sum(hits[-1000:]) > 900


def test_keys_that_left_are_forgotten_in_the_end() -> None:
    loop = Loop(num_keys=20)
    for number in range(5000):
        loop.request(number)
    most = (loop.eviction.AGES[-1] + 1) * loop.num_keys + loop.num_keys
    assert len(loop.held) == 20 < len(loop.eviction._known) <= most


def test_the_same_calls_give_the_same_order() -> None:
    def run() -> list[PrefixKey]:
        loop = Loop(num_keys=30)
        for number in range(2000):
            loop.request(number * number % 97)
        return list(loop.eviction.victims())

    assert run() == run()


def test_a_use_counts_at_the_age_the_key_had() -> None:
    eviction = ReuseDensity(100 * SIZE)
    add(eviction, "a")
    eviction.add({number_key(number): SIZE for number in range(60)})  # 0.6 budgets later
    eviction.use(keys("a"))
    used = eviction._counts[0].used
    assert [age for age, count in enumerate(used) if count] == [3]
    assert eviction.AGES[2] <= 0.6 < eviction.AGES[3]

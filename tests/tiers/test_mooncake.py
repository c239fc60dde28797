import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes import check_with_threads, random_frames
from kvboost.core import PrefixKey
from kvboost.errors import TierUnavailable
from kvboost.tiers.mooncake import MooncakeTier
from servers import Server, free_port, mooncake_master
from waiting import wait_until

pytestmark = [pytest.mark.servers, pytest.mark.alone]

MB = 1_000_000
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def master() -> Iterator[Server]:
    with mooncake_master() as running:
        yield running


@pytest.fixture(scope="module")
def holder(master: Server) -> Iterator[MooncakeTier]:
    """Gives the store its memory."""
    yield from opened(master, 256 * MB)


@pytest.fixture(scope="module")
def tier(master: Server, holder: MooncakeTier) -> Iterator[MooncakeTier]:
    """Has no memory of its own: everything goes over the network."""
    yield from opened(master, 0)


def opened(master: Server, segment_bytes: int) -> Iterator[MooncakeTier]:
    made = open_tier(master, segment_bytes)
    yield made
    made.close()


def open_tier(master: Server, segment_bytes: int, options: str = "") -> MooncakeTier:
    url = f"mooncake://127.0.0.1:{master.port}?segment_bytes={segment_bytes}{options}"
    return MooncakeTier(url, TIMEOUT_S)


def works(tier: MooncakeTier) -> bool:
    frames = random_frames(2, 1000)
    try:
        return tier.put(frames) == [] and tier.get(list(frames)) == frames
    except TierUnavailable:
        return False


@pytest.mark.parametrize("size_bytes", [1, 36, MB, 3 * MB, 10 * MB])
def test_what_was_put_is_got_also_by_others(
    tier: MooncakeTier, holder: MooncakeTier, size_bytes: int
) -> None:
    frames = random_frames(3, size_bytes)
    assert tier.put(frames) == []
    assert tier.get(list(frames)) == frames
    assert holder.get(list(frames)) == frames
    tier.discard(frames)
    assert holder.get(list(frames)) == {}


def test_many_keys_of_many_sizes_keep_their_order(tier: MooncakeTier) -> None:
    frames = {
        key: frame for n in range(1, 30) for key, frame in random_frames(5, 97 * n * n).items()
    }
    assert tier.put(frames) == []
    missing = list(random_frames(150, 0))
    asked = [key for pair in zip(frames, missing, strict=False) for key in pair]
    assert tier.get(asked) == frames
    assert tier.get(missing) == {}
    assert tier.get([]) == {}
    assert tier.put({}) == []
    tier.discard([*frames, *missing])
    assert tier.get(asked) == {}


def test_frames_that_cannot_pass_are_returned(tier: MooncakeTier) -> None:
    frames = random_frames(1, 0) | random_frames(1, 33 << 20)
    small = random_frames(1, 10)
    assert tier.put(frames | small) == list(frames)
    assert tier.get([*frames, *small]) == small


def test_what_is_put_twice_is_kept_once(tier: MooncakeTier) -> None:
    frames = random_frames(2, 1000)
    assert tier.put(frames) == []
    assert tier.put(frames) == []
    assert tier.get(list(frames)) == frames


def test_a_discarded_key_can_be_written_anew(tier: MooncakeTier) -> None:
    key = PrefixKey(os.urandom(32))
    for text in (b"first", b"the second"):
        tier.put({key: memoryview(text)})
        assert tier.get([key]) == {key: text}
        tier.discard([key])


def test_threads_get_their_own_answers(tier: MooncakeTier) -> None:
    check_with_threads(tier, num_rounds=10, num_frames=4)


def test_a_full_store_returns_what_it_refuses_or_forgets_what_is_old(master: Server) -> None:
    with mooncake_master() as another:
        tier = open_tier(another, 32 * MB)
        refused, frames = [], random_frames(60, MB)
        for key, frame in frames.items():
            refused += tier.put({key: frame})
        got = tier.get(list(frames))
        assert 0 < len(got) < 60
        assert refused
        assert got == {key: frames[key] for key in got}
        assert not set(refused) & set(got)
        tier.close()


@pytest.mark.timeout(120)
def test_a_restarted_master_is_found_again() -> None:
    with mooncake_master() as master:
        tier = open_tier(master, 64 * MB)
        assert works(tier)
        master.kill()
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                tier.get(list(random_frames(3, 0)))
            with pytest.raises(TierUnavailable):
                tier.put(random_frames(1, 1000))
            with pytest.raises(TierUnavailable):
                tier.discard(random_frames(1, 0))
        master.start()
        wait_until(lambda: works(tier))
        tier.close()


@pytest.mark.timeout(120)
def test_a_frozen_master_is_a_fault_until_it_moves_again() -> None:
    with mooncake_master() as master:
        tier = open_tier(master, 64 * MB)
        assert works(tier)
        master.freeze()
        with pytest.raises(TierUnavailable):
            tier.get(list(random_frames(3, 0)))
        with pytest.raises(TierUnavailable):
            tier.put(random_frames(1, 1000))
        master.thaw()
        wait_until(lambda: works(tier))
        tier.close()


@pytest.mark.timeout(120)
def test_an_end_while_calls_wait_does_not_crash() -> None:
    with mooncake_master() as master:
        tier = open_tier(master, 64 * MB)
        master.freeze()
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(tier.get, list(random_frames(3, 0))) for _ in range(3)]
            tier.close()
        assert [type(call.exception()) for call in calls] == [TierUnavailable] * 3
        master.thaw()


@pytest.mark.timeout(120)
def test_a_master_that_comes_later_is_found() -> None:
    with mooncake_master() as master:
        master.kill()
        tier = open_tier(master, 64 * MB)
        with pytest.raises(TierUnavailable):
            tier.get([PrefixKey(bytes(32))])
        assert tier.stats().num_entries == 0
        master.start()
        wait_until(lambda: works(tier))
        tier.close()


HOLDER = """
import sys
from kvboost.tiers.mooncake import MooncakeTier
tier = MooncakeTier(sys.argv[1], 1.0)
tier.put({bytes(32): memoryview(b"mine")})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_frames_of_a_process_that_died_are_a_fault_and_then_missing() -> None:
    with mooncake_master("--client_ttl=3") as master:
        url = f"mooncake://127.0.0.1:{master.port}?segment_bytes={64 * MB}"
        command = [sys.executable, "-c", HOLDER, url]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        with process, process.stdin, process.stdout:
            assert process.stdout.readline() == b"ready\n"
            tier, key = open_tier(master, 0), PrefixKey(bytes(32))
            assert tier.get([key]) == {key: b"mine"}
            process.kill()
            process.wait()
            with pytest.raises(TierUnavailable):
                tier.get([key])

            def is_missing() -> bool:
                try:
                    return tier.get([key]) == {}
                except TierUnavailable:
                    return False

            wait_until(is_missing)
            tier.close()


def test_calls_after_the_end_and_a_second_end_are_harmless(master: Server) -> None:
    tier = open_tier(master, 0)
    tier.close()
    tier.close()
    with pytest.raises(TierUnavailable, match="closed"):
        tier.get([PrefixKey(bytes(32))])


@pytest.mark.parametrize("ending", ["tier.close()", "", "raise SystemExit(0)"])
def test_a_process_ends_quietly_however_it_ends(master: Server, ending: str) -> None:
    code = "import sys\nfrom kvboost.tiers.mooncake import MooncakeTier\n"
    code += "tier = MooncakeTier(sys.argv[1])\ntier.get([bytes(32)])\n" + ending
    url = f"mooncake://127.0.0.1:{master.port}?segment_bytes={16 << 20}"
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nobody_there_is_a_fault_and_not_an_error_at_start() -> None:
    tier = MooncakeTier(f"mooncake://127.0.0.1:{free_port()}", TIMEOUT_S)
    with pytest.raises(TierUnavailable):
        tier.get([PrefixKey(bytes(32))])
    tier.close()

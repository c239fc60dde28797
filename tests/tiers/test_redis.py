import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from fakes import check_with_threads, random_frames
from kvboost.core import PrefixKey
from kvboost.errors import TierUnavailable
from kvboost.tiers.redis import RedisTier, _wire
from servers import Proxy, Server, free_port, redis_server

pytestmark = [pytest.mark.servers, pytest.mark.alone]

MB = 1_000_000
T = TypeVar("T")


def patiently(call: Callable[[], T]) -> T:
    """What a healthy server answers; on a busy machine it too may be later than the deadline."""
    for _ in range(20):
        with suppress(TierUnavailable):
            return call()
    return call()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as running:
        yield running


@pytest.fixture
def tier(server: Server) -> Iterator[RedisTier]:
    made = RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=5)
    yield made
    made.close()


@pytest.fixture
def open_tier() -> Iterator[Callable[..., RedisTier]]:
    made: list[RedisTier] = []

    def make(url: str, timeout_s: float = 5) -> RedisTier:
        made.append(RedisTier(url, timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("size_bytes", [0, 1, 36, 16 << 10, (16 << 10) + 1, MB, 3 * MB, 10 * MB])
def test_what_was_put_is_got(tier: RedisTier, size_bytes: int) -> None:
    frames = random_frames(3, size_bytes)
    assert tier.put(frames) == []
    assert tier.get(list(frames)) == frames
    tier.discard(frames)


def test_many_keys_of_many_sizes_keep_their_order(tier: RedisTier) -> None:
    frames = {key: frame for n in range(40) for key, frame in random_frames(10, 37 * n * n).items()}
    assert tier.put(frames) == []
    missing = list(random_frames(200, 0))
    asked = [key for pair in zip(frames, missing, strict=False) for key in pair]
    assert tier.get(asked) == {key: frames[key] for key in asked if key in frames}
    assert tier.get(missing) == {}
    assert tier.get([]) == {}
    assert tier.put({}) == []


def test_views_of_other_things_than_bytes_are_stored_whole(tier: RedisTier) -> None:
    words = memoryview(bytearray(40_000)).cast("I")
    words[7] = 99
    key = PrefixKey(bytes(32))
    tier.put({key: words})
    assert tier.get([key])[key] == words.cast("B")


def test_a_discarded_frame_is_gone_for_everybody(
    tier: RedisTier, server: Server, open_tier: Callable[..., RedisTier]
) -> None:
    other = open_tier(f"redis://127.0.0.1:{server.port}")
    frames = random_frames(3, 100)
    other.put(frames)
    first, *rest = frames
    tier.discard([first])
    tier.discard([])
    assert other.get(list(frames)) == {key: frames[key] for key in rest}


def test_the_last_of_two_writers_is_read(
    tier: RedisTier, server: Server, open_tier: Callable[..., RedisTier]
) -> None:
    other, key = open_tier(f"redis://127.0.0.1:{server.port}"), PrefixKey(os.urandom(32))
    tier.put({key: memoryview(b"older")})
    other.put({key: memoryview(b"newer")})
    assert tier.get([key]) == {key: b"newer"}


def test_prefixes_part_what_is_stored(server: Server, open_tier: Callable[..., RedisTier]) -> None:
    ours, theirs = (open_tier(f"redis://127.0.0.1:{server.port}?prefix={p}") for p in ("a:", "b:"))
    frames = random_frames(1, 10)
    ours.put(frames)
    assert theirs.get(list(frames)) == {}
    assert ours.get(list(frames)) == frames


def test_what_is_not_used_is_forgotten(server: Server, open_tier: Callable[..., RedisTier]) -> None:
    tier = open_tier(f"redis://127.0.0.1:{server.port}?ttl_s=1.5")
    (used, frame), (unused, _) = frames = list(random_frames(2, 100).items())
    tier.put(dict(frames))
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert tier.get([used]) == {used: frame}
        time.sleep(0.05)
    assert tier.get([unused]) == {}


def test_a_unix_socket_works(tmp_path: Path, open_tier: Callable[..., RedisTier]) -> None:
    with redis_server("--unixsocket", str(tmp_path / "socket")):
        tier, frames = open_tier(f"unix://{tmp_path}/socket?prefix=x"), random_frames(4, MB)
        tier.put(frames)
        assert tier.get(list(frames)) == frames


def test_the_password_is_needed_and_never_shown(open_tier: Callable[..., RedisTier]) -> None:
    with redis_server("--requirepass", "right/one") as server:
        place, frames = f"127.0.0.1:{server.port}", random_frames(1, 10)
        knowing = open_tier(f"redis://:right%2Fone@{place}")
        knowing.put(frames)
        assert knowing.get(list(frames)) == frames
        for url in (f"redis://:secretword@{place}", f"redis://{place}"):
            with pytest.raises(TierUnavailable, match="redis://127") as caught:
                open_tier(url).get(list(frames))
            assert "secretword" not in str(caught.value)


def test_tls_is_spoken_and_certificates_are_checked(
    tmp_path: Path, open_tier: Callable[..., RedisTier]
) -> None:
    with redis_server(tls_folder=tmp_path) as server:
        url = f"rediss://localhost:{server.port}"
        tier = open_tier(f"{url}?ssl_ca_certs={tmp_path}/certificate.pem")
        frames = random_frames(4, MB)
        assert tier.put(frames) == []
        assert tier.get(list(frames)) == frames
        with pytest.raises(TierUnavailable, match=r"(?i)certificate"):
            open_tier(url).get(list(frames))


def test_frames_that_a_full_server_refuses_are_returned(
    open_tier: Callable[..., RedisTier],
) -> None:
    with redis_server("--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as server:
        tier, frames = open_tier(f"redis://127.0.0.1:{server.port}"), random_frames(20, MB)
        refused = tier.put(frames)
        assert 0 < len(refused) < 20
        kept = {key: frame for key, frame in frames.items() if key not in refused}
        assert tier.get(list(frames)) == kept
        tier.discard(kept)
        assert tier.put(random_frames(1, MB)) == []


def test_a_server_that_evicts_takes_everything(open_tier: Callable[..., RedisTier]) -> None:
    with redis_server("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier, frames = open_tier(f"redis://127.0.0.1:{server.port}"), random_frames(20, MB)
        assert tier.put(frames) == []
        got = tier.get(list(frames))
        assert 0 < len(got) < 20
        assert got == {key: frames[key] for key in got}


def test_a_value_of_another_kind_is_no_frame_and_no_fault(tier: RedisTier, server: Server) -> None:
    (strange, frame), *rest = random_frames(5, 1000).items()
    tier.put(dict(rest))
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        other.sendall(b"".join(map(bytes, _wire([(b"RPUSH", b"kvboost:" + strange, b"a list")]))))
        assert other.recv(100) == b":1\r\n"
    assert tier.get([strange, *dict(rest)]) == {strange: b"", **dict(rest)}
    tier.put({strange: frame})
    assert tier.get([strange]) == {strange: frame}


def test_a_replica_that_may_not_write_is_a_fault(open_tier: Callable[..., RedisTier]) -> None:
    with redis_server("--replicaof", "127.0.0.1", str(free_port())) as server:
        tier = open_tier(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(TierUnavailable):
            tier.put(random_frames(2, 10))


def test_a_restarted_server_is_found_again(open_tier: Callable[..., RedisTier]) -> None:
    with redis_server() as server:
        tier, frames = open_tier(f"redis://127.0.0.1:{server.port}"), random_frames(3, 1000)
        tier.put(frames)
        server.kill()
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                tier.get(list(frames))
            with pytest.raises(TierUnavailable):
                tier.put(frames)
            with pytest.raises(TierUnavailable):
                tier.discard(frames)
        server.start()
        assert tier.get(list(frames)) == {}
        assert tier.put(frames) == []
        assert tier.get(list(frames)) == frames


@pytest.mark.timeout(60)
def test_a_frozen_server_is_a_fault_until_it_moves_again(
    open_tier: Callable[..., RedisTier],
) -> None:
    with redis_server() as server:
        tier, frames = open_tier(f"redis://127.0.0.1:{server.port}", 0.3), random_frames(3, 3 * MB)
        tier.put(frames)
        server.freeze()
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                tier.get(list(frames))
            with pytest.raises(TierUnavailable):
                tier.put(frames)
        server.thaw()
        assert patiently(lambda: tier.get(list(frames))) == frames


def test_nobody_there_is_a_fault_and_not_an_error_at_start(
    open_tier: Callable[..., RedisTier],
) -> None:
    tier = open_tier(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(TierUnavailable):
        tier.get([PrefixKey(bytes(32))])
    assert tier.stats().num_entries == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["flip_at", "drop_at"])
def test_a_spoilt_answer_never_reaches_a_later_question(
    server: Server, open_tier: Callable[..., RedisTier], fault: str
) -> None:
    frames = random_frames(6, 100) | random_frames(2, MB)
    keys = list(frames)
    with Proxy(server.port) as proxy:
        tier = open_tier(f"redis://127.0.0.1:{proxy.port}", 0.15)
        patiently(lambda: tier.put(frames))
        num_faults = 0
        for offset in [*range(8), 50, *range(106, 116), 700, MB, 2 * MB]:
            proxy.spoil(**{fault: offset})
            try:
                # What is inside of a frame is checked by who reads it, with the key.
                assert set(tier.get(keys)) <= set(keys)
            except TierUnavailable:
                num_faults += 1
            proxy.spoil()
            assert patiently(lambda: tier.get(keys[::-1])) == frames
        assert num_faults >= 6


def test_a_spoilt_confirmation_is_a_fault(
    server: Server, open_tier: Callable[..., RedisTier]
) -> None:
    with Proxy(server.port) as proxy:
        tier, frames = open_tier(f"redis://127.0.0.1:{proxy.port}", 0.3), random_frames(3, 100)
        patiently(lambda: tier.put(frames))
        for offset in range(5):
            proxy.spoil(flip_at=offset)
            with pytest.raises(TierUnavailable):
                tier.put(frames)
            proxy.spoil()
            assert patiently(lambda: tier.put(frames)) == []


@pytest.mark.timeout(60)
def test_a_late_answer_is_not_waited_for_and_not_taken_for_another(
    server: Server, open_tier: Callable[..., RedisTier]
) -> None:
    with Proxy(server.port) as proxy:
        tier, frames = open_tier(f"redis://127.0.0.1:{proxy.port}", 0.3), random_frames(5, 100)
        patiently(lambda: tier.put(frames))
        proxy.spoil(delay_s=1.0)
        with pytest.raises(TierUnavailable):
            tier.get(list(frames)[:1])
        proxy.spoil()
        later = list(frames)[1:]
        assert patiently(lambda: tier.get(later)) == {key: frames[key] for key in later}


def test_a_slow_line_is_still_a_line(server: Server, open_tier: Callable[..., RedisTier]) -> None:
    with Proxy(server.port) as proxy:
        tier, frames = open_tier(f"redis://127.0.0.1:{proxy.port}", 5), random_frames(2, MB)
        tier.put(frames)
        proxy.spoil(bytes_per_s=4 * MB)
        assert tier.get(list(frames)) == frames


def test_threads_get_their_own_answers(tier: RedisTier) -> None:
    check_with_threads(tier, num_rounds=15, num_frames=8)

"""Deleting: nothing of it is served again, by any process, and nothing of it stays in the store."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from batching import WAIT_S, greedy
from fakes import GEOMETRY, FakeSlots, FaultyDisk, FaultyTier, WordTokenizer, store_of, words
from kvboost import KVBoost
from kvboost.codecs.frame import write
from kvboost.codecs.raw import RawCodec
from kvboost.core import Entry, FrameKey, MatchKind, Namespace, PrefixKey, Provenance, Span
from kvboost.engine import contents, prefill
from kvboost.errors import TierUnavailable
from kvboost.reuse.chunks import split
from kvboost.reuse.keys import derive, namespace
from kvboost.reuse.store import commit
from kvboost.tiers import stack, urls
from kvboost.tiers.disk import segment
from kvboost.tiers.disk.tier import DiskTier
from kvboost.tiers.epochs import epoch_key, owner
from servers import Server, redis_server
from tiny_models import SUPPORTED, build
from waiting import wait_until

pytestmark = pytest.mark.tiny

SECRET = words(100, seed=1)  # of the tenant whose text is deleted
OTHERS = words(100, seed=2)
ALICE, BOB = {"tenant": "alice"}, {"tenant": "bob"}


@contextmanager
def engine_of(**options: object) -> Iterator[KVBoost]:
    settled: dict[str, object] = {"chunk_size": 16, "tier_deadline_ms": 2000}
    model = build(*SUPPORTED["llama"])
    with KVBoost(model, WordTokenizer(), **(settled | options)) as engine:
        yield engine


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model of a few thousand weights no tier is worth waiting for."""
    monkeypatch.setattr(stack, "LEAST_WAIT_S", 60.0)


def cached(engine: KVBoost, tokens: list[int], **whose: str) -> int:
    return engine.generate([*tokens, 9], 1, **whose).cached_tokens


def said(tokens: list[int]) -> bytes:
    """A part of a text as frames hold it."""
    return np.asarray(tokens[20:28], "<u4").tobytes()


def in_redis(server: Server, part: bytes) -> bool:
    client = redis.Redis(port=server.port)
    return any(part in (client.get(key) or b"") for key in client.scan_iter())


def in_files(folder: Path, part: bytes) -> bool:
    return any(part in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def store_both(engine: KVBoost) -> None:
    engine.generate(SECRET, 1, **ALICE)
    engine.generate(OTHERS, 1, **BOB)
    engine.flush()


@pytest.mark.parametrize("tokens", [None, SECRET])
def test_what_only_a_shared_tier_has_is_deleted_there(
    tokens: list[int] | None, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = FaultyTier()
    monkeypatch.setattr(urls, "_open_shared", lambda *_: shared)
    with engine_of(cache_url="redis://shared") as engine:
        store_both(engine)
    assert any(said(SECRET) in frame for frame in shared.frames.values())
    with engine_of(cache_url="redis://shared") as engine:  # and has nothing in memory
        assert engine.contents.delete(tokens, **ALICE).pending == ()
        assert not any(said(SECRET) in frame for frame in shared.frames.values())
        assert cached(engine, SECRET, **ALICE) == 0
        assert cached(engine, OTHERS, **BOB) == len(OTHERS)


def test_a_chunk_that_only_begins_like_a_deleted_text_stays() -> None:
    mine, other = [*SECRET[:40], *words(8, 3)], [*SECRET[:40], *words(20, 4)]
    with engine_of() as engine:
        engine.generate(other, 1)
        engine.generate(mine, 1)
        engine.flush()
        engine.contents.delete(mine, tenant="")
        kept = {chunk["position"] for chunk in engine.contents.chunks("", 100)}
        assert 32 in kept and 0 not in kept  # the third chunk of the other prompt
        assert cached(engine, mine) == 0


def test_a_text_is_deleted_wherever_it_stands_and_with_what_follows_it() -> None:
    page = words(96, seed=5)
    with engine_of(reuse="auto") as engine:
        engine._parts.cost.pays = lambda *_: True
        engine.generate([*words(21, 6), *page, *words(30, 7)], 1)
        engine.generate(SECRET[:40], 4)
        engine.flush()
        assert engine.contents.delete(page, tenant="").num_deleted > 0
        assert engine.contents.delete(SECRET[:40], tenant="").num_deleted == 3  # and the answer
        moved = engine.explain([*words(40, 8), *page, 9])
        assert sum(len(s.span) for s in moved.spans if s.kind.value == "moved") < 16
        assert cached(engine, SECRET[:40]) == 0


def test_every_copy_of_a_text_is_deleted() -> None:
    page = words(96, seed=5)
    with engine_of(reuse="exact") as engine:
        for seed in range(8):
            engine.generate([*words(21, 60 + seed), *page, *words(30, 70 + seed)], 1)
        engine.flush()
        engine.contents.delete(page, tenant="")
        space = engine._parts.store.index.spaces()[0]
        text = np.array(page, "<u4").tobytes()
        left = engine._parts.store.index.entries(space, 1000)
        assert left and not [entry for entry in left if entry.tokens in text]


@pytest.mark.parametrize("tokens", [None, SECRET])
def test_nothing_of_a_request_that_runs_while_its_text_is_deleted_is_stored(
    tokens: list[int] | None,
) -> None:
    begun = threading.Event()
    with engine_of() as engine:
        ticket = engine.submit(SECRET, greedy(300), listener=lambda _: begun.set(), **ALICE)
        assert begun.wait(WAIT_S)
        engine.contents.delete(tokens, **ALICE)
        assert not ticket.future.done()
        ticket.result(WAIT_S)
        engine.flush()
        assert cached(engine, SECRET, **ALICE) == 0


@pytest.mark.parametrize("moment", ["fill", "commit"])
def test_a_text_deleted_beside_a_request_takes_nothing_else_with_it(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the request begins, after the deletion has; and while it is being stored."""
    system, user = words(160, seed=8), words(48, seed=9)
    with engine_of() as engine:
        engine.warm(system, pin=True)
        engine.generate(SECRET, 1)
        engine.flush()
        commit, room = prefill.commit, prefill._room_beside
        look_below, others = contents.prefetch, list[threading.Thread]()
        is_filled, is_deleted = threading.Event(), threading.Event()

        def delete() -> None:
            engine.contents.delete(SECRET, tenant="")
            is_deleted.set()

        def ask() -> None:
            engine.generate([*SECRET, *user] if moment == "fill" else [*system, *user], 1)

        def beside(work: Callable[[], None]) -> None:
            if not others:
                others.append(threading.Thread(target=work))
                others[0].start()

        def commit_late(*given: Any, **how: Any) -> list[FrameKey]:
            new = commit(*given, **how)
            beside(delete)
            assert is_deleted.wait(WAIT_S)
            return new

        def look_late(*given: Any) -> Any:
            beside(ask)
            assert is_filled.wait(WAIT_S)
            return look_below(*given)

        def room_late(*given: Any) -> Any:
            is_filled.set()
            return room(*given)

        monkeypatch.setattr(prefill, "commit", commit_late)
        monkeypatch.setattr(prefill, "_room_beside", room_late)
        monkeypatch.setattr(contents, "prefetch", look_late)
        (delete if moment == "fill" else ask)()
        others[0].join(WAIT_S)
        engine.flush()
        assert engine.cache_stats()["pinned_chunks"] == 10
        assert cached(engine, system) == 160 and cached(engine, SECRET) == 0


def test_a_disk_forgets_for_good(tmp_path: Path) -> None:
    options = {"disk_cache_dir": str(tmp_path / "kv"), "max_disk_bytes": 8 << 20}
    with engine_of(**options) as engine:
        store_both(engine)
    assert in_files(tmp_path, said(SECRET))
    with engine_of(**options) as engine:
        assert cached(engine, SECRET, **ALICE) == len(SECRET)
        assert engine.contents.delete(None, **ALICE).pending == ()
        assert not in_files(tmp_path, said(SECRET))
        assert in_files(tmp_path, said(OTHERS))
    with engine_of(**options) as engine:
        assert cached(engine, SECRET, **ALICE) == 0
        assert cached(engine, OTHERS, **BOB) == len(OTHERS)
        engine.flush()
    with engine_of(**options) as engine:  # in the new epoch things are found again
        assert cached(engine, SECRET, **ALICE) == len(SECRET)


def test_a_disk_forgets_what_is_left_when_a_file_was_lost(tmp_path: Path) -> None:
    options = {"disk_cache_dir": str(tmp_path), "max_disk_bytes": 2**20}
    with engine_of(**options) as engine:
        store_both(engine)
        for path in tmp_path.glob("segment-*"):
            path.unlink()
        engine.generate([1, *SECRET], 1, **ALICE)
        assert engine.contents.delete(None, **ALICE).pending == ()
        engine.flush()
    assert not in_files(tmp_path, said(SECRET))


def test_a_disk_that_is_down_keeps_its_deletion_pending(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr(urls, "_open_shared", lambda *_: disk)
    monkeypatch.setattr("kvboost.engine.contents.ERASING_S", 0.2)
    with engine_of(cache_url="redis://disk") as engine:
        store_both(engine)
        disk.fault = "down"
        deletion = engine.contents.delete(None, **ALICE)
        assert deletion.num_deleted == 7 and len(deletion.pending) == 1
        assert cached(engine, SECRET, **ALICE) == 0
        disk.fault = ""
        wait_until(lambda: not any(owner("alice", 0) in frame for frame in disk.frames.values()))
        assert cached(engine, OTHERS, **BOB) == len(OTHERS)


@pytest.mark.servers
@pytest.mark.alone
def test_redis_frozen_while_a_tenant_is_deleted(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.engine.contents.ERASING_S", 0.5)
    with redis_server() as server:
        url = {"cache_url": f"redis://127.0.0.1:{server.port}"}
        with engine_of(**url) as engine, engine_of(**url) as other:
            store_both(engine)
            assert cached(other, SECRET, **ALICE) == len(SECRET)
            server.freeze()
            assert engine.contents.delete(None, **ALICE).pending == ("redis",)
            report = engine.explain([*SECRET, 9], **ALICE)  # an answer would be stored anew
            assert report.tokens(MatchKind.EXACT) == 0
            server.thaw()
            wait_until(lambda: not in_redis(server, owner("alice", 0)))
            assert cached(other, SECRET, **ALICE) == 0  # though it had it in memory
            assert cached(engine, OTHERS, **BOB) == len(OTHERS)


@pytest.mark.servers
@pytest.mark.alone
def test_redis_restarted_after_a_tenant_was_deleted(patient: None, tmp_path: Path) -> None:
    """It comes back with what it had saved before the deletion."""
    with redis_server("--dir", str(tmp_path)) as server:
        url = {"cache_url": f"redis://127.0.0.1:{server.port}"}
        with engine_of(**url) as engine:
            store_both(engine)
            redis.Redis(port=server.port).save()
            assert engine.contents.delete(None, **ALICE).pending == ()
            assert not in_redis(server, said(SECRET))
            server.kill()
            server.start()
            assert in_redis(server, said(SECRET))
            guarded = engine._parts.store.tiers._below[0]
            wait_until(lambda: guarded.tier is not None)
            assert cached(engine, [*SECRET[:-1], 8], **ALICE) == 0
            engine.flush()  # it has told the server the epoch again
            with engine_of(**url) as fresh:
                assert cached(fresh, SECRET[-50:], **ALICE) == 0
                assert fresh._parts.store.epochs.of("alice") == 1


def test_a_deletion_is_not_lost_on_a_process_that_did_not_know_the_epoch() -> None:
    """It deletes while the shared tier is down; others had deleted before, and stored since."""
    shared = FaultyTier()
    store = store_of(below=[shared], deadline_s=1.0)
    store.tiers._below[0]._fail(TierUnavailable("down"))
    shared.raise_epoch(epoch_key("t"), 3)
    assert store.delete_all("t", store.tiers.patience()) == 0
    assert store.epochs.of("t") == 1
    wait_until(lambda: shared.epoch(epoch_key("t")) == 4)
    assert store.tiers.not_erased(10) == [] and store.epochs.of("t") == 4
    store.tiers.close()


def test_a_tier_that_does_not_answer_has_no_epoch_overwritten() -> None:
    shared = FaultyTier()
    store = store_of(below=[shared], deadline_s=0.1)
    store.epochs.learn(epoch_key("t"), 1)
    shared.raise_epoch(epoch_key("t"), 2)
    shared.fault = "frozen"
    store.refresh("t", store.tiers.patience())
    shared.fault = ""
    shared.thawed.set()
    wait_until(lambda: store.tiers.stats()["faulty-0"]["is_up"])
    store.refresh("t", store.tiers.patience())
    assert store.epochs.of("t") == shared.epoch(epoch_key("t")) == 2
    store.tiers.close()


@pytest.mark.servers
@pytest.mark.alone
def test_a_redis_that_lets_keys_expire_keeps_epochs(patient: None) -> None:
    with redis_server() as server:
        client, key = redis.Redis(port=server.port), b"kvboost:" + epoch_key("alice")
        with engine_of(cache_url=f"redis://127.0.0.1:{server.port}?ttl_s=100") as engine:
            store_both(engine)
            assert engine.contents.delete(None, **ALICE).pending == ()
            assert cached(engine, SECRET, **ALICE) == 0
            assert client.get(key) == b"1" and client.ttl(key) == -1


@pytest.mark.servers
@pytest.mark.alone
def test_a_second_process_that_serves_from_memory_forgets_too(patient: None) -> None:
    with redis_server() as server:
        url = {"cache_url": f"redis://127.0.0.1:{server.port}"}
        with engine_of(**url) as engine, engine_of(**url) as other:
            store_both(engine)
            assert cached(other, SECRET, **ALICE) == len(SECRET)
            other.flush()
            assert engine.contents.delete(None, **ALICE).pending == ()
            assert cached(other, SECRET, **ALICE) == 0
            assert cached(other, OTHERS, **BOB) == len(OTHERS)


def test_an_owner_is_the_tenant_since_its_last_deletion_under_any_model() -> None:
    spaces = [namespace(model, "t", None, epoch=1) for model in (b"one", b"two")]
    assert spaces[0] != spaces[1]
    assert {space[:16] for space in spaces} == {owner("t", 1)}
    assert len({owner("t", 0), owner("t", 1), owner("t1", 0), owner("", 0)}) == 4


def test_the_later_epoch_stays_in_a_shared_tier() -> None:
    shared, key = FaultyTier(), epoch_key("t")
    assert shared.raise_epoch(key, 5) == 0
    assert shared.raise_epoch(key, 3) == 5
    assert shared.epoch(key) == 5


def test_namespaces_are_forgotten_with_their_last_chunk() -> None:
    store = store_of()
    for number in range(100):
        space = namespace(b"model", str(number), None)
        chunks = split(words(20, number), 8)
        keys = derive(chunks, space)
        commit(FakeSlots(20), chunks, keys, space, store)
        for key in keys:
            store.tiers.discard(key.prefix)
            store.index.remove(key.prefix)
    assert store.index.spaces() == []
    assert not store.index._known_spaces


def frame_of(tenant: str, num_tokens: int, seed: int) -> tuple[FrameKey, memoryview]:
    tokens = np.asarray(words(num_tokens, seed), "<u4").tobytes()
    key = PrefixKey(sha256(b"%d" % seed).digest())
    space = Namespace(owner(tenant, 0) + bytes(16))
    entry = Entry(tokens, Provenance.EXACT, key, None, None, 0, space)
    slots = FakeSlots(num_tokens, seed)
    return key, write(entry, slots.read(Span(0, num_tokens)), RawCodec(GEOMETRY))


def test_a_disk_forgets_what_later_frames_have_left_of_earlier_ones(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    sizes = [random.Random(seed).choice([128, 128, 128, 40, 77]) for seed in range(60)]
    secrets = [frame_of("alice", size, seed) for seed, size in enumerate(sizes)]
    sizes = [random.Random(seed).choice([128, 20, 33, 61]) for seed in range(25)]
    later = [frame_of("bob", size, 1000 + seed) for seed, size in enumerate(sizes)]
    for key, frame in [*secrets, *later]:
        tier.put({key: frame})
    kept = [key for key, _ in later if tier.holds(key)]
    tier.erase([], [owner("alice", 0)])
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("segment-*"))
    for _, frame in secrets:
        pieces = [bytes(frame[at : at + 64]) for at in range(256, frame.nbytes - 64, 64)]
        assert not [piece for piece in pieces if piece.strip(b"\0") and piece in stored]
    assert len(kept) > 10
    assert all(tier.get([key])[key] == dict(later)[key] for key in kept)
    tier.close()


def test_frames_are_read_while_others_are_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    frames = dict(frame_of(name, 40, seed) for seed, name in enumerate(["alice", "bob"]))
    tier.put(frames)
    is_syncing, goes_on = threading.Event(), threading.Event()

    def slow(file: int) -> None:
        is_syncing.set()
        assert goes_on.wait(WAIT_S)

    monkeypatch.setattr(segment.os, "fsync", slow)
    erasing = threading.Thread(target=tier.erase, args=([], [owner("alice", 0)]))
    erasing.start()
    assert is_syncing.wait(WAIT_S)
    found: list[int] = []
    reading = threading.Thread(target=lambda: found.extend(map(len, [tier.get([*frames])])))
    reading.start()
    reading.join(5)
    assert found == [1]
    goes_on.set()
    erasing.join(WAIT_S)
    tier.close()

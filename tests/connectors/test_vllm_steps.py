"""The scheduler's side does no work twice: a step costs what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fake_vllm import (
    DOCUMENT,
    MODEL,
    PREFIX,
    FakeRequest,
    changes_of,
    knowing,
    moved_prompt,
    scheduler_side,
)
from fakes import words
from kvboost.connectors.vllm import choice as module
from kvboost.connectors.vllm.messages import Change, Facts, Report
from kvboost.core import Chunk
from kvboost.reuse.keys import derive
from kvboost.reuse.lookup import find, find_moved
from kvboost.tiers.epochs import epoch_key

NUM_STEPS = 50


class Counted:
    """Tokens that are hashed, and lookups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed = self.exact = self.moved = 0

        def derived(chunks: Sequence[Chunk], *rest: Any) -> Any:
            self.hashed += sum(len(chunk.span) for chunk in chunks)
            return derive(chunks, *rest)

        def found(*arguments: Any) -> Any:
            self.exact += 1
            return find(*arguments)

        def found_moved(*arguments: Any, **options: Any) -> Any:
            self.moved += 1
            return find_moved(*arguments, **options)

        for name, counted in (("derive", derived), ("find", found), ("find_moved", found_moved)):
            monkeypatch.setattr(module, name, counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


class NeverRead(Sequence[int]):
    """The tokens of a request that nobody may look at."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, place: Any) -> Any:
        raise AssertionError("tokens of a request without reuse were read")


def test_requests_without_reuse_are_not_read_hashed_or_looked_up(counted: Counted) -> None:
    side = knowing(must_prefetch=True)
    off = {"kvboost": {"reuse": "off"}}
    requests = [FakeRequest(f"r{n}", words(16, seed=n), kv_transfer_params=off) for n in range(16)]
    for request in requests:
        request.all_token_ids = NeverRead()  # type: ignore[assignment]
        side.add(request)
    known = {request.request_id: request for request in requests}
    for _ in range(NUM_STEPS):
        assert [side.match(request, 0) for request in requests] == [(0, False)] * 16
        side.step(dict.fromkeys(known, 40), known, ())
        side.report(None)
    for request in requests:
        request.num_computed_tokens = 2000
        side.allocated(request, 0)
        assert side.finish(request) == (False, None)
    assert (counted.hashed, counted.exact, counted.moved) == (0, 0, 0)


@pytest.mark.parametrize("must_prefetch", [False, True])
def test_a_prompt_is_hashed_once_while_it_waits_for_blocks(
    counted: Counted, must_prefetch: bool
) -> None:
    side, request = knowing(must_prefetch=must_prefetch), FakeRequest("r", moved_prompt())
    side.add(request)
    side.report(Report(prefetched=["r"] * must_prefetch))
    for _ in range(NUM_STEPS):
        promised = side.match(request, 0)
        side.step({}, {}, ())
        side.report(None)
    assert promised[0] == len(PREFIX) + 20 + len(DOCUMENT)
    assert counted.hashed == len(moved_prompt())
    assert (counted.exact, counted.moved) == (1 + must_prefetch, 1)


def test_steps_that_compute_hash_nothing(counted: Counted) -> None:
    side = scheduler_side()
    requests = {f"r{n}": FakeRequest(f"r{n}", words(2000, seed=n)) for n in range(16)}
    for request in requests.values():
        side.add(request)
        side.match(request, 0)
        side.allocated(request, 0)
    counted.hashed = counted.exact = counted.moved = 0
    for step in range(NUM_STEPS):
        for request in requests.values():
            request.num_computed_tokens = 40 * step
        work = side.step(dict.fromkeys(requests, 40), requests, ())
        side.report(None)
    assert len(work.saves) == 16
    assert (counted.hashed, counted.exact, counted.moved) == (0, 0, 0)


def test_what_was_stored_meanwhile_is_found_without_hashing_again(counted: Counted) -> None:
    side, request = scheduler_side(), FakeRequest("r", PREFIX + words(50))
    side.add(request)
    assert side.match(request, 0) == (0, False)
    side.report(Report(changes=changes_of(PREFIX)))
    assert side.match(request, 0) == (len(PREFIX), True)
    assert side.match(request, 32) == (len(PREFIX) - 32, True)
    side.report(Report(changes=[Change(changes_of(PREFIX)[1].key)]))
    assert side.match(request, 0) == (32, True)
    assert counted.hashed == len(PREFIX) + 50


def test_after_preemption_the_answer_is_read_too(counted: Counted) -> None:
    side, request = knowing(), FakeRequest("r", PREFIX[:40])
    side.add(request)
    assert side.match(request, 0) == (39, True)
    request.answer(PREFIX[40:])
    assert side.match(request, 0) == (len(PREFIX) - 1, True)
    assert counted.hashed == 40 + len(PREFIX)


def test_a_request_that_waits_finds_nothing_of_what_was_deleted() -> None:
    side = scheduler_side()
    side.learn([Facts(MODEL, "", "", must_prefetch=False, changes=tuple(changes_of(PREFIX)))])
    request = FakeRequest("r", PREFIX + words(50))
    side.add(request)
    assert side.match(request, 0) == (len(PREFIX), True)
    side.report(Report(prefetched=["another"], epochs={epoch_key(""): 1}))
    assert side.match(request, 0) == (0, False)

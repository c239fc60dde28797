"""Requests that are preempted: they continue where they were, and nothing is emitted twice."""

from __future__ import annotations

from typing import Any

import pytest

from batching import WAIT_S, alone, answers, are_all_free, check_stored_prefixes, engine_of, greedy
from fakes import words
from kvboost import KVBoost
from kvboost.core import Sampling
from kvboost.engine.batch import member
from kvboost.engine.results import Delta
from kvboost.models.rows import Rows
from waiting import wait_until

NEW_ROWS = 16
NUM_NEW = 2 * NEW_ROWS + 10
COMMON = words(160, seed=99)
LONGEST = 36


@pytest.fixture(autouse=True)
def room_is_reserved_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "NEW_ROWS", NEW_ROWS)


def prompts_of(count: int) -> list[list[int]]:
    """Every other one begins alike, so that rows are shared."""
    own = [words(20 + number, seed=number) for number in range(count)]
    return [tokens if number % 2 else COMMON + tokens for number, tokens in enumerate(own)]


def num_blocks_for(num_requests: int, block_size: int) -> int:
    """For prompts that begin alike once, and the rest of each."""
    return -(-len(COMMON) // block_size) + num_requests * -(-(LONGEST + NUM_NEW) // block_size)


@pytest.mark.tiny
@pytest.mark.parametrize("reuse", ["exact", "off"])
@pytest.mark.parametrize("options", [{"block_size": 16}, {"block_size": 7}], ids=str)
def test_outputs_that_outgrow_the_pool_all_come_to_their_end(
    options: dict[str, Any], reuse: str
) -> None:
    prompts = prompts_of(16)
    num_blocks = num_blocks_for(4, options.setdefault("block_size", 16))
    heard: list[list[int]] = [[] for _ in prompts]
    with engine_of(num_blocks=num_blocks, **options) as engine:
        tickets = [
            engine.submit(
                prompt,
                greedy(NUM_NEW),
                reuse=reuse,
                listener=lambda delta, number=number: heard[number].extend(delta.token_ids),
            )
            for number, prompt in enumerate(prompts)
        ]
        assert answers(tickets) == heard == [alone(prompt, NUM_NEW) for prompt in prompts]
        assert engine.batch_stats()["preemptions"] > 1
        assert are_all_free(engine)
        for ticket, prompt in zip(tickets, prompts, strict=True):
            result = ticket.result()
            assert len(result.token_times) == NUM_NEW
            assert list(result.token_times) == sorted(result.token_times)
            assert result.prompt_tokens == len(prompt) and result.cached_tokens < len(prompt)
        if reuse == "exact":
            assert check_stored_prefixes(engine) > 0


@pytest.mark.tiny
def test_dice_penalties_stops_and_logprobs_go_on_after_a_preemption() -> None:
    sampling = [
        Sampling(
            max_new_tokens=NUM_NEW,
            ignore_eos=True,
            temperature=0.7,
            seed=number,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            top_logprobs=2,
        )
        for number in range(8)
    ]
    prompts = prompts_of(8)
    results = []
    for num_requests in (8, 3):
        texts = [""] * len(prompts)

        def hear(delta: Delta, number: int, texts: list[str] = texts) -> None:
            texts[number] += delta.text

        with engine_of(num_blocks=num_blocks_for(num_requests, 16)) as engine:
            tickets = [
                engine.submit(p, s, listener=lambda delta, n=n: hear(delta, n))
                for n, (p, s) in enumerate(zip(prompts, sampling, strict=True))
            ]
            made = [ticket.result(WAIT_S) for ticket in tickets]
            assert (engine.batch_stats()["preemptions"] > 0) == (num_requests == 3)
        assert texts == [each.text for each in made]
        assert all(len(each.logprobs) == NUM_NEW for each in made)
        results.append([(each.token_ids, each.text, each.finish_reason) for each in made])
    assert results[0] == results[1]


@pytest.mark.tiny
def test_a_preempted_request_can_be_cancelled_or_late() -> None:
    with engine_of(num_blocks=num_blocks_for(2, 16)) as engine:
        batch = engine._front._batch
        prompts = prompts_of(6)
        tickets = [engine.submit(prompt, greedy(NUM_NEW)) for prompt in prompts]
        wait_until(lambda: engine.batch_stats()["preemptions"] > 0)
        preempted = engine._worker.call(lambda: [m for m in batch._waiting if m.joined_at])
        for each in preempted:
            each.ticket.cancel()
        left = [ticket for ticket in tickets if ticket not in [m.ticket for m in preempted]]
        places = [tickets.index(ticket) for ticket in left]
        assert answers(left) == [alone(prompts[place], NUM_NEW) for place in places]
        assert are_all_free(engine) and not len(batch._live)


@pytest.mark.tiny
def test_rows_taken_by_others_neither_fail_nor_change_running_outputs() -> None:
    """As a text that is warmed takes them: all that is free, in the middle of the outputs."""
    prompts = prompts_of(3)
    taken: list[Rows] = []
    with engine_of(num_blocks=num_blocks_for(3, 16), block_size=16) as engine:
        pool = engine._parts.pool

        def take_all(delta: Delta) -> None:
            if not taken:
                pool.evict(pool.num_blocks * pool.block_bytes)
                taken.append(Rows(pool, pool.num_free * pool.block_size))

        tickets = [engine.submit(prompt, greedy(NUM_NEW), listener=take_all) for prompt in prompts]
        assert answers(tickets) == [alone(prompt, NUM_NEW) for prompt in prompts]
        assert taken[0].capacity > 0 and engine.batch_stats()["preemptions"] > 0


@pytest.mark.tiny
def test_a_request_without_room_beside_pins_has_memory_of_its_own_to_its_end() -> None:
    prompt = words(40, seed=7)
    with engine_of(num_blocks=14, block_size=16) as engine:
        engine.warm(words(160, seed=8), pin=True)
        assert engine._parts.pool.room([]) < len(prompt) + NUM_NEW
        ticket = engine.submit(prompt, greedy(NUM_NEW))
        assert answers([ticket]) == [alone(prompt, NUM_NEW)]


@pytest.mark.tiny
def test_a_request_whose_step_cannot_be_prepared_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = prompts_of(3)
    prepare = member.Member.next_segment

    def fail_one(each: member.Member, most: int) -> object:
        if each.request.tokens == prompts[1] and len(each.output) == 5:
            raise RuntimeError("no room")
        return prepare(each, most)

    monkeypatch.setattr(member.Member, "next_segment", fail_one)
    with engine_of() as engine:
        first, bad, last = (engine.submit(prompt, greedy(NUM_NEW)) for prompt in prompts)
        with pytest.raises(RuntimeError, match="no room"):
            bad.result(WAIT_S)
        assert answers([first, last]) == [alone(prompts[i], NUM_NEW) for i in (0, 2)]
        assert are_all_free(engine)


@pytest.mark.tiny
def test_a_tenant_cannot_hold_all_places_and_all_room() -> None:
    num_small = 30
    with engine_of(max_batch_size=4, max_queue_size=8, num_blocks=60) as engine:
        endless = Sampling(max_new_tokens=800, ignore_eos=True)
        hogs = [engine.submit(words(100, seed=n), endless, tenant="a") for n in range(12)]
        wait_until(lambda: engine.batch_stats()["num_running"] >= 3)
        waited = []
        for number in range(num_small):
            before = engine.batch_stats()["num_steps"]
            steps: list[int] = []
            small = engine.submit(
                words(20, seed=100 + number),
                greedy(3),
                tenant="b",
                listener=lambda _, steps=steps: steps.append(engine.batch_stats()["num_steps"]),
            )
            assert list(small.result(WAIT_S).token_ids) == alone(words(20, seed=100 + number), 3)
            waited.append(steps[0] - before)
        # The step that ran when it came, and its own; more only if the caller was slow to submit.
        assert sorted(waited)[num_small // 2] <= 2
        for hog in hogs:
            hog.cancel()


@pytest.mark.model
@pytest.mark.parametrize("num_requests", [3, pytest.param(16, marks=pytest.mark.long)])
def test_preempted_answers_of_a_real_model_are_the_answers_alone(
    smol: str, num_requests: int
) -> None:
    num_new = NEW_ROWS + 32
    with KVBoost.from_pretrained(
        smol, dtype="float32", num_blocks=2 * -(-(64 + num_new) // 16)
    ) as engine:
        prompts = [[17 + 31 * number, *range(600, 640 + number)] for number in range(num_requests)]
        wanted = [
            engine.generate(prompt, num_new, reuse="off", eos_token_id=None).token_ids
            for prompt in prompts
        ]
        tickets = [engine.submit(prompt, greedy(num_new)) for prompt in prompts]
        assert answers(tickets) == wanted
        assert engine.batch_stats()["preemptions"] > 0

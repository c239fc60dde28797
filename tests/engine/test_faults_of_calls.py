"""An engine whose disk fails at any call: every request is answered, and the disk comes back."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from fakes import WordTokenizer, words
from kvboost import KVBoost
from nth_call import ERRORS, counted_calls
from tiny_models import SUPPORTED, build
from waiting import wait_until

pytestmark = [pytest.mark.tiny, pytest.mark.alone]

PROMPTS = [words(60 + number, seed=number) for number in range(6)]
SEEDS = count(100)  # of prompts that are new
CASES = [(error, forever) for error in ERRORS for forever in (False, True)]


def engine_of(folder: Path | None, model: PreTrainedModel | None = None) -> KVBoost:
    options = {"chunk_size": 16, "max_cache_bytes": 400_000, "max_disk_bytes": 1 << 20}
    if folder is not None:
        options["disk_cache_dir"] = str(folder)
    return KVBoost(model or build(*SUPPORTED["llama"]), WordTokenizer(), **options)


def answers(engine: KVBoost) -> list[list[int]]:
    found = [engine.generate(prompt, 4).token_ids for prompt in PROMPTS]
    engine.flush()
    return found


def is_used(engine: KVBoost) -> bool:
    """Whether the disk takes what is new."""
    before = engine.cache_stats()["tiers"]["disk"]["written"]
    engine.generate(words(50, seed=next(SEEDS)), 1)
    engine.flush()
    return engine.cache_stats()["tiers"]["disk"]["written"] > before


@pytest.mark.parametrize("step", [120, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_request_is_answered(tmp_path: Path, case: int, step: int) -> None:
    with engine_of(None) as engine:
        expected = answers(engine)
    error, forever = CASES[case]
    with counted_calls() as calls:
        with engine_of(tmp_path / "calm") as engine:
            calls.num = 0
            assert answers(engine) == answers(engine) == expected
            num = calls.num
        assert num > 60
        for nth in range(1 + case * 7 % step, num + 1, step):
            with engine_of(tmp_path / str(nth)) as engine:
                calls.fail(nth, forever=forever, error=error)
                assert answers(engine) == expected
                assert answers(engine) == expected
                calls.heal()
                wait_until(lambda engine=engine: is_used(engine))
            with engine_of(tmp_path / str(nth)) as engine:
                assert answers(engine) == expected


@pytest.mark.parametrize("error", ERRORS)
def test_an_engine_starts_whatever_fails(tmp_path: Path, error: str) -> None:
    with counted_calls() as calls:
        for nth in (1, 2, 3, 4, 6, 8, 11, 14):
            model = build(*SUPPORTED["llama"])
            calls.fail(nth, forever=True, error=error)
            with engine_of(tmp_path / str(nth), model) as engine:
                answer = engine.generate(PROMPTS[0], 4).token_ids
                calls.heal()
                assert engine.generate(PROMPTS[0], 4).token_ids == answer
                wait_until(lambda engine=engine: is_used(engine))

"""What is asked: warm prompts begin as earlier ones, moved ones have their documents elsewhere."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.bench_fakes import WordTokenizer
from kvboost.bench import records, traffic
from kvboost.bench.workloads import NUM_TURNS, WORKLOADS, Session, sessions

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def made() -> dict[str, Session]:
    tokenizer = WordTokenizer()
    return {each.workload: each for each in sessions(tokenizer, [*WORKLOADS], 0, NUM_TOKENS)}


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def longest_seen(session: Session, number: int) -> int:
    """Tokens with which a prompt begins as one before it."""
    asked = session.asks[number].tokens
    return max((common(asked, each.tokens) for each in session.asks[:number]), default=0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_phases_are_what_they_say(name: str, made: dict[str, Session]) -> None:
    session = made[name]
    for number, ask in enumerate(session.asks):
        share = longest_seen(session, number) / len(ask.tokens)
        assert (share > 0.5) == (ask.phase == "warm"), (number, share)


@pytest.mark.parametrize("name", ["rag-middle", "rag-shuffled"])
def test_moved_prompts_are_made_of_what_was_seen(name: str, made: dict[str, Session]) -> None:
    session = made[name]
    for number, ask in enumerate(session.asks):
        if ask.phase == "moved":
            seen = {
                each.tokens[n : n + 8]
                for each in session.asks[:number]
                for n in range(len(each.tokens) - 7)
            }
            stretches = [ask.tokens[n : n + 8] for n in range(len(ask.tokens) - 7)]
            assert sum(each in seen for each in stretches) > 0.6 * len(stretches)


def test_workloads_have_their_size(made: dict[str, Session]) -> None:
    assert len(made["multi-turn"].asks) == NUM_TURNS
    sizes = {name: len(session.asks[-1].tokens) for name, session in made.items()}
    assert all(0.5 * NUM_TOKENS < size < 2.5 * NUM_TOKENS for size in sizes.values()), sizes


def test_a_fact_is_in_the_prompt_and_nowhere_near_its_end(made: dict[str, Session]) -> None:
    tokenizer = WordTokenizer()
    (session,) = sessions(tokenizer, ["rag-first"], 0, NUM_TOKENS)
    for ask in session.asks:
        text = tokenizer.decode(ask.tokens)
        assert text.count(ask.fact) == 1
        assert ask.fact not in " ".join(text.split()[-20:])


def test_a_session_does_not_depend_on_the_others_chosen() -> None:
    def texts(names: list[str]) -> str:
        tokenizer = WordTokenizer()
        chosen = [s for s in sessions(tokenizer, names, 0, NUM_TOKENS) if s.workload == "agent"]
        return tokenizer.decode(chosen[0].asks[-1].tokens)

    assert texts(["agent"]) == texts(["code", "agent"])
    assert texts(["agent"]) == texts(["agent"])


def test_a_seed_makes_other_prompts() -> None:
    tokenizer = WordTokenizer()
    one, other = (sessions(tokenizer, ["code"], seed, NUM_TOKENS)[0] for seed in (0, 1))
    assert common(one.asks[0].tokens, other.asks[0].tokens) < 20


def test_traffic_keeps_what_conversations_share_and_when_they_come(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "hash_ids": [0, 1 + n // 2, *range(100 * n, 100 * n + 3)]}
        for n in range(40)
    ]
    (tmp_path / traffic.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = traffic.requests(tmp_path, WordTokenizer(), seed=0)
    assert len(asked) == traffic.NUM_REQUESTS
    times = [each["at_s"] for each in asked]
    assert times == sorted(times) and times[0] == 0
    assert times[-1] == pytest.approx(traffic.MEAN_GAP_S * (len(asked) - 1))
    assert all(len(each["tokens"]) == 5 * traffic.BLOCK_TOKENS for each in asked)
    prompts = [tuple(each["tokens"]) for each in asked]
    shared = {common(one, other) for one, other in itertools.pairwise(prompts)}
    assert shared == {traffic.BLOCK_TOKENS, 2 * traffic.BLOCK_TOKENS}


def test_lines_survive_a_stop_in_the_middle_of_one(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    assert records.read(path) == []
    records.append(path, [{"n": 1}, {"n": 2}])
    path.write_text(path.read_text() + '{"n": 3')
    assert records.read(path) == [{"n": 1}, {"n": 2}]
    records.append(path, [{"n": 4}])
    assert records.read(path) == [{"n": 1}, {"n": 2}, {"n": 4}]

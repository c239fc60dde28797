"""Scores of continuations against a full forward of the bare model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batching import engine_of
from fakes import WordTokenizer, words
from kvboost import ConfigError, KVBoost, UnsupportedModel
from kvboost.core import MatchKind
from kvboost.engine.score import STEP_TOKENS, ScoreResult
from tiny_models import REFUSED, SUPPORTED, build

TOLERANCE = 2e-5  # of a log-probability: other shapes of the same products round otherwise
PROMPT = words(80, seed=1)
CONTINUATIONS = [[7], words(5, seed=2), [7, 9], words(STEP_TOKENS + 40, seed=3)]


@torch.no_grad()
def plain(model: object, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Log-probabilities by one forward over everything."""
    logits = model(input_ids=torch.tensor([prompt + continuation])).logits[0]
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(continuation)[:, None])[:, 0]


def error(result: ScoreResult, name: str, prompt: list[int] = PROMPT) -> float:
    model = build(*SUPPORTED[name])
    return max(
        float((torch.tensor(each.logprobs) - plain(model, prompt, each.token_ids)).abs().max())
        for each in result.scores
    )


@pytest.mark.tiny
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2-softcap", "deepseek_v3-mla"])
def test_cold_warm_and_plain_scores_are_the_same(name: str) -> None:
    with engine_of(name) as engine:
        cold = engine.score(PROMPT, CONTINUATIONS)
        warm = engine.score(PROMPT, CONTINUATIONS)
        longer = engine.score([*PROMPT, 11, 12], CONTINUATIONS[1:3])
    assert (cold.cached_tokens, warm.cached_tokens, longer.cached_tokens) == (0, 79, 80)
    assert [each.token_ids for each in warm.scores] == CONTINUATIONS
    assert error(cold, name) < TOLERANCE and error(warm, name) < TOLERANCE
    assert error(longer, name, [*PROMPT, 11, 12]) < TOLERANCE
    assert warm.scores[1].logprob == pytest.approx(sum(warm.scores[1].logprobs))


@pytest.mark.tiny
def test_what_is_scored_is_stored_for_answers_and_the_other_way_round() -> None:
    with engine_of() as engine:
        engine.score(PROMPT, [[7]])
        answer = engine.generate(PROMPT, 4)
        assert answer.cached_tokens == 79
        behind = engine.score(PROMPT + answer.token_ids, [[7]])
        assert behind.cached_tokens == 83  # the last token of an answer has no K/V yet
        assert engine.score(PROMPT, [answer.token_ids, [7]]).scores[0].is_greedy
        others = [*answer.token_ids[:3], (answer.token_ids[3] + 1) % 500]
        assert not engine.score(PROMPT, [others]).scores[0].is_greedy


@pytest.mark.tiny
def test_continuations_are_not_stored() -> None:
    with engine_of() as engine:
        engine.score(PROMPT, CONTINUATIONS)
        assert engine.generate(PROMPT + CONTINUATIONS[3], 1).cached_tokens == 80


@pytest.mark.tiny
def test_reuse_off_and_other_tenants_find_nothing() -> None:
    with engine_of() as engine:
        engine.score(PROMPT, [[7]], tenant="a")
        assert engine.score(PROMPT, [[7]], tenant="a", reuse="off").cached_tokens == 0
        assert engine.score(PROMPT, [[7]], tenant="b").cached_tokens == 0
        assert engine.score(PROMPT, [[7]], tenant="a").cached_tokens == 79


@pytest.mark.tiny
def test_pieces_of_fixed_shape_make_equal_bits() -> None:
    with engine_of(deterministic=True, piece_tokens=32) as engine:
        cold = engine.score(PROMPT, CONTINUATIONS)
        warm = engine.score(PROMPT, CONTINUATIONS)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 64)
    assert [each.logprobs for each in cold.scores] == [each.logprobs for each in warm.scores]


@pytest.mark.tiny
def test_moved_text_is_used_when_allowed_and_audited() -> None:
    """K/V of a single layer depend on token and position alone, so here moved ones are right."""
    document, continuation = words(1000, seed=4), words(6, seed=5)
    prompt = [*words(20, seed=7), *document, 8]
    model = build("llama", {"num_hidden_layers": 1})
    with KVBoost(model, WordTokenizer(), chunk_size=16, reuse="auto") as engine:
        engine.warm(document)
        moved = engine.score(prompt, [continuation])
        engine.flush()
        assert engine.cache_stats()["audits"] == 1
        full = engine.score(prompt, [continuation], reuse="off")
    assert moved.reuse.tokens(MatchKind.MOVED) >= 990
    assert moved.scores[0].logprobs == pytest.approx(full.scores[0].logprobs, abs=TOLERANCE)


@pytest.mark.tiny
def test_another_process_finds_the_prompt_on_disk(tmp_path: Path) -> None:
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        cold = engine.score(PROMPT, [[7]])
    with engine_of(disk_cache_dir=str(tmp_path)) as engine:
        warm = engine.score(PROMPT, [[7]])
    assert warm.cached_tokens == 79
    assert warm.scores[0].logprob == pytest.approx(cold.scores[0].logprob, abs=TOLERANCE)


@pytest.mark.tiny
def test_scores_from_many_threads_beside_answers() -> None:
    with engine_of() as engine, ThreadPoolExecutor(4) as pool:
        scores = pool.map(lambda n: engine.score(PROMPT[: 20 + n], [[7, 9]]).scores[0], range(16))
        answers = pool.map(lambda n: engine.generate(PROMPT[: 20 + n], 2).token_ids, range(16))
        found, _ = list(scores), list(answers)
    model = build(*SUPPORTED["llama"])
    for number, each in enumerate(found):
        expected = plain(model, PROMPT[: 20 + number], [7, 9])
        assert each.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.mark.tiny
def test_what_cannot_be_scored_is_refused() -> None:
    with engine_of() as engine:
        for wrong in ([], "7", [""], [[7], []]):
            with pytest.raises(ConfigError, match="continuations"):
                engine.score(PROMPT, wrong)
    name = next(iter(REFUSED))
    model = build(*REFUSED[name][:2])
    with (
        KVBoost(model, WordTokenizer(), strict=False) as engine,
        pytest.raises(UnsupportedModel),
    ):
        engine.score(PROMPT, [[7]])


@pytest.mark.model
def test_a_trained_model_prefers_what_is_true(smol: str) -> None:
    handbook = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()[:1000]
    prompt = f"{handbook}\n\nThe capital of France is"
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    with KVBoost(model, AutoTokenizer.from_pretrained(smol)) as engine:
        engine.warm(handbook)
        result = engine.score(prompt, [" Paris", " Rome", " Berlin, of course"])
        tokens = engine.tokenizer(prompt).input_ids
    assert result.cached_tokens > 0.9 * result.prompt_tokens
    assert max(result.scores, key=lambda each: each.logprob) is result.scores[0]
    for each in result.scores:
        expected = plain(model, tokens, each.token_ids).tolist()
        assert each.logprobs == pytest.approx(expected, abs=1e-3)

"""The LM Evaluation Harness through KVBoost scores what its own `hf` model scores."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from benchmarks.quality.evaluation_tasks import make_tasks
from kvboost import ConfigError
from kvboost.config import option_names
from kvboost.integrations.lm_eval import SHARED_NAMES, WITHOUT_EFFECT  # registers the model
from tiny_models import save

NUM_SHOTS, NUM_QUESTIONS = 2, 4
TASKS = ["pages_choice", "pages_name", "pages_text"]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    assert make_tasks(folder, NUM_SHOTS) == TASKS
    return TaskManager(include_path=str(folder), include_defaults=False)


def model_of(name: str, folder: str, more: str = "") -> Any:
    """As the harness makes it from its command line."""
    arguments = f"pretrained={folder},dtype=float32{more}"
    return get_model(name).create_from_arg_string(arguments, {"device": "cpu", "batch_size": 1})


def evaluate(lm: Any, manager: TaskManager) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the tasks, and the answers to their questions."""
    found = simple_evaluate(
        lm, tasks=TASKS, task_manager=manager, limit=NUM_QUESTIONS, bootstrap_iters=0
    )
    scores = {
        (task, metric): value
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float)
    }
    answers = {
        task: [each["resps"] for each in sorted(samples, key=lambda each: each["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return scores, answers


@pytest.mark.model
@pytest.mark.long
def test_scores_and_answers_are_those_of_the_harness_itself(
    smol: str, manager: TaskManager
) -> None:
    theirs, their_answers = evaluate(model_of("hf", smol), manager)
    lm = model_of("kvboost", smol, ",reuse=exact,chunk_size=64")
    ours, our_answers = evaluate(lm, manager)
    counts = lm.engine.cache_stats()
    lm.engine.close()
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours["pages_text", "word_perplexity,none"] > 1
    assert our_answers["pages_name"] == their_answers["pages_name"]
    for mine, other in zip(our_answers["pages_choice"], their_answers["pages_choice"], strict=True):
        assert [each[0][1] for each in mine] == [each[0][1] for each in other]
        assert [each[0][0] for each in mine] == pytest.approx(
            [each[0][0] for each in other], abs=1e-3
        )
    # Of all prompts: the shots of all but the first, and rolling windows, which have no context.
    assert counts["exact_tokens"] > 0.4 * counts["prompt_tokens"]


@pytest.mark.tiny
def test_long_contexts_are_cut_at_their_beginning_as_the_harness_does(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    requests = [(("", ""), list(range(5, 60)), [7, 8, 9]), (("", ""), [5, 6], [7])]
    theirs = model_of("hf", folder, ",max_length=32")._loglikelihood_tokens(requests)
    lm = model_of("kvboost", folder, ",max_length=32")
    assert lm._loglikelihood_tokens(requests) == [
        (pytest.approx(logprob, abs=1e-4), is_greedy) for logprob, is_greedy in theirs
    ]
    with pytest.raises(ValueError, match="does not fit"):
        lm._loglikelihood_tokens([(("", ""), [5], list(range(5, 60)))])
    lm.engine.close()


def test_names_that_both_have_are_known() -> None:
    assert {*option_names()} & {*inspect.signature(HFLM).parameters} == {*SHARED_NAMES}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_arguments_without_effect_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=float32: has no effect"):
        model_of("kvboost", "no-such-model", f",{name}=float32")

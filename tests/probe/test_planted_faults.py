"""Faults planted in a fake server: each is found, with the right sentence, and no other."""

import os
from dataclasses import replace

import pytest

from kvboost.errors import ConfigError
from kvboost.probe import Report, run, session
from probe.engine import Engine, serving

NUM_RUNS = int(os.environ.get("KVBOOST_TEST_PROBES", "1"))

WRONG = {  # fault: the red finding, and words of its sentence
    "damaged": ("facts", "lost the planted fact"),
    "stale": ("facts", "lost the planted fact"),
    "old blocks": ("edits", "from before the edit"),
    "mixed up": ("own answers", "a fact of another prompt"),
}
TIMED = {
    "cache off": ("hits", "yellow", "no prefix cache"),
    "slow hits": ("hits", "red", "costs more than computing"),
    "salt ignored": ("another cache_salt", "red", "Times tell what another client asked"),
    "usage lies": ("usage", "red", "by time a repeated prompt is a hit"),
    "usage invents": ("usage", "red", "of a new prompt as cached"),
    "usage without hits": ("usage", "red", "by time nothing is"),
}


def reds(report: Report) -> set[str]:
    return {each.name for each in report.findings if each.light == "red"}


@pytest.mark.parametrize("seed", range(NUM_RUNS))
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_answers_are_found(fault: str, seed: int) -> None:
    with serving(Engine(fault, seed=seed)) as url:
        report = run(url)
    name, words = WRONG[fault]
    found = report.finding(name)
    assert found is not None and found.light == "red" and words in found.sentence, found
    assert not report.ok and report.num_requests <= 200


@pytest.mark.parametrize("seed", range(NUM_RUNS))
@pytest.mark.parametrize("fault", TIMED)
def test_wrong_times_and_counts_are_found(fault: str, seed: int) -> None:
    name, light, words = TIMED[fault]
    with serving(Engine(fault, seed=seed)) as url:
        report = run(url, salt=True)
    found = report.finding(name)
    assert found is not None and found.light == light, (found, report.as_json())
    assert words.lower() in found.sentence.lower()
    assert reds(report) == ({name} if light == "red" else set())


@pytest.mark.parametrize("seed", range(NUM_RUNS))
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_healthy_server_raises_no_alarm(noise: float, seed: int) -> None:
    with serving(Engine(noise=noise, seed=seed)) as url:
        report = run(url, salt=True)
    assert report.light == "green", report.as_json()
    assert report.finding("another cache_salt") is not None


def test_noise_is_no_alarm_and_is_told() -> None:
    with serving(Engine(noise=0.3)) as url:
        report = run(url)
    found = report.finding("texts")
    assert found is not None and found.light == "green" and "no more than noise" in found.sentence
    assert report.ok


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_model_that_errs_raises_no_alarm(share: float) -> None:
    for seed in range(5):
        with serving(Engine("errs", share=share, seed=seed)) as url:
            report = run(url)
        assert report.ok, report.as_json()


def test_a_cache_that_is_off_leaves_answers_unchecked() -> None:
    with serving(Engine("cache off")) as url:
        report = run(url, light=True)
    seen = report.finding("hits seen")
    assert report.light == "yellow" and seen is not None and "computed anew" in seen.sentence


def test_reasoning_counts_as_text_and_empty_answers_as_nothing() -> None:
    with serving(Engine("damaged", part="reasoning_content", share=0.3)) as url:
        assert reds(run(url)) == {"facts"}
    with serving(Engine(part="none")) as url:
        found = run(url, light=True).finding("facts")
    assert found is not None and found.light == "grey" and "empty" in found.sentence


def test_log_probabilities_are_compared_where_there_are_some() -> None:
    for fault, light in (("", "green"), ("shifted", "yellow")):
        with serving(Engine(fault, has_logprobs=True)) as url:
            found = run(url, light=True).finding("log-probabilities")
        assert found is not None and found.light == light, found


def test_a_busy_server_is_asked_again_and_a_failing_one_is_red() -> None:
    for fault, light in (("busy once", "green"), ("busy", "yellow"), ("breaks", "red")):
        with serving(Engine(fault)) as url:
            found = run(url, light=True).finding("requests")
        assert found is not None and found.light == light, found


@pytest.mark.parametrize("fault", ["hangs", "endless", "breaks with salt"])
def test_a_server_that_fails_where_the_cache_is_used_is_red(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hangs":  # a probe of two seconds
        monkeypatch.setattr(session, "LIGHT", replace(session.LIGHT, seconds=2.0))
    with serving(Engine(fault)) as url:
        report = run(url, light=True, salt=True)
    assert reds(report) == {"requests"}, report.as_json()
    facts = report.finding("facts")
    assert fault != "hangs" or (facts is not None and facts.light == "grey")


def test_a_template_that_all_prompts_share_is_an_honest_count() -> None:
    with serving(Engine(template=400)) as url:
        found = run(url, light=True).finding("usage")
    assert found is not None and found.light == "green", found


@pytest.mark.parametrize(("fault", "light"), [("", "green"), ("salt ignored", "red")])
def test_another_key_is_another_client(fault: str, light: str) -> None:
    with serving(Engine(fault)) as url:
        found = run(url, light=True, key="a", other_key="b").finding("another API key")
    assert found is not None and found.light == light, found


def test_two_checks_of_separation_are_two_runs() -> None:
    with pytest.raises(ConfigError, match="pass one of them"):
        run("http://127.0.0.1:9/v1", other_key="b", salt=True)

"""A run: order, resuming, systems that are absent or fail, what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.bench_fakes import FakeJudge, FakeWorker, WordTokenizer, settings
from kvboost.bench import names, records, script
from kvboost.bench.questions.ask import QUESTIONS
from kvboost.bench.results import results
from kvboost.bench.run import RESULTS, conclude
from kvboost.bench.script import RAW, Script
from kvboost.bench.settings import Settings, check_same
from kvboost.bench.systems import SYSTEMS, System
from kvboost.bench.workloads import WORKLOADS
from kvboost.errors import ConfigError, KVBoostError

SPEEDS = {"transformers": 2.0, "kvboost-exact": 1.0}


class Stage:
    """Runs scripts on fake workers and remembers what was done."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log, self.fails_after = folder, [], {}  # type: ignore[var-annotated]
        monkeypatch.setattr(script, "WorkerProcess", self._worker)
        monkeypatch.setattr(script, "Judge", FakeJudge)
        monkeypatch.setattr(script, "python_of", lambda name: Path("py") if name == "own" else None)
        FakeJudge.judged.clear()

    def script(self, chosen: Settings) -> Script:
        return Script(chosen, self.folder, WordTokenizer())

    def raw(self, kind: str) -> list[Any]:
        return [line for line in records.read(self.folder / RAW) if line["kind"] == kind]

    def _worker(self, system: System, *_: Any) -> FakeWorker:
        self.log.append(f"{system.name} start")
        fails = self.fails_after.get(system.name)
        return FakeWorker(self.log, system.name, SPEEDS[system.name], fails, {"it": "1"})


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_names_that_can_be_chosen_are_those_that_there_are() -> None:
    assert tuple(WORKLOADS) == names.WORKLOADS
    assert tuple(QUESTIONS) == names.QUESTIONS
    assert set(names.QUICK_SYSTEMS) < set(SYSTEMS)
    assert set(names.QUICK_WORKLOADS) < set(WORKLOADS)
    assert set(names.QUICK_QUESTIONS) < set(QUESTIONS)


def test_every_system_holds_every_session_in_every_round(stage: Stage) -> None:
    stage.script(settings()).measure()
    done = {(a["workload"], a["round"], a["system"]) for a in stage.raw("answer")}
    assert done == {
        (workload, number, system)
        for workload in ("system-prompt", "rag-shuffled")
        for number in (0, 1)
        for system in ("transformers", "kvboost-exact")
    }
    assert stage.log.count("transformers start") == stage.log.count("transformers close") == 1
    assert stage.log.count("transformers forget") == 4  # once a session: what follows is warm
    assert stage.log.index("transformers ask") < stage.log.index("transformers forget")
    assert stage.log.count("transformers ask") == 1 + 2 * 9  # the first one is not measured
    assert stage.log.count("transformers rest") == 2 * 9


def test_the_order_of_systems_changes(stage: Stage) -> None:
    stage.script(settings(rounds=8, workloads=("system-prompt",))).measure()
    order = [line for line in stage.log if line.endswith("forget")]
    firsts = set(order[::2])
    assert firsts == {"transformers forget", "kvboost-exact forget"}


def test_a_system_without_an_environment_is_absent_with_the_reason(stage: Stage) -> None:
    stage.script(settings()).measure()
    (absent,) = stage.raw("absent")
    assert absent["system"] == "vllm"
    assert "kvboost bench setup vllm" in absent["why"]


def test_a_system_that_dies_is_left_out_and_the_run_goes_on(stage: Stage) -> None:
    stage.fails_after["kvboost-exact"] = 7
    stage.script(settings()).measure()
    answers = [line for line in stage.raw("answer") if line["system"] == "kvboost-exact"]
    assert {line["workload"] for line in answers} == {"system-prompt"}  # the second one broke off
    assert "has ended" in stage.raw("absent")[-1]["why"]
    assert len([a for a in stage.raw("answer") if a["system"] == "transformers"]) == 18
    assert stage.log.count("kvboost-exact close") == 1


def test_a_run_goes_on_where_it_was(stage: Stage) -> None:
    stage.script(settings(systems=("transformers",))).measure()
    raw = stage.folder / RAW
    text = raw.read_text()
    lines = text.splitlines(keepends=True)
    raw.write_text("".join(lines[:-3]) + lines[-3][:30])  # stopped in the middle of a session
    stage.log.clear()
    stage.script(settings(systems=("transformers",))).measure()
    assert stage.log.count("transformers forget") == 1
    keys = [(line["workload"], line["round"], line["ask"]) for line in stage.raw("answer")]
    assert len(set(keys)) == 18
    stage.log.clear()
    stage.script(settings(systems=("transformers",))).measure()
    assert stage.log == []


def test_questions_that_broke_off_are_asked_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def rows(_: Script, questions: list[str]) -> Iterator[dict[str, Any]]:
        asked.append(questions)
        for question in questions:
            yield {"question": question, "n": 1}
            if question == "share" and len(asked) == 1:
                raise KVBoostError("no memory")
            yield {"question": question, "n": 2}

    monkeypatch.setattr(Script, "_rows", rows)
    made = stage.script(settings(questions=("length", "share", "hits")))
    with pytest.raises(KVBoostError, match="no memory"):
        made.ask_questions()
    assert [row["question"] for row in stage.raw("question")] == ["length", "length"]
    made.ask_questions()
    assert asked[1] == ["share", "hits"]
    assert len(stage.raw("question")) == 6
    made.ask_questions()
    assert len(asked) == 2


def test_a_folder_keeps_to_its_settings(stage: Stage) -> None:
    check_same(settings(), stage.folder)
    check_same(settings(model="/elsewhere/model"), stage.folder)  # the same model
    with pytest.raises(ConfigError, match="another --out"):
        check_same(settings(seed=1), stage.folder)


def test_what_is_written_names_no_folder_of_the_machine(stage: Stage) -> None:
    chosen = settings(data="/somewhere/data", gguf="/somewhere/m.gguf", questions=())
    check_same(chosen, stage.folder)
    stage.fails_after["kvboost-exact"] = 1
    made = Script(replace(chosen, data=None), stage.folder, WordTokenizer())
    made.measure()
    made.note_part(3.0)
    written = "".join(path.read_text() for path in stage.folder.iterdir() if path.is_file())
    assert "somewhere" not in written
    assert "m.gguf" in written


def test_an_answer_that_many_gave_is_judged_once(stage: Stage) -> None:
    made = stage.script(settings())
    made.measure()
    made.judge()
    assert len(FakeJudge.judged) == len(stage.raw("judged")) == 9  # of 36 answers to 9 prompts
    made.judge()
    assert len(FakeJudge.judged) == 9


def test_a_right_fact_scores(stage: Stage) -> None:
    made = stage.script(settings(workloads=("system-prompt", "multi-turn")))
    made.measure()
    made.judge()
    scores = {line["workload"]: line["score"] for line in stage.raw("judged")}
    assert scores == {"system-prompt": 0.0, "multi-turn": None}
    asked = made._sessions[0].asks[0]
    assert made._score(asked, asked.tokens) == 1.0  # the prompt has the fact in it


def test_results_are_concluded_from_what_is_there(stage: Stage) -> None:
    with pytest.raises(KVBoostError, match="there is no run"):
        conclude(stage.folder)
    made = stage.script(settings())
    made.measure()
    made.judge()
    made.note_part(12.0)
    page, summary = conclude(stage.folder)
    assert "KVBoost, exact" in page.read_text() and summary.exists()
    lines = [json.loads(line) for line in (stage.folder / RESULTS).read_text().splitlines()]
    pooled = next(
        line
        for line in lines
        if line["kind"] == "measure"
        and (line["workload"], line["phase"], line["metric"]) == ("all", "warm", "ttft")
        and (line["system"], line["baseline"]) == ("kvboost-exact", "transformers")
    )
    assert (pooled["ratio"], pooled["pairs"], pooled["top1"]) == (0.5, 6, 0.5)


def test_times_of_parts_add_up(stage: Stage) -> None:
    made = stage.script(settings())
    made.note_part(10.0)
    made.note_part(5.0)
    (run,) = [line for line in results(stage.raw("run")) if line["kind"] == "run"]
    assert run["seconds"] == 15


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"num_cached": 7}, "7 tokens were cached before a session"),
        ({"tokens": [1, 2]}, "2 tokens instead of 8"),
    ],
)
def test_a_cold_prompt_is_cold_and_answers_have_their_length(
    wrong: dict[str, Any], why: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = FakeWorker.ask
    monkeypatch.setattr(FakeWorker, "ask", lambda *arguments: ask(*arguments) | wrong)
    stage.script(settings(systems=("transformers",))).measure()
    assert stage.raw("answer") == []
    assert stage.raw("absent")[-1]["why"] == why


def test_traffic_that_is_missing_is_told_before_anything_runs(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="has no conversation_trace"):
        stage.script(settings(data=str(stage.folder)))

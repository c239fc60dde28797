"""From measurements to ratios: pairs, intervals, quality, stages, traffic."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.bench.results import results
from kvboost.bench.statistics import compare

RUN = {"kind": "run", "model": "m", "dtype": "bf16", "seed": 0, "machine": {}, "commit": "c"}
RUN |= {"seconds": 10}


def answer(system: str, ttft_ms: float, **changed: Any) -> dict[str, Any]:
    given = {
        "kind": "answer",
        "workload": "code",
        "system": system,
        "round": 0,
        "ask": 1,
        "phase": "warm",
        "prompt_tokens": 100,
        "num_cached": 90,
        "ttft_ms": ttft_ms,
        "total_ms": 2 * ttft_ms,
        "stages_ms": {},
        "answer": [1, 2],
    }
    return given | changed


def found(lines: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (line,) = [each for each in lines if wanted.items() <= each.items()]
    return line


def test_a_ratio_is_that_of_pairs_not_of_medians() -> None:
    compared = compare([(1.0, 2.0), (10.0, 20.0), (300.0, 100.0)])
    assert compared == {
        "system_ms": 10.0,
        "baseline_ms": 20.0,
        "ratio": 0.5,
        "low": None,  # too few to say how sure it is
        "high": None,
        "pairs": 3,
    }


def test_an_interval_holds_the_ratio_and_is_wider_for_what_varies_more() -> None:
    steady = compare([(1.0 + 0.01 * n, 2.0) for n in range(10)])
    shaky = compare([(1.0 + 0.2 * n, 2.0) for n in range(10)])
    assert steady["low"] <= steady["ratio"] <= steady["high"]
    assert shaky["high"] - shaky["low"] > 5 * (steady["high"] - steady["low"])


def test_only_the_same_prompt_in_the_same_round_makes_a_pair() -> None:
    raw = [
        RUN,
        answer("transformers", 100.0),
        answer("transformers", 500.0, round=1),
        answer("kvboost-auto", 50.0),
        answer("kvboost-auto", 1.0, ask=2),
    ]
    line = found(results(raw), workload="code", system="kvboost-auto", metric="ttft")
    assert (line["pairs"], line["ratio"], line["system_ms"]) == (1, 0.5, 50.0)
    assert line["cached_share"] == 0.9


def test_all_are_compared_with_generate_and_ours_with_each_other_system() -> None:
    names = ("transformers", "vllm", "vllm-kvboost", "kvboost-exact")
    lines = results([RUN, *(answer(name, 10.0) for name in names)])
    couples = {(line["system"], line["baseline"]) for line in lines if line["kind"] == "measure"}
    assert couples == {
        ("vllm", "transformers"),
        ("vllm-kvboost", "transformers"),
        ("kvboost-exact", "transformers"),
        ("kvboost-exact", "vllm"),
        ("kvboost-exact", "vllm-kvboost"),
        ("vllm-kvboost", "vllm"),
    }


def test_a_system_that_broke_off_is_not_pooled() -> None:
    raw = [
        RUN,
        answer("transformers", 10.0),
        answer("transformers", 10.0, workload="agent"),
        answer("vllm", 10.0),
    ]
    workloads = [line["workload"] for line in results(raw) if line["kind"] == "measure"]
    assert set(workloads) == {"code"}


def test_quality_stands_beside_speed_and_belongs_to_its_own_answer() -> None:
    judged = {"kind": "judged", "workload": "code", "ask": 1, "score": None}
    raw = [
        RUN,
        answer("transformers", 10.0, answer=[1, 2]),
        answer("kvboost-auto", 10.0, answer=[1, 3]),
        judged | {"answer": [1, 2], "top1": 1.0, "regret": 0.0},
        judged | {"answer": [1, 3], "top1": 0.5, "regret": 0.3},
        judged | {"answer": [1, 3], "top1": 0.0, "regret": 9.0, "workload": "agent"},
    ]
    line = found(results(raw), workload="code", metric="ttft")
    assert (line["top1"], line["baseline_top1"], line["regret"]) == (0.5, 1.0, 0.3)
    assert line["score"] is None


def test_a_line_says_what_it_was_measured_with() -> None:
    system = {"kind": "system", "system": "vllm", "title": "vLLM", "versions": {"vllm": "0.32"}}
    raw = [RUN, system, answer("transformers", 10.0), answer("vllm", 10.0)]
    line = found(results(raw), workload="code", metric="total")
    assert line["versions"]["vllm"] == {"vllm": "0.32"}
    assert (line["model"], line["dtype"], line["seed"], line["commit"]) == ("m", "bf16", 0, "c")


def test_stages_are_held_against_the_callers_clock() -> None:
    raw = [
        RUN,
        answer("kvboost-auto", 50.0, total_ms=100.0, stages_ms={"forward": 49.0, "decode": 50.0}),
        answer("kvboost-auto", 50.0, total_ms=100.0, stages_ms={"forward": 40.0, "decode": 50.0}),
    ]
    line = found(results(raw), kind="stages", workload="code")
    assert line["stages_ms"] == {"forward": 44.5, "decode": 50.0}
    assert (line["covered"], line["least_covered"]) == (pytest.approx(0.945), 0.9)


def test_a_system_that_failed_once_and_ran_later_is_not_absent() -> None:
    absent = {"kind": "absent", "system": "vllm", "why": "busy"}
    system = {"kind": "system", "system": "vllm", "versions": {}}
    kinds = [line["kind"] for line in results([RUN, absent, system, system])]
    assert kinds.count("absent") == 0 and kinds.count("system") == 1
    broke_off = results([RUN, system, absent | {"why": "it died"}])
    assert found(broke_off, kind="absent")["why"] == "it died"
    assert found(broke_off, kind="system")


def test_traffic_is_told_in_quantiles() -> None:
    times = {"ttft_ms": [10.0, 20.0, 30.0], "total_ms": [20.0, 40.0, 60.0], "seconds": 1.0}
    raw = [RUN, {"kind": "traffic", "system": "vllm", **times}]
    line = found(results(raw), kind="traffic")
    assert (line["ttft_p50_ms"], line["total_p95_ms"], line["requests"]) == (20.0, 58.0, 3)

"""What `kvboost doctor` concludes, from measurements that are made up."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvboost.bench import machine
from kvboost.bench.doctor.advice import settings
from kvboost.bench.doctor.diagnosis import break_even, findings
from kvboost.bench.doctor.facts import (
    Machine,
    ModelFacts,
    MovedQuality,
    Packing,
    Reading,
    TierSpeed,
    Visit,
)
from kvboost.bench.doctor.page import pays_from, print_json, print_page
from kvboost.config import MIB, make_options
from kvboost.server.options import add_flags, read_options

GIB = 2**30
QUIET = {"load": 0.1, "wait_policy": None, "num_machine_cores": 4}


def reading(num_tokens: int, moved: float, exact: float = 0.3) -> Reading:
    """Rounds on a machine whose pace changes: only what is of the same round compares."""
    full_ms = tuple(pace * (num_tokens + 48) for pace in (0.9, 1.0, 1.2))
    return Reading(
        num_tokens=num_tokens,
        full_ms=full_ms,
        cold_ms=full_ms,
        exact_ms=tuple(exact * each for each in full_ms),
        moved_ms=tuple(moved * each for each in full_ms),
        is_moved=(True, True, True),
    )


@pytest.fixture
def visit() -> Visit:
    return Visit(
        machine=Machine("cpu", 4, 4, available_bytes=10 * GIB, **QUIET),
        model=ModelFacts(
            name="LlamaForCausalLM (llama)",
            dtype="bfloat16",
            load_s=1.0,
            certify_s=2.0,
            bytes_per_token=20_000,
            int8_bytes_per_token=10_600,
        ),
        readings=(reading(64, 1.4, 0.6), reading(128, 1.2), reading(256, 0.8), reading(512, 0.4)),
        decode_ms=(20.0, 21.0, 22.0),
        tiers=(TierSpeed("memory", 4e9, 4e9, 0.01),),
        quality=MovedQuality(mean_kl=0.01, top1_ratio=1.0),
    )


def value_of(visit: Visit, name: str, **tiers: str) -> object:
    return {each.name: each.value for each in settings(visit, **tiers)}.get(name)


def level_of(visit: Visit, part: str) -> str | None:
    """The level of the one finding that has `part` in it."""
    found = [each.level for each in findings(visit) if part in each.text]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([(64, 1.4), (128, 1.2), (256, 0.8), (512, 0.4)], 192),
        ([(64, 0.9), (128, 0.5)], 64),
        ([(64, 0.9), (128, 1.1), (256, 0.9)], 192),  # a lucky short one does not count
        ([(64, 1.5), (128, 1.0)], None),
        ([(64, 0.5), (128, 1.0)], None),
        ([(64, 1.0), (128, 0.5)], 128),  # the engine computed: where it would pay is not known
        ([], None),
    ],
)
def test_break_even_is_where_the_line_crosses_for_good(
    shares: list[tuple[int, float]], expected: int | None
) -> None:
    assert break_even(shares) == expected


def test_break_even_goes_by_pairs_of_a_round(visit: Visit) -> None:
    assert pays_from(visit) == {"exact": 64, "moved": 192}
    assert level_of(visit, "moved text pays from 192 tokens; 512 tokens take 40%") == "good"
    assert level_of(visit, "pays from 64 tokens at the latest") == "good"


def test_at_the_latest_is_said_only_if_all_lengths_pay(visit: Visit) -> None:
    almost = (reading(64, 1.0001), *visit.readings[2:])
    assert pays_from(replace(visit, readings=almost))["moved"] == 64
    assert level_of(replace(visit, readings=almost), "moved text pays from 64 tokens;") == "good"


def test_moved_text_that_the_engine_computed_does_not_pay(visit: Visit) -> None:
    computed = tuple(replace(each, is_moved=(False, False, True)) for each in visit.readings)
    assert pays_from(replace(visit, readings=computed))["moved"] is None
    assert value_of(replace(visit, readings=computed), "reuse") == "exact"


def test_a_refused_model_is_one_warning_and_no_advice(visit: Visit) -> None:
    refused = Visit(visit.machine, replace(visit.model, refusal="layer 3 keeps a state"))
    assert [each.level for each in findings(refused)] == ["warning"]
    assert "layer 3 keeps a state" in findings(refused)[0].text
    assert settings(refused) == []
    assert pays_from(refused) == {}


@pytest.mark.parametrize(("load", "level"), [(2.1, "warning"), (1.9, None), (None, None)])
def test_a_busy_machine_is_warned_about(visit: Visit, load: float | None, level: str) -> None:
    visit = replace(visit, machine=replace(visit.machine, load=load))
    assert level_of(visit, "the machine is busy") == level
    assert value_of(visit, "OMP_WAIT_POLICY") == ("PASSIVE" if level else None)


def test_the_load_is_that_of_the_whole_machine(visit: Visit) -> None:
    part = replace(visit.machine, load=2.1, num_machine_cores=64)
    assert level_of(replace(visit, machine=part), "the machine is busy") is None


def test_what_is_set_already_is_not_advised(visit: Visit) -> None:
    assert level_of(visit, "OMP_WAIT_POLICY=PASSIVE") is None
    quiet = replace(visit.machine, load=9.0, wait_policy="passive")
    assert level_of(replace(visit, machine=quiet), "OMP_WAIT_POLICY=PASSIVE") == "note"
    assert value_of(replace(visit, machine=quiet), "OMP_WAIT_POLICY") is None


def test_too_many_threads(visit: Visit) -> None:
    crowded = replace(visit, machine=replace(visit.machine, num_threads=8))
    assert level_of(crowded, "8 threads compute on 4 cores") == "warning"
    assert value_of(crowded, "OMP_NUM_THREADS") == 4
    assert value_of(visit, "OMP_NUM_THREADS") is None


def test_times_that_vary_are_warned_about(visit: Visit) -> None:
    assert level_of(visit, "pace varies") is None
    wild = replace(visit.readings[0], full_ms=(100.0, 120.0, 180.0))
    visit = replace(visit, readings=(wild, *visit.readings[1:]))
    assert level_of(visit, "112 tokens took from 100 to 180 ms") == "warning"


def test_new_text_that_is_slower_at_every_length_is_noted(visit: Visit) -> None:
    slower = tuple(
        replace(each, cold_ms=tuple(1.2 * full for full in each.full_ms)) for each in visit.readings
    )
    assert level_of(replace(visit, readings=slower), "at least 20% longer") == "note"
    once = replace(visit, readings=(visit.readings[0], *slower[1:]))
    assert level_of(once, "longer with reuse") is None


def test_too_few_rounds_are_warned_about(visit: Visit) -> None:
    assert level_of(visit, "rounds: give more --seconds") is None
    assert level_of(replace(visit, decode_ms=(20.0,)), "time for 1 of 3 rounds") == "warning"


def test_moved_text_is_not_advised_where_its_quality_was_not_measured(visit: Visit) -> None:
    (unknown,) = (e for e in settings(replace(visit, quality=None)) if e.name == "reuse")
    assert unknown.value == "exact"
    assert "was not measured; give more --seconds" in unknown.why


def test_reuse_follows_speed_quality_and_certification(visit: Visit) -> None:
    assert value_of(visit, "reuse") == "auto"
    bad = MovedQuality(mean_kl=0.2, top1_ratio=0.8)
    assert value_of(replace(visit, quality=bad), "reuse") == "exact"
    assert level_of(replace(visit, quality=bad), "0.200 nats") == "note"
    lucky = (reading(64, 0.4), *(reading(each.num_tokens, 0.9) for each in visit.readings[1:]))
    assert value_of(replace(visit, readings=lucky), "reuse") == "exact"
    fixed = replace(visit, model=replace(visit.model, move_refusal="no rotation explains it"))
    assert value_of(fixed, "reuse") == "exact"
    assert level_of(fixed, "no rotation explains it") == "note"


def test_memory_leaves_room_and_says_what_it_holds(visit: Visit) -> None:
    assert value_of(visit, "max_cache_bytes") == 4 * GIB
    why = next(each.why for each in settings(visit) if each.name == "max_cache_bytes")
    assert f"{4 * GIB // 20_000} tokens" in why
    assert value_of(visit, "kv_cache_bits") == 16
    little = replace(visit, machine=replace(visit.machine, available_bytes=100 * MIB))
    assert value_of(little, "max_cache_bytes") == 40 * MIB
    assert value_of(little, "kv_cache_bits") == 16
    unknown = replace(visit, machine=replace(visit.machine, available_bytes=None))
    assert value_of(unknown, "max_cache_bytes") == 2 * GIB


def test_a_gpu_has_its_cache_in_host_memory(visit: Visit) -> None:
    assert "host memory" not in str(settings(visit))
    far = replace(visit.machine, device="cuda")
    assert "40% of 10.0 GiB of host memory" in str(settings(replace(visit, machine=far)))


def test_a_disk_is_advised_where_loading_beats_computing(visit: Visit) -> None:
    disk = TierSpeed("disk", 1e9, 1e9, answer_ms=0.1, free_bytes=100 * GIB)
    fast = replace(visit, tiers=(*visit.tiers, disk))
    assert value_of(fast, "disk_cache_dir", disk_dir="/cache") == "/cache"
    assert value_of(fast, "max_disk_bytes", disk_dir="/cache") == 50 * GIB
    assert value_of(fast, "tier_deadline_ms", disk_dir="/cache") is None
    assert pays_from(fast)["disk"] == 64
    # 20 kB a token at 20 MB/s is a millisecond, as long as computing it takes.
    slow = replace(visit, tiers=(*visit.tiers, replace(disk, get_bytes_per_s=20e6)))
    assert value_of(slow, "disk_cache_dir", disk_dir="/cache") is None
    assert pays_from(slow)["disk"] is None
    assert level_of(slow, "text from disk does not pay up to 512 tokens") == "note"


def test_a_tier_that_needs_longer_than_the_deadline_gets_another_one(visit: Visit) -> None:
    far = TierSpeed("redis", 1e8, 1e8, answer_ms=20.0)
    visit = replace(visit, tiers=(*visit.tiers, far))
    assert value_of(visit, "cache_url", redis="redis://h") == "redis://h"
    load_ms = 20 + 1e3 * 4096 * 20_000 / 1e8
    assert value_of(visit, "tier_deadline_ms", redis="redis://h") == round(2 * load_ms)
    said = "4096 tokens take 839 ms to load; after the default 500 ms they would count as missing"
    assert said in str(settings(visit, redis="redis://h"))


def test_a_password_is_left_out_and_that_is_told(visit: Visit) -> None:
    visit = replace(visit, tiers=(*visit.tiers, TierSpeed("redis", 1e9, 1e9)))
    secret = settings(visit, redis="redis://:pa55@h:1?ttl_s=9")
    assert "pa55" not in str(secret)
    assert [each.value for each in secret if "left out" in each.why] == ["redis://h:1"]
    assert "left out" not in str(settings(visit, redis="redis://h:1"))


def test_the_need_of_a_secret_is_told(visit: Visit) -> None:
    visit = replace(visit, tiers=(*visit.tiers, TierSpeed("redis", 1e9, 1e9)))
    assert "cache_secret" in str(settings(visit, redis="redis://h"))
    assert "cache_secret" not in str(settings(visit))


def test_a_tier_that_fails_is_a_warning_and_no_advice(visit: Visit) -> None:
    gone = TierSpeed("redis", problem="redis://h: ConnectionError")
    visit = replace(visit, tiers=(*visit.tiers, gone))
    assert level_of(visit, "redis cannot be used: redis://h: ConnectionError") == "warning"
    assert value_of(visit, "cache_url", redis="redis://h") is None
    assert "redis" not in pays_from(visit)


@pytest.mark.parametrize(("packed_ms", "expected"), [(60.0, True), (95.0, None)])
def test_weights_are_rearranged_if_that_was_faster(
    visit: Visit, packed_ms: float, expected: bool | None
) -> None:
    packing = Packing(100.0, packed_ms, num_sequences=16, weight_bytes=5 * GIB)
    visit = replace(visit, packing=packing)
    assert value_of(visit, "prepack_weights") is expected
    assert value_of(visit, "max_cache_bytes") == (2 if expected else 4) * GIB


@pytest.fixture
def full_visit(visit: Visit) -> Visit:
    """One with every setting there is."""
    disk = TierSpeed("disk", 1e9, 1e8, answer_ms=0.1, free_bytes=100 * GIB)
    return replace(
        visit,
        machine=replace(visit.machine, load=9.0, num_threads=8),
        tiers=(*visit.tiers, disk, replace(disk, name="redis", free_bytes=None)),
        packing=Packing(100.0, 50.0, 16, weight_bytes=MIB),
    )


def test_all_advice_is_about_options_that_exist(full_visit: Visit) -> None:
    advised = settings(full_visit, "/cache", "redis://h")
    options = {each.name: each.value for each in advised if not each.is_variable}
    assert make_options(options).disk_cache_dir == "/cache"
    assert len(options) == len(advised) - 2 == 8


def test_json_has_it_all(full_visit: Visit, capsys: pytest.CaptureFixture[str]) -> None:
    advised = settings(full_visit, "/cache", "redis://h")
    print_json(full_visit, findings(full_visit), advised)
    page = json.loads(capsys.readouterr().out)
    assert page["is_certified"] is True
    assert page["pays_from_tokens"] == pays_from(full_visit)
    assert page["is_preliminary"] is True  # others use the cores
    assert len(page["measured"]["readings"]) == 4
    assert [each["name"] for each in page["settings"]] == [each.name for each in advised]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_page_is_coloured_on_a_terminal_only(
    full_visit: Visit,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    advised = settings(full_visit, "/cache", "redis://h")
    given = {"model": "my model", "dtype": "bfloat16"}
    print_page(given, full_visit, findings(full_visit), advised)
    shown = capsys.readouterr().out
    assert ("\x1b[33mWARNING" in shown) is is_terminal
    for each in findings(full_visit):
        assert each.text in shown
    for each in advised:
        assert each.why in shown
    assert "Recommended, preliminary" in shown
    flags = "--dtype bfloat16 --reuse auto --max-cache-bytes 3840MiB --kv-cache-bits 16"
    variables = "OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=4"
    assert f"{variables} kvboost serve --model 'my model' {flags}" in shown
    assert shown.rstrip().endswith("--prepack-weights")


def test_advice_is_preliminary_where_times_mean_little(
    visit: Visit, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (visit, replace(visit, decode_ms=(20.0,))):
        print_page({"model": "m"}, each, [], settings(each))
        assert ("preliminary" in capsys.readouterr().out) is (each is not visit)


def test_the_server_takes_the_line_that_is_printed(
    full_visit: Visit, capsys: pytest.CaptureFixture[str]
) -> None:
    advised = settings(full_visit, "/my cache", "redis://h")
    print_page({"model": "my model", "dtype": "bfloat16"}, full_visit, [], advised)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = vars(parser.parse_args(words[words.index("serve") + 1 :]))
    server, options = read_options(given, {})
    assert (server.model, server.dtype) == ("my model", "bfloat16")
    expected = {each.name: each.value for each in advised if not each.is_variable}
    assert options == make_options(expected)


def test_cores_of_a_container_are_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert machine.num_cores(tmp_path) == 8
    for limit, expected in {"max 100000": 8, "150000 100000": 2, "990000 100000": 8}.items():
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert machine.num_cores(tmp_path) == expected


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    meminfo = tmp_path / "meminfo"
    assert machine.available_bytes(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("96000\n")
    assert machine.available_bytes(meminfo, tmp_path) == 4_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(meminfo, tmp_path) == 8000 << 10
    assert machine.available_bytes(tmp_path / "none", tmp_path) is None

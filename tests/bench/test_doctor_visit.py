"""`kvboost doctor` as a user calls it; nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

import kvboost.bench.doctor.visit
from fakes import byte_tokenizer
from kvboost.bench.doctor import tier_speed
from kvboost.bench.doctor.quality import moved_quality, prompts
from kvboost.bench.doctor.rounds import LENGTHS, Rounds, fitting_lengths
from kvboost.build import build as build_parts
from kvboost.cli import main as cli
from kvboost.config import make_options
from kvboost.core import KVGeometry, PlaneGroup
from kvboost.errors import ConfigError
from kvboost.models import certify
from kvboost.models.certify import Rotations
from kvboost.models.hf import HFModel
from kvboost.policy.cost import Work
from kvboost.tiers.redis import RedisTier
from servers import free_port, redis_server
from tiny_models import REFUSED, build, save

GEOMETRY = KVGeometry(2, (PlaneGroup((0, 1, 2, 3), 2, 16),), "float32", 4)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["doctor", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert "round 1:" in shown.err
    page: dict[str, Any] = json.loads(shown.out)
    return page


def check(page: dict[str, Any], disk: Path) -> None:
    """What holds for every model on every machine."""
    measured = page["measured"]
    readings, num_rounds = measured["readings"], len(measured["decode_ms"])
    lengths = [each["num_tokens"] for each in readings]
    assert page["is_certified"] is True
    assert lengths == list(LENGTHS[: len(lengths)])
    assert len(lengths) >= 2
    for each in readings:
        times = [each[f"{way}_ms"] for way in ("full", "cold", "exact", "moved")]
        assert {len(taken) for taken in times} == {len(each["is_moved"])} == {num_rounds}
        assert min(min(taken) for taken in times) > 0
    assert [each["name"] for each in measured["tiers"]] == ["memory", "disk"]
    for tier in measured["tiers"]:
        assert not tier["problem"]
        assert min(tier["put_bytes_per_s"], tier["get_bytes_per_s"]) > 0
    check_conclusions(page, str(disk))


def check_conclusions(page: dict[str, Any], disk: str) -> None:
    """What is said agrees with itself."""
    starts, texts = page["pays_from_tokens"], [each["text"] for each in page["findings"]]
    assert starts.keys() == {"exact", "moved", "disk"}
    for what, start in {"moved text": starts["moved"], "text from disk": starts["disk"]}.items():
        said = "does not pay" if start is None else f"pays from {start} tokens"
        assert sum(text.startswith(f"{what} {said}") for text in texts) == 1
    advised = {each["name"]: each["value"] for each in page["settings"] if not each["is_variable"]}
    options = make_options(advised)
    assert advised.keys() >= {"reuse", "max_cache_bytes", "kv_cache_bits"}
    assert options.disk_cache_dir in (None, disk)
    model = page["measured"]["model"]
    assert 0 < model["int8_bytes_per_token"] < model["bytes_per_token"]
    assert f"holds {options.max_cache_bytes // model['bytes_per_token']} tokens" in str(page)


@pytest.mark.model
def test_a_real_model(smol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", smol, "--dtype", "float32", "--seconds", "3"]
    page = run(capsys, *arguments, "--disk-cache-dir", str(tmp_path))
    check(page, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it takes away what it brought
    assert page["measured"]["model"]["bytes_per_token"] == 30 * 2 * 3 * 64 * 4


@pytest.mark.tiny
def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    model = save(tmp_path / "model")
    arguments = ["--model", model, "--dtype", "bfloat16", "--seconds", "3"]
    page = run(capsys, *arguments, "--disk-cache-dir", str(disk))
    check(page, disk)
    assert page["measured"]["model"]["dtype"] == "bfloat16"
    assert [str(each) for each in tmp_path.iterdir()] == [model]  # nor does a folder stay
    assert page["measured"]["model"]["move_refusal"] == ""


@pytest.mark.tiny
def test_quality_is_measured_also_where_moved_text_does_not_pay() -> None:
    hosted = HFModel(build("llama", {}))
    parts = build_parts(make_options({}), hosted, frozenset())
    tokenizer = byte_tokenizer()
    num_tokens = len(prompts(tokenizer)[-1])
    full, moved = Work.of(num_tokens, num_tokens, 0), Work.of(num_tokens, 200, num_tokens - 200)
    for _ in range(8):
        parts.cost.observe(full, 1.0)
        parts.cost.observe(moved, 1e3)
    assert not parts.cost.pays(moved, full, 1.0)
    quality = moved_quality(parts, tokenizer)
    hosted.release()
    assert quality is not None
    assert quality.mean_kl > 0
    assert 0 <= quality.top1_ratio <= 1


@pytest.mark.tiny
def test_only_a_rotation_that_is_not_found_is_a_refusal_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_rotation = Rotations(refusal="no rotation explains it")
    monkeypatch.setattr(certify, "measure_rotations", lambda *_: no_rotation)
    page = run(capsys, "--model", save(tmp_path / "model"), "--seconds", "1")
    assert page["measured"]["model"]["move_refusal"] == "no rotation explains it"
    assert page["measured"]["quality"] is None
    assert page["settings"][0]["value"] == "exact"


def test_a_model_that_reads_too_little() -> None:
    with pytest.raises(ConfigError, match="context is 100 tokens"):
        Rounds(cast("Any", None), byte_tokenizer(), longest=100)


@pytest.mark.tiny
def test_the_page_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "model")
    assert cli.main(["doctor", "--model", model, "--seconds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "is certified" in shown
    assert "Recommended" in shown
    assert "kvboost serve --model" in shown


@pytest.mark.tiny
def test_a_model_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, differences, reason = next(iter(REFUSED.values()))
    made = lambda *_: (build(kind, differences), byte_tokenizer())  # noqa: E731
    monkeypatch.setattr(kvboost.bench.doctor.visit, "load_or_tell", made)
    assert cli.main(["doctor", "--model", "any", "--json"]) == 1
    page = json.loads(capsys.readouterr().out)
    assert page["is_certified"] is False
    assert [each["level"] for each in page["findings"]] == ["warning"]
    assert reason in page["findings"][0]["text"]
    assert page["settings"] == []


def test_lengths_fit_time_and_model() -> None:
    assert fitting_lengths(1e-9, 40, None) == list(LENGTHS)
    assert fitting_lengths(1e-9, 40, 1024) == [64, 128, 256, 512]
    assert fitting_lengths(1e-3, 40, None) == [64, 128, 256, 512, 1024, 2048]
    assert fitting_lengths(10.0, 40, None) == [64, 128]


def test_every_tier_gives_back_what_it_got(tmp_path: Path) -> None:
    rounds = tier_speed.make_frames(GEOMETRY, 128)
    keys = [key for frames in rounds for key in frames]
    assert len(set(keys)) == len(keys) == tier_speed.NUM_ROUNDS * tier_speed.MOST_PER_ROUND
    for speed in (tier_speed.memory_speed(rounds), tier_speed.disk_speed(str(tmp_path), rounds)):
        assert not speed.problem
        assert speed.get_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    speed = tier_speed.disk_speed(str(tmp_path / "file"), tier_speed.make_frames(GEOMETRY, 128))
    assert "file" in speed.problem


def test_a_server_that_is_not_there() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    speed = tier_speed.redis_speed(url, tier_speed.make_frames(GEOMETRY, 128))
    assert "redis://127.0.0.1" in speed.problem
    assert "secret" not in speed.problem


@pytest.mark.servers
def test_a_server_is_left_as_it_was() -> None:
    rounds = tier_speed.make_frames(GEOMETRY, 128)
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        speed = tier_speed.redis_speed(url, rounds)
        tier = RedisTier(url)
        assert tier.get([key for frames in rounds for key in frames]) == {}
        tier.close()
    assert not speed.problem
    assert speed.answer_ms > 0

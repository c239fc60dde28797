"""`kvboost doctor --device cuda`: what a user attaches to an issue."""

from __future__ import annotations

import json

import pytest
import torch

import kvboost.bench.doctor.device
import kvboost.bench.doctor.visit
from device.pretended import pretended, to_device
from fakes import byte_tokenizer
from kvboost.cli import main as cli
from tiny_models import build

pytestmark = pytest.mark.device


def test_one_page_says_what_a_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pretended(total_bytes=1 << 30) as device:
        loaded = to_device(build("llama", {}).to(torch.bfloat16), device), byte_tokenizer()
        monkeypatch.setattr(kvboost.bench.doctor.visit, "load_or_tell", lambda *_: loaded)
        monkeypatch.setattr(kvboost.bench.doctor.device, "NUM_NEW", 2)
        monkeypatch.setattr(kvboost.bench.doctor.device, "NUM_TIMES", 1)
        arguments = ["--model", "any", "--device", "cuda", "--seconds", "1"]
        assert cli.main(["doctor", "--json", *arguments]) == 0
    page = json.loads(capsys.readouterr().out)
    seen = page["measured"]["device"]
    assert seen["name"] == "pretended"
    assert seen["capability"] == "9.0"
    assert seen["total_bytes"] == 1 << 30
    assert "sequences in one kernel" in seen["attention"]
    assert seen["copy_bytes_per_s"].keys() == {
        "pageable to device",
        "pageable to host",
        "pinned to device",
        "pinned to host",
    }
    assert [step["num_answers"] for step in seen["steps"]] == [1, 16]
    assert all(step["engine_ms"] > 0 and step["transformers_ms"] > 0 for step in seen["steps"])
    texts = [each["text"] for each in page["findings"]]
    assert sum(text.startswith("a decode step at batch size") for text in texts) == 2
